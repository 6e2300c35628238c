"""Imports at the same time, and imports that are interrupted: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.images.importing import import_image
from launcher.images.references import Reference
from launcher.images.scratch import is_locked, lock_image, lock_path
from launcher.images.squashfs import read_superblock
from launcher.images.store import list_images, read_sidecar, sidecar_path
from tests.images.importer import end, has_ended, is_running, start, wait_for, wrap_program
from tests.images.tiny import need


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    need("skopeo", "umoci", "mksquashfs", "setpriv")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    directory = tmp_path / "images"
    directory.mkdir()
    return directory


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory where imports work, and nothing else does."""
    directory = tmp_path / "work"
    directory.mkdir()
    # Of the candidates on one file system the first is taken.
    monkeypatch.setenv("ENROOT_TEMP_PATH", str(directory))
    return directory


# The program writes something, says which process it is, and then waits for its end.
_HANGING = 'for last; do :; done\nprintf half > "$2"\necho $$ > {mark}\nexec sleep 1000'


def test_ten_imports_at_once_import_once(tiny_layout: Path, images: Path, tmp_path: Path) -> None:
    environment = wrap_program(tmp_path / "bin", "mksquashfs", f"echo packed >> {tmp_path}/log")
    target = images / "tiny.sqsh"
    processes = [start(f"oci:{tiny_layout}:1", target, environment=environment) for _ in range(10)]
    outcomes = [end(process) for process in processes]
    assert [code for code, _, _ in outcomes] == [0] * 10, outcomes
    assert sorted(out.split()[0] for _, out, _ in outcomes) == ["made", *["reused"] * 9]
    assert len({out.split()[1] for _, out, _ in outcomes}) == 1
    assert (tmp_path / "log").read_text() == "packed\n"
    assert {path.name for path in images.iterdir()} == {"tiny.sqsh", "tiny.sqsh.json"}


_HOLDER = """
import os, signal, subprocess, sys
from pathlib import Path
from launcher.images.scratch import is_locked, lock_image, lock_path
with lock_image(Path(sys.argv[1]), print) as lock:
    child = subprocess.Popen(["sleep", "1000"], pass_fds=lock.descriptors, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lock_lasts_as_long_as_the_programs_that_inherit_it(images: Path) -> None:
    target = images / "tiny.sqsh"
    holder = subprocess.run([sys.executable, "-c", _HOLDER, str(target)], stdout=subprocess.PIPE, text=True)
    program = int(holder.stdout)
    try:
        assert holder.returncode == -signal.SIGKILL
        assert is_locked(target)
    finally:
        os.kill(program, signal.SIGKILL)
    while is_running(program):
        pass
    assert not is_locked(target)
    with lock_image(target, lambda who: pytest.fail(f"{who} has ended")) as lock:
        assert lock.certain and not lock.waited
    assert list(images.iterdir()) == []


def test_colleagues_may_lock_an_image_whatever_the_umask(images: Path) -> None:
    before = os.umask(0o077)
    try:
        with lock_image(images / "tiny.sqsh", print):
            assert lock_path(images / "tiny.sqsh").stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


def test_an_import_waits_for_the_record_of_another(tiny_layout: Path, images: Path) -> None:
    target = images / "tiny.sqsh"
    import_image(Reference.parse(f"oci:{tiny_layout}:1"), target)
    record = sidecar_path(target).read_text()
    # Another import leaves the image without a record for a moment.
    with lock_image(target, lambda who: None):
        sidecar_path(target).unlink()
        process = start(f"oci:{tiny_layout}:1", target)
        assert process.stderr
        assert any("waiting for it" in line for line in process.stderr)
        sidecar_path(target).write_text(record)
    code, out, err = end(process)
    assert (code, out.split()[0]) == (0, "reused"), err
    assert out.split()[1].startswith("sha256:")


def test_a_second_import_waits_and_names_the_first(tiny_layout: Path, images: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    environment = wrap_program(
        tmp_path / "bin", "mksquashfs", f"echo here > {tmp_path}/mark\nread line < {go}"
    )
    target = images / "tiny.sqsh"
    first = start(f"oci:{tiny_layout}:1", target, environment=environment)
    wait_for(tmp_path / "mark", first)
    # --force makes no difference: the first import's file is newer than the second's request.
    second = start(f"oci:{tiny_layout}:1", target, "force", environment=environment)
    assert second.stderr
    message = ""
    while "waiting for it" not in message:
        line = second.stderr.readline()
        assert line, message
        message += line
    assert f"tiny.sqsh is being imported by process {first.pid} of " in message
    assert not target.exists()
    go.write_text("go\n")
    assert end(first)[1].startswith("made sha256:")
    code, out, err = end(second)
    assert (code, out.split()[0]) == (0, "reused"), err


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_an_interrupted_import_leaves_no_target(
    tiny_layout: Path, images: Path, tmp_path: Path, number: signal.Signals, code: int, work: Path
) -> None:
    mark, target = tmp_path / "mark", images / "tiny.sqsh"
    environment = wrap_program(tmp_path / "bin", "mksquashfs", _HANGING.format(mark=mark))
    process = start(f"oci:{tiny_layout}:1", target, environment=environment)
    wait_for(mark, process)
    assert list_images(images) == []
    process.send_signal(number)
    assert end(process)[0] == code
    assert not target.exists()
    assert list_images(images) == []
    packer = int(mark.read_text())
    if number is not signal.SIGKILL:
        assert list(images.iterdir()) == []
        assert has_ended(packer)
    # The next import succeeds, and removes the leftovers of the interrupted one.
    exit_code, out, err = end(start(f"oci:{tiny_layout}:1", target))
    assert (exit_code, out.split()[0]) == (0, "made"), err
    assert {path.name for path in images.iterdir()} == {"tiny.sqsh", "tiny.sqsh.json"}
    assert list(work.iterdir()) == []
    assert has_ended(packer)
    assert read_superblock(target)
    assert read_sidecar(target)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_replacement_keeps_the_former_image(
    tiny_layout: Path, images: Path, tmp_path: Path, number: signal.Signals, work: Path
) -> None:
    target = images / "tiny.sqsh"
    assert end(start(f"oci:{tiny_layout}:1", target))[0] == 0
    before, record = target.read_bytes(), read_sidecar(target)
    mark = tmp_path / "mark"
    environment = wrap_program(tmp_path / "bin", "mksquashfs", _HANGING.format(mark=mark))
    process = start(f"oci:{tiny_layout}:1", target, "force", environment=environment)
    wait_for(mark, process)
    process.send_signal(number)
    end(process)
    assert target.read_bytes() == before
    assert read_sidecar(target) == record


def test_a_failed_import_leaves_nothing(tiny_layout: Path, images: Path, tmp_path: Path, work: Path) -> None:
    words = "Write failed because No space left on device"
    before = f'printf half > "$2"\necho "{words}" >&2\nexit 1'
    environment = wrap_program(tmp_path / "bin", "mksquashfs", before)
    code, _, err = end(start(f"oci:{tiny_layout}:1", images / "tiny.sqsh", environment=environment))
    assert code == 1
    assert f"error: cannot pack oci:{tiny_layout}:1: no space is left" in err
    assert words in err
    assert "--temp-dir DIR" in err
    assert list(images.iterdir()) == []
