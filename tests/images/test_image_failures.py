"""Failures of `slipway image`: it names the next step, exits with 2, and leaves nothing behind."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.app import main
from tests.images.tiny import PASSWORD, USER, Registry, free_port, need, run

Capsys = pytest.CaptureFixture[str]

# What an import without Enroot takes, and what those programs start themselves.
IMPORTERS = ("skopeo", "umoci", "mksquashfs")
OTHERS = ("unsquashfs", "setpriv", "git", "sh")


class Place:
    """The directories where images go and where they are made, both empty."""

    def __init__(self, directory: Path) -> None:
        self.images, self.work = directory / "images", directory / "work"
        for path in (self.images, self.work):
            path.mkdir()

    @property
    def target(self) -> Path:
        return self.images / "tiny.sqsh"

    def imported(self, source: str, *words: str) -> list[str]:
        where = ["--output", str(self.target), "--temp-dir", str(self.work)]
        return ["import", source, *where, "--via", "skopeo", "--plain-http", *words]

    def left(self) -> list[Path]:
        return [path for directory in (self.images, self.work) for path in directory.rglob("*")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "place").mkdir()
    return Place(tmp_path / "place")


# Mounted where nobody else sees it; afterwards it tells all that is on it. 99: that is not allowed here.
_SMALL_DISK = """
mount -t tmpfs -o size=8m tmpfs "$1" && cd "$1" || exit 99
mkdir images work
eval "$2"
shift 2
"$@" >&2
code=$?
find images work -mindepth 1 -print -type f -exec cat {} \\;
exit $code
"""


def refused_on_small_disk(point: Path, before: str, *words: str) -> tuple[str, str]:
    """Return the errors of a command on a disk of 8 MB, and the files that it leaves there.

    Parameters
    ----------
    before
        What a shell does there first.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    point.mkdir()
    command = [sys.executable, "-m", "launcher.cli.app", "image", *words]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _SMALL_DISK, "sh", str(point), before, *command],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    if done.returncode == 99:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr, done.stdout


def refused(capsys: Capsys, *words: str) -> str:
    """Return the errors of a command that is refused."""
    code = main(["image", *words])
    output = capsys.readouterr()
    assert code == 2, output
    assert "Traceback" not in output.err
    return output.err


def with_file(layout: Path, directory: Path, content: bytes) -> str:
    """An image like that of a layout, with one more file in it."""
    shutil.copytree(layout, directory / "layout")
    (directory / "more").write_bytes(content)
    image = f"{directory / 'layout'}:1"
    run("umoci", "insert", "--rootless", "--image", image, directory / "more", "/more")
    return f"oci:{image}"


