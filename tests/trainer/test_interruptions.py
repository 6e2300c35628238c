"""A kill at every single step of saving: the directory is whole before, at and after each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipway.trainer.checkpoint import retention, store
from slipway.trainer.checkpoint.marker import MARKER, read_marker
from slipway.trainer.config.saving import Saving
from tests.trainer.test_retention import BLANK_MARKER

pytestmark = pytest.mark.trainer

KILLED = 9
# The changes of the directory that Python audits before they happen; renaming and replacing are one.
CHANGES = ("os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "os.truncate")


def save(directory: Path, step: int) -> store.Checkpoint:
    """Save as a training of two ranks that keeps two checkpoints and removes an earlier one's leftovers."""
    saving = Saving(True, directory, "{step}", every=1, background=False, keep=1, monitor="step", mode="max")
    leftovers = store.list_leftovers(directory)
    unfinished = store.begin(directory, f"step={step}")
    files = {}
    for rank in (0, 1):
        (unfinished / f"__{rank}_0.distcp").write_text(f"weights {step}")
        files.update(store.sync_part(unfinished, rank))
    marker = store.replace(BLANK_MARKER, step=step, metrics={"step": float(step)}, files=files)
    checkpoint = store.finish(unfinished, f"step={step}", marker)
    retention.keep_best(saving, checkpoint)
    retention.remove(leftovers)
    return checkpoint


def die_at(action: Callable[[], object], count: int) -> bool:
    """Run `action` in a process that ends before its `count`-th change; return whether it got there."""
    pid = os.fork()
    if pid == 0:
        remaining = count

        def change(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal remaining
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
            if event in CHANGES or event == "fsync" or writes:
                remaining -= 1
                if remaining == 0:
                    os._exit(KILLED)

        fsync = os.fsync

        def fsync_and_count(descriptor: int) -> None:
            change("fsync", ())
            fsync(descriptor)

        os.fsync = fsync_and_count
        sys.addaudithook(change)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def check(directory: Path, steps: tuple[int, ...]) -> int:
    """Check the conditions that hold at any moment; return the newest checkpoint's step."""
    checkpoint, incomplete = store.find_newest(directory)
    assert checkpoint is not None
    assert checkpoint.marker.step in steps
    for rank in (0, 1):
        assert (checkpoint.path / f"__{rank}_0.distcp").read_text() == f"weights {checkpoint.marker.step}"
    # All that can be seen is complete, and what is not is hidden.
    assert all(path.name.startswith(store.UNFINISHED) for path in incomplete)
    for path in directory.iterdir():
        if not path.name.startswith(".") and not path.is_symlink():
            marker = read_marker(path)
            assert marker is not None
            assert {part.name for part in path.iterdir()} == {MARKER, *marker.files}
    assert (directory / store.LATEST / MARKER).is_file() or not (directory / store.LATEST).is_symlink()
    return checkpoint.marker.step


def test_a_kill_at_every_change_of_a_save_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    count, newest_steps = 0, []
    while True:
        count += 1
        directory = tmp_path / str(count)
        save(directory, 1)
        save(directory, 2)
        # Two interrupted saves before: this one also removes what they left.
        for at in (3, 9):
            assert die_at(lambda directory=directory: save(directory, 3), at)
        killed = die_at(lambda directory=directory: save(directory, 3), count)
        newest_steps.append(check(directory, (2, 3)))
        assert save(directory, 4).marker.step == 4
        assert check(directory, (4,)) == 4
        names = {path.name for path in directory.iterdir()}
        assert names == {"latest", "step=4"}
        assert (directory / store.LATEST).readlink() == Path("step=4")
        if not killed:
            break
    # Every change was struck once: before the name is given the old one is the newest, from then on the new.
    assert newest_steps == sorted(newest_steps)
    assert newest_steps.count(2) >= 8
    assert newest_steps.count(3) >= 8


def test_kill_at_every_change_of_the_first_save_leaves_a_complete_checkpoint_or_none(tmp_path: Path) -> None:
    count = 0
    while True:
        count += 1
        directory = tmp_path / str(count)
        killed = die_at(lambda directory=directory: save(directory, 1), count)
        checkpoint, _ = store.find_newest(directory)
        if checkpoint is not None:
            check(directory, (1,))
        if not killed:
            break
        save(directory, 2)
        assert check(directory, (2,)) == 2
    assert checkpoint is not None
    assert count >= 8
