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

# The programs of an import without Enroot, and those that they start themselves.
IMPORTERS = ("skopeo", "umoci", "mksquashfs")
OTHERS = ("unsquashfs", "setpriv", "git", "sh")


class ImportPlace:
    """Two empty directories: one for images, and one in which they are made."""

    def __init__(self, directory: Path) -> None:
        self.images, self.work = directory / "images", directory / "work"
        for path in (self.images, self.work):
            path.mkdir()

    @property
    def target(self) -> Path:
        return self.images / "tiny.sqsh"

    def import_arguments(self, source: str, *words: str) -> list[str]:
        options = ["--output", str(self.target), "--temp-dir", str(self.work)]
        return ["import", source, *options, "--via", "skopeo", "--plain-http", *words]

    def leftovers(self) -> list[Path]:
        return [path for directory in (self.images, self.work) for path in directory.rglob("*")]


@pytest.fixture
def place(tmp_path: Path) -> ImportPlace:
    (tmp_path / "place").mkdir()
    return ImportPlace(tmp_path / "place")


# Mounts a disk that nobody else sees, and prints all its files at the end. 99: mounts are not allowed.
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


def errors_on_small_disk(point: Path, before: str, *words: str) -> tuple[str, str]:
    """Return the errors of a command on a disk of 8 MB, and the files that it leaves there.

    Parameters
    ----------
    before
        Shell command that runs there first.
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


def errors_of(capsys: Capsys, *words: str) -> str:
    """Return the errors of a command that is refused."""
    code = main(["image", *words])
    output = capsys.readouterr()
    assert code == 2, output
    assert "Traceback" not in output.err
    return output.err


def with_file(layout: Path, directory: Path, content: bytes) -> str:
    """Copy a layout, add a file to its image, and return the image's reference."""
    shutil.copytree(layout, directory / "layout")
    (directory / "more").write_bytes(content)
    image = f"{directory / 'layout'}:1"
    run("umoci", "insert", "--rootless", "--image", image, directory / "more", "/more")
    return f"oci:{image}"