@pytest.mark.parametrize("lacking", IMPORTERS)
def test_a_missing_program_is_named(
    capsys: Capsys,
    place: Place,
    tiny_layout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lacking: str,
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in (*IMPORTERS, *OTHERS):
        found = shutil.which(name)
        if found and name != lacking:
            (programs / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(programs))
    message = refused(capsys, *place.imported(f"oci:{tiny_layout}:1"))
    package = {"mksquashfs": "squashfs-tools"}.get(lacking, lacking)
    assert lacking in message
    assert f"apt-get install {package}\n" in message
    assert not place.left()


def test_missing_builders_are_named(
    capsys: Capsys, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    message = refused(capsys, "build", "nemo", "--images-dir", str(place.images))
    assert all(engine in message for engine in ("docker", "podman", "buildah"))
    assert "apt-get install" in message
    assert not place.left()


def test_too_little_space_is_reported_before_the_import(
    tiny_layout: Path, tmp_path: Path, place: Place
) -> None:
    words = ["--output", "images/tiny.sqsh", "--temp-dir", str(place.work), "--via", "skopeo"]
    fill = "head -c 8300000 /dev/zero >full"
    message, left = refused_on_small_disk(tmp_path / "disk", fill, "import", f"oci:{tiny_layout}:1", *words)
    assert f"{tmp_path / 'disk' / 'images'}: the image needs about" in message
    assert re.search(r"needs about [\d.]+ MB there, and [\d.]+ .?B are free", message)
    assert "images_dir=DIR" in message, "the next step"
    assert (left, place.left()) == ("", [])


def test_a_disk_that_fills_while_unpacking_is_explained(
    tiny_layout: Path, tmp_path: Path, place: Place
) -> None:
    # It weighs nothing before.
    source = with_file(tiny_layout, tmp_path, bytes(2**25))
    words = ["--output", str(place.target), "--temp-dir", "work", "--via", "skopeo"]
    message, left = refused_on_small_disk(tmp_path / "disk", "", "import", source, *words)
    assert "no space is left" in message
    assert "--temp-dir" in message, "the next step"
    assert (left, place.left()) == ("", [])


def test_a_disk_that_fills_while_packing_is_explained(
    tiny_layout: Path, tmp_path: Path, place: Place
) -> None:
    # It weighs nothing before, and much as it is packed.
    source = with_file(tiny_layout, tmp_path, b"more" * 2**23)
    words = ["--output", "images/tiny.sqsh", "--temp-dir", str(place.work), "--compression", "none"]
    before = "echo what was there >images/tiny.sqsh"
    message, left = refused_on_small_disk(
        tmp_path / "disk", before, "import", source, *words, "--via", "skopeo"
    )
    assert "no space is left" in message
    assert "images_dir=" in message, "the next step"
    assert (left, place.left()) == ("images/tiny.sqsh\nwhat was there\n", [])


@pytest.mark.parametrize("password", [None, "not it"])
def test_a_refused_login_is_explained(
    capsys: Capsys,
    place: Place,
    guarded_registry: Registry,
    tiny_layout: Path,
    tmp_path: Path,
    password: str | None,
) -> None:
    image = guarded_registry.push(tiny_layout, "team/failures", credentials=f"{USER}:{PASSWORD}")
    auth = tmp_path / "auth.json"
    login = base64.b64encode(f"{USER}:{password}".encode()).decode()
    auth.write_text(json.dumps({"auths": {guarded_registry.host: {"auth": login}} if password else {}}))
    message = refused(capsys, *place.imported(image, "--authfile", str(auth)))
    assert "refuses access" in message
    assert f"skopeo login {guarded_registry.host}" in message or "skopeo login REGISTRY" in message
    assert login not in message
    assert "not it" not in message
    whose = "without a login" if password is None else f"as {USER}, of {auth}"
    assert f"the registry was asked {whose}\n" in message
    assert not place.left()


def test_an_unreachable_registry_is_explained(capsys: Capsys, place: Place) -> None:
    need(*IMPORTERS)
    message = refused(capsys, *place.imported(f"127.0.0.1:{free_port()}/team/tiny:1"))
    assert "cannot be reached" in message
    assert "curl" in message, "the next step"
    assert not place.left()


def test_a_missing_image_is_explained(
    capsys: Capsys, place: Place, registry: Registry, tiny_image: str
) -> None:
    message = refused(capsys, *place.imported(f"{registry.host}/team/tiny:0.0"))
    assert "no such image" in message
    assert "team/tiny has no tag 0.0 (of " in message and "nearest: 1\n" in message
    assert not place.left()
    message = refused(capsys, *place.imported(f"{registry.host}/team/nothing_of_this_name:1"))
    assert "no such image" in message and "or it is private" in message and "without a login" in message


@pytest.fixture(scope="module")
def whole(tiny_rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("mksquashfs", "unsquashfs")
    image = tmp_path_factory.mktemp("whole") / "whole.sqsh"
    run("mksquashfs", tiny_rootfs, image, "-quiet", "-no-progress", "-noappend", "-all-root")
    return image


def broken(kind: str, whole: Path, directory: Path) -> Path:
    image = directory / "image.sqsh"
    content = whole.read_bytes()
    image.write_bytes(
        {"no squashfs": b"PK\x03\x04" * 9999, "empty": b"", "truncated": content[: len(content) // 2]}[kind]
    )
    return image


@pytest.mark.parametrize("verb", ["inspect", "verify"])
@pytest.mark.parametrize("kind", ["no squashfs", "empty", "truncated"])
def test_an_incomplete_squashfs_is_refused(
    capsys: Capsys, whole: Path, tmp_path: Path, kind: str, verb: str
) -> None:
    image = broken(kind, whole, tmp_path)
    before = image.read_bytes()
    message = refused(capsys, verb, str(image))
    assert str(image) in message
    assert {"no squashfs": "not a squashfs", "empty": "empty", "truncated": "cut short"}[kind] in message
    assert "slipway image" in message, "the next step"
    assert image.read_bytes() == before
    assert not list((tmp_path / "home").iterdir())


@pytest.mark.parametrize("kind", ["no squashfs", "truncated"])
def test_a_launch_with_a_broken_image_is_refused(
    capsys: Capsys, whole: Path, tmp_path: Path, kind: str
) -> None:
    image = broken(kind, whole, tmp_path)
    words = [
        "training=gpt3/126m",
        "cluster=bcm",
        f"container={image}",
        f"base_results_dir={tmp_path}/results",
    ]
    code = main(["launch", *words])
    output = capsys.readouterr()
    assert code == 2, output
    assert f"container={str(image)!r}" in output.err
    assert not (tmp_path / "results").exists()
