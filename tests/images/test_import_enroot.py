"""Import by Enroot: with a stand-in that tells how it was called, and with the real one where it is."""

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
    """Return the directory of its records: its arguments and its environment."""
    return stand_in.with_name("calls")


@pytest.fixture
def stand_in(tmp_path: Path, tiny_rootfs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory with a program of Enroot's name, which writes down how it was called."""
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


def replace(stand_in: Path, script: str) -> None:
    (stand_in / "enroot").write_text(f"#!/bin/sh\n{script}\n")


def test_enroot_gets_uri_options_and_directories(calls: Path, tiny_image: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    options = ImportOptions(plain_http=True, compression="zstd", temp_dir=tmp_path / "work")
    made = import_image(Reference.parse(tiny_image), tmp_path / "images/tiny.sqsh", options)
    words = (calls / "argv").read_text().splitlines()
    host, _, name = tiny_image.partition("/")
    assert words[:2] == ["import", "-o"]
    # As it was looked up, even if the tag moves meanwhile.
    assert words[3:] == [f"docker://{host}#{name.partition(':')[0]}:{made.digest}"]
    # It is written under another name beside its own.
    assert Path(words[2]).parent == made.path.parent
    assert words[2] != str(made.path)
    given = dict(
        line.split("=", 1) for line in (calls / "environment").read_text().splitlines() if "=" in line
    )
    assert given["ENROOT_SQUASH_OPTIONS"].startswith(" ".join(SQUASH_OPTIONS["zstd"]))
    assert Path(given["ENROOT_TEMP_PATH"]).parent == tmp_path / "work"
    # Its layers need room too, and go with the rest.
    assert Path(given["ENROOT_CACHE_PATH"]).parent == Path(given["ENROOT_TEMP_PATH"])
    assert [path for path in Path(os.environ["HOME"]).rglob("*") if path.is_file()] == []
    assert given["ENROOT_ALLOW_HTTP"] == "yes"
    assert made.sidecar
    assert made.sidecar.made_by.startswith("slipway ")
    assert "enroot 4.1.2" in made.sidecar.made_by
    assert (made.sidecar.config.env, made.sidecar.config.workdir) == (ENV, WORKDIR)
    assert read_superblock(made.path).compression == "zstd"
    assert list((tmp_path / "work").iterdir()) == []
    assert {path.name for path in made.path.parent.iterdir()} == {"tiny.sqsh", "tiny.sqsh.json"}


def test_skopeo_takes_over_where_enroot_fails(stand_in: Path, tiny_image: str, tmp_path: Path) -> None:
    need("umoci")
    replace(stand_in, "echo '[ERROR] Could not process JSON input' >&2\nexit 1")
    made = import_image(Reference.parse(tiny_image), tmp_path / "tiny.sqsh", PLAIN)
    assert made.sidecar
    assert "umoci" in made.sidecar.made_by
    with pytest.raises(UserError) as raised:
        by_it = ImportOptions(plain_http=True, via="enroot", force=True)
        import_image(Reference.parse(tiny_image), tmp_path / "tiny.sqsh", by_it)
    assert "enroot failed with exit code 1" in raised.value.message
    assert "enroot: Could not process JSON input" in raised.value.message
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"tiny.sqsh", "tiny.sqsh.json"}


def test_an_image_that_only_enroot_misses_is_imported(
    stand_in: Path, tiny_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is there: nobody is told that there is none."""
    need("umoci")
    replace(stand_in, "echo '[ERROR] URL http://x/v2/y returned error code: 404 Not Found' >&2\nexit 1")
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
    made = import_image(Reference.parse(f"oci:{tiny_layout}:1"), tmp_path / "tiny.sqsh")
    assert made.sidecar
    assert "skopeo" in made.sidecar.made_by
    assert not (calls / "argv").exists()


def test_a_missing_enroot_runner_is_named_with_its_extra(
    stand_in: Path, tiny_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.images.backends._has_runner", lambda: False)
    made = import_image(Reference.parse(tiny_image), tmp_path / "tiny.sqsh", PLAIN)
    assert "pip install 'slipway[containers]'" in made.notes[0]
    assert made.sidecar
    assert "umoci" in made.sidecar.made_by
    with pytest.raises(UserError, match="enroot-py, which is not installed"):
        import_image(Reference.parse(tiny_image), tmp_path / "b.sqsh", ImportOptions(via="enroot"))


def test_an_unknown_digest_is_reused_by_name(
    stand_in: Path, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", stand_ins(stand_in, "mksquashfs", "env", "setpriv"))
    source = Reference.parse("dockerd://tiny:1")
    made = import_image(source, tmp_path / "tiny.sqsh")
    assert not made.reused
    assert made.digest is None
    assert (calls / "argv").read_text().splitlines()[3] == "dockerd://tiny:1"
    again = import_image(source, tmp_path / "tiny.sqsh")
    assert again.reused
    assert "reused by its name" in again.notes[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_enroot_ends_with_the_import(
    stand_in: Path, tiny_image: str, tmp_path: Path, number: signal.Signals
) -> None:
    mark, images = tmp_path / "mark", tmp_path / "images"
    # As Enroot does: a shell, and a program that it waits for.
    replace(stand_in, f'printf half > "$3"\nsleep 1000 &\necho $! > {mark}\nwait')
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
    """The record is of the image that was looked up, and so is the file."""
    need("enroot", "skopeo", "umoci", "jq", "parallel")
    layouts = {}
    for version in ("one", "two"):
        root = shutil.copytree(tiny_rootfs, tmp_path / version, symlinks=True)
        (root / "etc/version").write_text(version)
        layouts[version] = make_layout(root, tmp_path / f"layout-{version}")
    source = registry.push(layouts["one"], "move/tiny")
    look_up = backends.look_up

    def moved(*given: Any) -> Any:
        found = look_up(*given)
        registry.push(layouts["two"], "move/tiny")
        return found

    monkeypatch.setattr(backends, "look_up", moved)
    options = ImportOptions(via="enroot", plain_http=True)
    made = import_image(Reference.parse(source), tmp_path / "tiny.sqsh", options)
    assert run("unsquashfs", "-cat", made.path, "etc/version") == "one"
    again = look_up("skopeo", Reference.parse(source), Access(plain_http=True)).digest
    assert made.digest != again, "the tag has moved"


@pytest.mark.pyxis
def test_both_backends_make_the_same_image(tiny_image: str, tmp_path: Path) -> None:
    need("enroot", "skopeo", "umoci", "jq", "parallel")
    listed, starts = [], []
    for via in ("enroot", "skopeo"):
        target = tmp_path / f"{via}.sqsh"
        made = import_image(Reference.parse(tiny_image), target, ImportOptions(via=via, plain_http=True))
        assert made.sidecar
        assert made.sidecar.config.entrypoint == ENTRYPOINT
        lines = run("unsquashfs", "-lln", target).splitlines()
        # Names, owners and rights; the times of those that an import writes differ.
        listed.append([(line.split()[:2], line.partition("squashfs-root")[2]) for line in lines])
        starts.append(run("unsquashfs", "-cat", target, "etc/environment"))
        name = f"slipway-{os.getpid()}-{via}"
        run("enroot", "create", "--name", name, target)
        try:
            assert run("enroot", "start", name, "/bin/sh", "-c", "pwd").splitlines()[-1] == WORKDIR
        finally:
            run("enroot", "remove", "--force", name)
    assert listed[0] == listed[1]
    assert starts[0] == starts[1] == "".join(f"{word}\n" for word in ENV)