@pytest.mark.parametrize("lacking", IMPORTERS)
def test_a_missing_program_is_named(
    capsys: Capsys,
    place: ImportPlace,
    tiny_layout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lacking: str,
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in (*IMPORTERS, *OTHERS):
        path = shutil.which(name)
        if path and name != lacking:
            (programs / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(programs))
    message = errors_of(capsys, *place.import_arguments(f"oci:{tiny_layout}:1"))
    package = {"mksquashfs": "squashfs-tools"}.get(lacking, lacking)
    assert lacking in message
    assert f"apt-get install {package}\n" in message
    assert not place.leftovers()


def test_missing_builders_are_named(
    capsys: Capsys, place: ImportPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    message = errors_of(capsys, "build", "nemo", "--images-dir", str(place.images))
    assert all(engine in message for engine in ("docker", "podman", "buildah"))
    assert "apt-get install" in message
    assert not place.leftovers()


def test_too_little_space_is_reported_before_the_import(
    tiny_layout: Path, tmp_path: Path, place: ImportPlace
) -> None:
    words = ["--output", "images/tiny.sqsh", "--temp-dir", str(place.work), "--via", "skopeo"]
    fill = "head -c 8300000 /dev/zero >full"
    message, files = errors_on_small_disk(tmp_path / "disk", fill, "import", f"oci:{tiny_layout}:1", *words)
    assert f"{tmp_path / 'disk' / 'images'}: the image needs about" in message
    assert re.search(r"needs about [\d.]+ MB there, and [\d.]+ .?B are free", message)
    assert "images_dir=DIR" in message, "the next step"
    assert (files, place.leftovers()) == ("", [])


def test_a_disk_that_fills_while_unpacking_is_explained(
    tiny_layout: Path, tmp_path: Path, place: ImportPlace
) -> None:
    # The file is small in its compressed layer.
    source = with_file(tiny_layout, tmp_path, bytes(2**25))
    words = ["--output", str(place.target), "--temp-dir", "work", "--via", "skopeo"]
    message, files = errors_on_small_disk(tmp_path / "disk", "", "import", source, *words)
    assert "no space is left" in message
    assert "--temp-dir" in message, "the next step"
    assert (files, place.leftovers()) == ("", [])


def test_a_disk_that_fills_while_packing_is_explained(
    tiny_layout: Path, tmp_path: Path, place: ImportPlace
) -> None:
    # The file is small in its compressed layer, and large in a squashfs without compression.
    source = with_file(tiny_layout, tmp_path, b"more" * 2**23)
    words = ["--output", "images/tiny.sqsh", "--temp-dir", str(place.work), "--compression", "none"]
    before = "echo what was there >images/tiny.sqsh"
    message, files = errors_on_small_disk(
        tmp_path / "disk", before, "import", source, *words, "--via", "skopeo"
    )
    assert "no space is left" in message
    assert "images_dir=" in message, "the next step"
    assert (files, place.leftovers()) == ("images/tiny.sqsh\nwhat was there\n", [])


@pytest.mark.parametrize("password", [None, "not it"])
def test_a_refused_login_is_explained(
    capsys: Capsys,
    place: ImportPlace,
    guarded_registry: Registry,
    tiny_layout: Path,
    tmp_path: Path,
    password: str | None,
) -> None:
    image = guarded_registry.push(tiny_layout, "team/failures", credentials=f"{USER}:{PASSWORD}")
    auth = tmp_path / "auth.json"
    login = base64.b64encode(f"{USER}:{password}".encode()).decode()
    auth.write_text(json.dumps({"auths": {guarded_registry.host: {"auth": login}} if password else {}}))
    message = errors_of(capsys, *place.import_arguments(image, "--authfile", str(auth)))
    assert "refuses access" in message
    assert f"skopeo login {guarded_registry.host}" in message or "skopeo login REGISTRY" in message
    assert login not in message
    assert "not it" not in message
    identity = "without a login" if password is None else f"as {USER}, of {auth}"
    assert f"the registry was asked {identity}\n" in message
    assert not place.leftovers()


def test_an_unreachable_registry_is_explained(capsys: Capsys, place: ImportPlace) -> None:
    need(*IMPORTERS)
    message = errors_of(capsys, *place.import_arguments(f"127.0.0.1:{free_port()}/team/tiny:1"))
    assert "cannot be reached" in message
    assert "curl" in message, "the next step"
    assert not place.leftovers()


def test_a_missing_image_is_explained(
    capsys: Capsys, place: ImportPlace, registry: Registry, tiny_image: str
) -> None:
    message = errors_of(capsys, *place.import_arguments(f"{registry.host}/team/tiny:0.0"))
    assert "no such image" in message
    assert "team/tiny has no tag 0.0 (of " in message and "nearest: 1\n" in message
    assert not place.leftovers()
    message = errors_of(capsys, *place.import_arguments(f"{registry.host}/team/nothing_of_this_name:1"))
    assert "no such image" in message and "or it is private" in message and "without a login" in message


@pytest.fixture(scope="module")
def intact(tiny_rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("mksquashfs", "unsquashfs")
    image = tmp_path_factory.mktemp("whole") / "whole.sqsh"
    run("mksquashfs", tiny_rootfs, image, "-quiet", "-no-progress", "-noappend", "-all-root")
    return image


def write_broken(kind: str, intact: Path, directory: Path) -> Path:
    image = directory / "image.sqsh"
    content = intact.read_bytes()
    image.write_bytes(
        {"no squashfs": b"PK\x03\x04" * 9999, "empty": b"", "truncated": content[: len(content) // 2]}[kind]
    )
    return image


@pytest.mark.parametrize("verb", ["inspect", "verify"])
@pytest.mark.parametrize("kind", ["no squashfs", "empty", "truncated"])
def test_an_incomplete_squashfs_is_refused(
    capsys: Capsys, intact: Path, tmp_path: Path, kind: str, verb: str
) -> None:
    image = write_broken(kind, intact, tmp_path)
    before = image.read_bytes()
    message = errors_of(capsys, verb, str(image))
    assert str(image) in message
    assert {"no squashfs": "not a squashfs", "empty": "empty", "truncated": "cut short"}[kind] in message
    assert "slipway image" in message, "the next step"
    assert image.read_bytes() == before
    assert not list((tmp_path / "home").iterdir())


@pytest.mark.parametrize("kind", ["no squashfs", "truncated"])
def test_a_launch_with_a_broken_image_is_refused(
    capsys: Capsys, intact: Path, tmp_path: Path, kind: str
) -> None:
    image = write_broken(kind, intact, tmp_path)
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
