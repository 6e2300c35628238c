"""One training at a time in a directory of checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.lock import Lock

pytestmark = pytest.mark.trainer

HOLD = """
import os, sys, time
from pathlib import Path
from slipway.trainer.checkpoint.lock import Lock
lock = Lock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """Start a process of a Slurm job that holds the lock of a directory and has a child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={**os.environ, "SLURM_JOB_ID": "4711"},
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    child = int(process.stdout.readline())
    yield process
    # The child first: it holds the pipes open.
    os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate()


def test_second_training_is_refused_with_the_writer_and_the_ways_out(tmp_path: Path, holder: Any) -> None:
    with pytest.raises(UserError) as error:
        Lock(tmp_path)
    message = str(error.value)
    assert f"into {tmp_path}: process {holder.pid} on {socket.gethostname()}, Slurm job 4711" in message
    for way_out in (
        "training.run.dependency=singleton",
        "training.run.name",
        "create_checkpoint_callback=False",
    ):
        assert way_out in message


def test_the_lock_ends_with_its_process_whatever_children_are_left(tmp_path: Path, holder: Any) -> None:
    holder.kill()
    holder.wait()
    Lock(tmp_path).release()


def test_a_released_lock_is_free(tmp_path: Path) -> None:
    Lock(tmp_path / "new").release()
    code = (
        "import pathlib, sys; from slipway.trainer.checkpoint import lock; "
        "lock.Lock(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "new")]
    assert subprocess.run(command, cwd=Path(__file__).resolve().parents[2]).returncode == 0


def test_holder_without_a_record_is_an_unknown_process(tmp_path: Path, holder: Any) -> None:
    (tmp_path / ".lock").write_text("")
    with pytest.raises(UserError, match="an unknown process"):
        Lock(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_gives_a_warning(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockf(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with caplog.at_level("WARNING", logger="trainer"):
        Lock(tmp_path).release()
    assert f"{tmp_path} has no file locks" in caplog.text


def test_directory_that_cannot_be_written_is_reported_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"dirpath=.*file/checkpoints: Not a directory"):
        Lock(tmp_path / "file" / "checkpoints")
