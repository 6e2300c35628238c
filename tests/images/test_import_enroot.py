"""Imports by Enroot: with a stand-in that records its calls, and with Enroot where it is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UserError
from launcher.images import backends
from launcher.images.importing import ImportOptions, import_image
from launcher.images.progress import ImageProgress
from launcher.images.references import Reference
from launcher.images.registry import Access
from launcher.images.squashfs import SQUASH_OPTIONS, read_superblock
from tests.images.importer import end, is_running, stand_ins, start, wait_for
from tests.images.tiny import ENTRYPOINT, ENV, WORKDIR, Registry, make_layout, need, run

pytest.importorskip("enroot", reason="needs the containers extra")

PLAIN = ImportOptions(plain_http=True)


@pytest.fixture
def calls(stand_in: Path) -> Path:
    """Return the directory where the stand-in records its arguments and its environment."""
    return stand_in.with_name("calls")


@pytest.fixture
def stand_in(tmp_path: Path, tiny_rootfs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory with a program named enroot, which records its calls."""
    need("skopeo", "mksquashfs")
    directory = tmp_path / "stand_in"
    directory.mkdir()
    calls = tmp_path / "calls"
    calls.mkdir()
    script = f"""#!/bin/sh
if [ "$1" = import ]; then
    printf '%s\\n' "$@" > {calls}/argv
    env > {calls}/environment
    mksquashfs {shlex.quote(str(tiny_rootfs))} "$3" -all-root $ENROOT_SQUASH_OPTIONS > /dev/null
else
    echo 4.1.2
fi
"""
    (directory / "enroot").write_text(script)
    (directory / "enroot").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return directory


def replace_script(stand_in: Path, script: str) -> None:
    (stand_in / "enroot").write_text(f"#!/bin/sh\n{script}\n")


def test_enroot_gets_uri_options_and_directories(calls: Path, tiny_image: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    options = ImportOptions(plain_http=True, compression="zstd", temp_dir=tmp_path / "work")
    result = import_image(Reference.parse(tiny_image), tmp_path / "images/tiny.sqsh", options)
    words = (calls / "argv").read_text().splitlines()
    host, _, name = tiny_image.partition("/")
    assert words[:2] == ["import", "-o"]
    # Enroot gets the digest that was looked up, even if the tag moves meanwhile.
    assert words[3:] == [f"docker://{host}#{name.partition(':')[0]}:{result.digest}"]
    # Enroot writes to another name beside the target.
    assert Path(words[2]).parent == result.path.parent
    assert words[2] != str(result.path)
    environment = dict(
        line.split("=", 1) for line in (calls / "environment").read_text().splitlines() if "=" in line
    )
    assert environment["ENROOT_SQUASH_OPTIONS"].startswith(" ".join(SQUASH_OPTIONS["zstd"]))
    assert Path(environment["ENROOT_TEMP_PATH"]).parent == tmp_path / "work"
    # The layers need room too, and are removed with the other files.
    assert Path(environment["ENROOT_CACHE_PATH"]).parent == Path(environment["ENROOT_TEMP_PATH"])
    assert [path for path in Path(os.environ["HOME"]).rglob("*") if path.is_file()] == []
    assert environment["ENROOT_ALLOW_HTTP"] == "yes"
    assert result.sidecar
    assert result.sidecar.made_by.startswith("slipway ")
    assert "enroot 4.1.2" in result.sidecar.made_by
    assert (result.sidecar.config.env, result.sidecar.config.workdir) == (ENV, WORKDIR)
    assert read_superblock(result.path).compression == "zstd"
    assert list((tmp_path / "work").iterdir()) == []
    assert {path.name for path in result.path.parent.iterdir()} == {"tiny.sqsh", "tiny.sqsh.json"}


def test_skopeo_takes_over_where_enroot_fails(stand_in: Path, tiny_image: str, tmp_path: Path) -> None:
    need("umoci")
    replace_script(stand_in, "echo '[ERROR] Could not process JSON input' >&2\nexit 1")
    result = import_image(Reference.parse(tiny_image), tmp_path / "tiny.sqsh", PLAIN)
    assert result.sidecar
    assert "umoci" in result.sidecar.made_by
    with pytest.raises(UserError) as raised:
        options = ImportOptions(plain_http=True, via="enroot", force=True)
        import_image(Reference.parse(tiny_image), tmp_path / "tiny.sqsh", options)
    assert "enroot failed with exit code 1" in raised.value.message
    assert "enroot: Could not process JSON input" in raised.value.message
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"tiny.sqsh", "tiny.sqsh.json"}


