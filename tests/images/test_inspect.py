"""`slipway image list`, `inspect` and `verify` on squashfs files that mksquashfs made here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main
from launcher.errors import UserError
from launcher.images import probe
from launcher.images.importing import ImportOptions, import_image
from launcher.images.inspecting import inspect, installed_versions, verify
from launcher.images.references import Reference
from launcher.images.resolve import locate
from launcher.images.squashfs import read_superblock
from launcher.images.store import sidecar_path
from tests.images import tiny
from tests.images.tiny import need, run

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def imported(tiny_layout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny image as a squashfs with its record; not to be changed."""
    need("mksquashfs", "unsquashfs")
    target = tmp_path_factory.mktemp("store") / "tiny.sqsh"
    source = Reference.parse(f"oci:{tiny_layout}:1")
    return import_image(source, target, ImportOptions(compression="zstd", via="skopeo")).path


@pytest.fixture
def bare_image(imported: Path, tmp_path: Path) -> Path:
    """A copy of that file without its record, as a colleague may share it."""
    return Path(shutil.copy(imported, tmp_path / "theirs.sqsh"))


def ask_json(capsys: Capsys, verb: str, *words: object) -> Any:
    assert main(["image", verb, *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def pack(directory: Path, target: Path, *options: str) -> Path:
    need("mksquashfs", "unsquashfs")
    run("mksquashfs", directory, target, "-noappend", "-all-root", "-no-progress", *options)
    return target


def test_the_configuration_is_in_the_image_too(
    imported: Path, bare_image: Path, tmp_path: Path, capsys: Capsys
) -> None:
    with_record, without_record = (ask_json(capsys, "inspect", image) for image in (imported, bare_image))
    fields = ("env", "workdir", "entrypoint", "cmd", "labels", "size", "compression", "created", "block_size")
    assert {name: without_record[name] for name in fields} == {name: with_record[name] for name in fields}
    assert without_record["env"] == dict(word.split("=", 1) for word in tiny.ENV)
    assert (without_record["workdir"], tuple(without_record["entrypoint"])) == (tiny.WORKDIR, tiny.ENTRYPOINT)
    assert (tuple(without_record["cmd"]), without_record["labels"]) == (tiny.COMMAND, tiny.LABELS)
    assert (without_record["compression"], without_record["digest"]) == ("zstd", None)
    assert with_record["digest"].startswith("sha256:")


def test_inspect_and_list_print_tables(imported: Path, capsys: Capsys) -> None:
    assert main(["image", "inspect", "tiny", "--images-dir", str(imported.parent)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    assert lines["workdir"] == tiny.WORKDIR
    assert lines["compression"] == "zstd, blocks of 128 KiB"
    assert main(["image", "list", "--images-dir", str(imported.parent)]) == 0
    head, row = (line.split("  ") for line in capsys.readouterr().out.splitlines())
    assert [cell.strip() for cell in head if cell][:3] == ["IMAGE", "SIZE", "COMPRESSION"]
    assert row[0] == "tiny.sqsh" and "zstd" in row


def test_a_python_without_its_library_is_explained() -> None:
    """Debian's python3-minimal has no `json`."""
    program = f"import runpy, sys; sys.modules['json'] = None; runpy.run_path({probe.__file__!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    (message,) = done.stderr.splitlines()
    assert message.startswith("it is a Python without its standard library")


def test_volumes_are_shown(imported: Path, tmp_path: Path, capsys: Capsys) -> None:
    image = Path(shutil.copy2(imported, tmp_path / "tiny.sqsh"))
    record = json.loads(sidecar_path(imported).read_text())
    record["config"]["volumes"] = ["/data", "/two words"]
    sidecar_path(image).write_text(json.dumps(record))
    assert main(["image", "inspect", str(image)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    assert lines["volumes"] == "/data '/two words'"


def test_secrets_of_an_image_are_not_shown(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/etc/environment").write_text("HF_TOKEN=abcdefgh\nPATH=/bin\n")
    image = pack(tmp_path / "root", tmp_path / "a.sqsh")
    assert ask_json(capsys, "inspect", image)["env"] == {"HF_TOKEN": "***", "PATH": "/bin"}
    assert main(["image", "inspect", str(image)]) == 0
    assert "abcdefgh" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("-comp", "lz4"), "lz4"),
        (("-comp", "gzip", "-b", "1M"), "gzip"),
        (("-comp", "lzo", "-noD"), "lzo"),
        (("-noI", "-noD", "-noF", "-noX"), "none"),
    ],
)
def test_superblocks_are_read(tmp_path: Path, options: tuple[str, ...], name: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a").write_text("a" * 1000)
    image = pack(tmp_path / "root", tmp_path / "a.sqsh", *options)
    block = read_superblock(image)
    assert (block.compression, block.inodes) == (name, 2)
    assert block.block_size == (1 << 20 if "1M" in options else 1 << 17)
    assert block.used_bytes <= image.stat().st_size


def test_a_complete_image_passes(imported: Path, bare_image: Path) -> None:
    with_record = verify(imported, deep=True)
    assert with_record.is_whole and not with_record.notes
    assert [words.split()[0] for words in with_record.checked[1:]] == ["sha256", "its", "every"]
    without_record = verify(bare_image, deep=True)
    assert without_record.is_whole and len(without_record.notes) == 1


def test_files_of_any_name_are_decompressed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "some dir").mkdir(parents=True)
    for name in ("we[i]rd*", "back\\slash", " lead", "some dir/-x", "#", "ü"):
        (root / name).write_text(name * 1000)
    (root / "link").symlink_to("#")
    report = verify(pack(root, tmp_path / "a.sqsh"), deep=True)
    assert report.is_whole, report.problem
    size = sum(len(name.encode()) for name in ("we[i]rd*", "back\\slash", " lead", "some dir/-x", "#", "ü"))
    assert report.checked[-1] == f"every file: {size * 1000:,} bytes"


def break_image(image: Path, damage: str) -> Path:
    content = bytearray(image.read_bytes())
    (used_bytes,) = struct.unpack_from("<Q", content, 40)
    if damage == "cut short":
        del content[used_bytes - 100 :]
    elif damage == "another kind":
        content[:4] = b"\x7fELF"
    elif damage == "files in it":
        content[1000 : used_bytes // 2] = bytes(used_bytes // 2 - 1000)
    elif damage == "its tables":
        content[used_bytes - 600 : used_bytes - 100] = bytes(500)
    elif damage == "empty":
        content.clear()
    image.write_bytes(content)
    return image


@pytest.mark.parametrize(
    ("damage", "deep", "why"),
    [
        ("cut short", False, "cut short"),
        ("another kind", False, "not a squashfs image"),
        ("empty", False, "an empty file"),
        ("its tables", False, "its tables cannot be read"),
        ("files in it", True, "a file in it cannot be read"),
    ],
)
def test_a_broken_image_fails(bare_image: Path, capsys: Capsys, damage: str, deep: bool, why: str) -> None:
    break_image(bare_image, damage)
    assert main(["image", "verify", str(bare_image), *["--deep"] * deep]) == 2
    output = capsys.readouterr()
    assert why in output.err and "make it again" in output.err
    assert f"{bare_image}: not whole" in output.out


def test_changed_bytes_fail_the_checksum(imported: Path, bare_image: Path) -> None:
    shutil.copy(sidecar_path(imported), sidecar_path(bare_image))
    assert verify(bare_image).is_whole
    report = verify(break_image(bare_image, "files in it"))
    assert report.problem is not None and "its bytes have changed" in report.problem.message
    # The record of another file is not trusted.
    shutil.copy(imported, bare_image)
    record = json.loads(sidecar_path(bare_image).read_text())
    sidecar_path(bare_image).write_text(json.dumps(record | {"size": 7}))
    report = verify(bare_image)
    assert report.problem is not None and "not the record of this file" in report.problem.message


def test_the_whole_store_is_verified_by_default(imported: Path, tmp_path: Path, capsys: Capsys) -> None:
    store = tmp_path / "images"
    store.mkdir()
    for name in ("good", "bad"):
        shutil.copy(imported, store / f"{name}.sqsh")
    break_image(store / "bad.sqsh", "cut short")
    assert main(["image", "verify", "--images-dir", str(store), "--json"]) == 2
    outcomes = {Path(entry["path"]).stem: entry["is_whole"] for entry in json.loads(capsys.readouterr().out)}
    assert outcomes == {"good": True, "bad": False}
    assert {Path(entry["path"]).stem for entry in ask_json(capsys, "list", "--images-dir", store)} == set(
        outcomes
    )


def test_images_are_located_by_path_name_recipe_and_reference(imported: Path, tmp_path: Path) -> None:
    store = imported.parent
    for text in ("tiny", "tiny.sqsh", str(imported)):
        assert locate(text, store) == imported
    for text, message, hint in (
        ("tine", "there is no such image", "did you mean 'tiny'?"),
        (
            "nvcr.io/nvidia/nemo:24.07",
            "nvidia+nemo+24.07.sqsh is not in",
            "slipway image import nvcr.io#nvidia",
        ),
        ("megatron", "is not in", "slipway image build megatron:run"),
        (str(store / "tin.sqsh"), "no such file", "tiny.sqsh"),
    ):
        with pytest.raises(UserError, match=re.escape(message)) as raised:
            locate(text, store)
        assert hint in str(raised.value)


def make_python_root(directory: Path) -> Path:
    """Make a root file system with this machine's Python, and distributions that are metadata only."""
    modules = "__future__ email.parser importlib.metadata importlib.util json pathlib platform re sys"
    names = f"import {modules.replace(' ', ', ')}\n"
    names += "print(*[m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)])"
    interpreter = Path("/usr/bin/python3").resolve()
    if not interpreter.is_file():
        pytest.skip("needs Debian's Python")
    module_files = [Path(word) for word in run(interpreter, "-I", "-S", "-c", names).split()]
    binaries = [
        interpreter,
        *(path for path in module_files if path.suffix == ".so"),
        Path(shutil.which("env") or ""),
    ]
    linked = " ".join(run("ldd", path) for path in binaries).split()
    libraries = {Path(word) for word in linked if word.startswith("/") and not word.endswith(":")}
    for path in {*module_files, *binaries, *libraries}:
        (directory / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, directory / path.relative_to("/"))
    (directory / "usr/bin/python3").symlink_to(interpreter.name)
    site = directory / "opt/site"
    for name, version in (("torch", "2.13.0"), ("nemo_toolkit", "2.4.1"), ("megatron_core", "0.16.1")):
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)
        (site / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text("raise ImportError('there is no GPU')\n")
    (site / "torch/version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\n")
    (directory / "etc").mkdir(exist_ok=True)
    (directory / "etc/environment").write_text("PYTHONPATH=/opt/site\nPATH=/usr/bin:/bin\n")
    return directory


def need_mounts() -> None:
    need("squashfuse", "unshare")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse")


def test_versions_are_read_by_the_python_of_the_image(tmp_path: Path, capsys: Capsys) -> None:
    need_mounts()
    image = pack(make_python_root(tmp_path / "root"), tmp_path / "a.sqsh", "-comp", "lz4")
    mounts = Path("/proc/self/mounts").read_text()
    versions = ask_json(capsys, "inspect", image, "--deep")["installed"]
    assert versions["python"] == run("/usr/bin/python3", "--version").split()[1]
    assert {name: versions[name] for name in ("torch", "nemo", "megatron_core", "apex", "cuda")} == {
        "torch": "2.13.0",
        "nemo": "2.4.1",
        "megatron_core": "0.16.1",
        "apex": None,
        "cuda": "12.8",
    }
    assert Path("/proc/self/mounts").read_text() == mounts


def test_an_image_without_python_is_refused(imported: Path) -> None:
    need_mounts()
    with pytest.raises(UserError, match="its Python could not be started") as raised:
        installed_versions(imported, inspect(imported).config)
    assert "No such file or directory" in str(raised.value)


def test_missing_programs_that_start_an_image_are_named(
    imported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs squashfuse and unshare, or enroot, or apptainer"):
        installed_versions(imported, inspect(imported).config)


def test_a_missing_unsquashfs_is_reported(
    imported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capsys
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    details = ask_json(capsys, "inspect", imported)
    assert details["workdir"] == tiny.WORKDIR and "unsquashfs is missing" in details["notes"][0]
    assert ask_json(capsys, "verify", imported)[0]["is_whole"]
    assert main(["image", "verify", str(imported), "--deep"]) == 2
    assert "apt-get install squashfs-tools" in capsys.readouterr().err


def test_unreadable_files_of_an_image_are_ignored(tmp_path: Path) -> None:
    need("mksquashfs", "unsquashfs")
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/etc/os-release").symlink_to("os-release")
    (tmp_path / "root/etc/environment").symlink_to("environment")
    os.mkfifo(tmp_path / "root/etc/rc")
    run("mksquashfs", tmp_path / "root", tmp_path / "x.sqsh", "-quiet", "-no-progress")
    details = inspect(tmp_path / "x.sqsh")
    assert (details.release, details.source, details.config.env) == (None, None, ())


def test_a_signal_ends_an_inspection_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("mksquashfs", "unsquashfs")
    (tmp_path / "root").mkdir()
    run("mksquashfs", tmp_path / "root", tmp_path / "x.sqsh", "-quiet", "-no-progress")

    def handle_signal(*_: object) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        handler(signal.SIGTERM, None)

    monkeypatch.setattr("launcher.cli.image.installed_versions", handle_signal)
    with pytest.raises(SystemExit) as raised:
        main(["image", "inspect", str(tmp_path / "x.sqsh"), "--deep"])
    assert raised.value.code == 128 + signal.SIGTERM