def test_an_image_that_only_enroot_misses_is_imported(
    stand_in: Path, tiny_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image exists: no message says that there is none."""
    need("umoci")
    replace_script(
        stand_in, "echo '[ERROR] URL http://x/v2/y returned error code: 404 Not Found' >&2\nexit 1"
    )
    notes: list[str] = []
    monkeypatch.setattr(ImageProgress, "note", lambda _, text: notes.append(text))
    import_image(Reference.parse(tiny_image), tmp_path / "tiny.sqsh", PLAIN)
    note = notes[0]
    assert "Enroot does not find" in note and "and skopeo does\nimported without Enroot" in note
    assert "there is no such image" not in note


def test_images_that_enroot_does_not_read_go_to_skopeo(
    calls: Path, tiny_layout: Path, tmp_path: Path
) -> None:
    need("umoci")
    result = import_image(Reference.parse(f"oci:{tiny_layout}:1"), tmp_path / "tiny.sqsh")
    assert result.sidecar
    assert "skopeo" in result.sidecar.made_by
    assert not (calls / "argv").exists()


def test_a_missing_enroot_runner_is_named_with_its_extra(
    stand_in: Path, tiny_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.images.backends._has_runner", lambda: False)
    result = import_image(Reference.parse(tiny_image), tmp_path / "tiny.sqsh", PLAIN)
    assert "-m pip install " in result.notes[0]
    assert result.sidecar
    assert "umoci" in result.sidecar.made_by
    with pytest.raises(UserError, match="enroot-py, which is not installed"):
        import_image(Reference.parse(tiny_image), tmp_path / "b.sqsh", ImportOptions(via="enroot"))


def test_an_unknown_digest_is_reused_by_name(
    stand_in: Path, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", stand_ins(stand_in, "mksquashfs", "env", "setpriv"))
    source = Reference.parse("dockerd://tiny:1")
    result = import_image(source, tmp_path / "tiny.sqsh")
    assert not result.reused
    assert result.digest is None
    assert (calls / "argv").read_text().splitlines()[3] == "dockerd://tiny:1"
    second = import_image(source, tmp_path / "tiny.sqsh")
    assert second.reused
    assert "reused by its name" in second.notes[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_enroot_ends_with_the_import(
    stand_in: Path, tiny_image: str, tmp_path: Path, number: signal.Signals
) -> None:
    mark, images = tmp_path / "mark", tmp_path / "images"
    # Like Enroot: a shell, and a program that it waits for.
    replace_script(stand_in, f'printf half > "$3"\nsleep 1000 &\necho $! > {mark}\nwait')
    process = start(tiny_image, images / "tiny.sqsh", "plain")
    wait_for(mark, process)
    process.send_signal(number)
    end(process)
    helper = int(mark.read_text())
    while is_running(helper):
        pass
    assert not (images / "tiny.sqsh").exists()
    if number is signal.SIGTERM:
        assert list(images.iterdir()) == []


@pytest.mark.pyxis
def test_the_image_that_was_looked_up_is_imported_though_its_tag_moves(
    registry: Registry, tiny_rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the record and the file are those of the image that was looked up."""
    need("enroot", "skopeo", "umoci", "jq", "parallel")
    layouts = {}
    for version in ("one", "two"):
        root = shutil.copytree(tiny_rootfs, tmp_path / version, symlinks=True)
        (root / "etc/version").write_text(version)
        layouts[version] = make_layout(root, tmp_path / f"layout-{version}")
    source = registry.push(layouts["one"], "move/tiny")
    look_up = backends.look_up

    def look_up_and_move(*arguments: Any) -> Any:
        remote = look_up(*arguments)
        registry.push(layouts["two"], "move/tiny")
        return remote

    monkeypatch.setattr(backends, "look_up", look_up_and_move)
    options = ImportOptions(via="enroot", plain_http=True)
    result = import_image(Reference.parse(source), tmp_path / "tiny.sqsh", options)
    assert run("unsquashfs", "-cat", result.path, "etc/version") == "one"
    new_digest = look_up("skopeo", Reference.parse(source), Access(plain_http=True)).digest
    assert result.digest != new_digest, "the tag has moved"


@pytest.mark.pyxis
def test_both_backends_make_the_same_image(tiny_image: str, tmp_path: Path) -> None:
    need("enroot", "skopeo", "umoci", "jq", "parallel")
    listings, environments = [], []
    for via in ("enroot", "skopeo"):
        target = tmp_path / f"{via}.sqsh"
        result = import_image(Reference.parse(tiny_image), target, ImportOptions(via=via, plain_http=True))
        assert result.sidecar
        assert result.sidecar.config.entrypoint == ENTRYPOINT
        lines = run("unsquashfs", "-lln", target).splitlines()
        # Names, owners and modes: the times of files that an import writes differ.
        listings.append([(line.split()[:2], line.partition("squashfs-root")[2]) for line in lines])
        environments.append(run("unsquashfs", "-cat", target, "etc/environment"))
        name = f"slipway-{os.getpid()}-{via}"
        run("enroot", "create", "--name", name, target)
        try:
            assert run("enroot", "start", name, "/bin/sh", "-c", "pwd").splitlines()[-1] == WORKDIR
        finally:
            run("enroot", "remove", "--force", name)
    assert listings[0] == listings[1]
    assert environments[0] == environments[1] == "".join(f"{word}\n" for word in ENV)
