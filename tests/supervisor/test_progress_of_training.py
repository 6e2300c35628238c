"""The newest checkpoint by each trainer's own order: directories as the trainers leave them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slipway.common.node.checkpoints import Progress, from_fields, is_newer, progress
from slipway.trainer.checkpoint import store
from slipway.trainer.checkpoint.marker import Marker

HOUR = 3600 * 10**9


def stamp(path: Path, hour: float) -> None:
    """Give a file or directory the time at which it was completed."""
    os.utime(path, ns=(0, int(hour * HOUR)))


def save_megatron(directory: Path, step: int, serial: int, hour: float, **fields: object) -> Path:
    """Write a checkpoint as our trainer does."""
    path = directory / f"megatron_gpt--val_loss=2.10-step={step}-consumed_samples={step * 16}"
    while path.exists():
        path = path.with_name(path.name + "-v2")
    path.mkdir(parents=True)
    marker = {"step": step, "serial": serial, "files": {"common.pt": 12}, **fields}
    (path / "complete.json").write_text(json.dumps(marker, indent=1))
    stamp(path / "complete.json", hour)
    return path


def save_nemo(directory: Path, step: int, hour: float, *, last: bool = False) -> Path:
    """Write a checkpoint as NeMo does."""
    name = f"megatron_gpt--val_loss=9.03-step={step}-consumed_samples={step * 4}.0" + (
        "-last" if last else ""
    )
    (directory / name / "weights").mkdir(parents=True)
    (directory / name / "metadata.json").write_text("{}")
    stamp(directory / name, hour)
    return directory / name


def save_megatron_lm(directory: Path, iteration: int, hour: float) -> None:
    """Write a checkpoint as Megatron-LM does: an iteration's directory, and the tracker."""
    (directory / f"iter_{iteration:07d}").mkdir(parents=True, exist_ok=True)
    tracker = directory / "latest_checkpointed_iteration.txt"
    tracker.write_text(str(iteration))
    stamp(tracker, hour)


def read_progress(directory: Path, engine: str) -> Progress:
    newest = progress(str(directory), engine)
    assert newest is not None
    assert from_fields(newest.fields()) == newest
    return newest


@pytest.mark.parametrize("engine", ["megatron", "megatron_lm", "nemo"])
def test_without_a_checkpoint_there_is_no_progress(tmp_path: Path, engine: str) -> None:
    assert progress(None, engine) is None
    assert progress(str(tmp_path / "missing"), engine) is None
    (tmp_path / "notes.txt").touch()
    assert progress(str(tmp_path), engine) is None
    assert not is_newer(None, None)


def test_a_training_of_ours_that_went_back_gets_on(tmp_path: Path) -> None:
    """After steps 200 to 1000 and back to 200, each checkpoint has a lower step and a higher serial."""
    for serial, step in enumerate((200, 400, 600, 800, 1000), start=1):
        save_megatron(tmp_path, step, serial, hour=serial)
    before = read_progress(tmp_path, "megatron")
    assert (before.step, before.order) == (1000, 5)
    for serial, step in enumerate((400, 600, 800), start=6):
        save_megatron(tmp_path, step, serial, hour=serial)
        now = read_progress(tmp_path, "megatron")
        assert (now.step, is_newer(now, before), is_newer(before, now)) == (step, True, False)
        before = now
    assert not is_newer(read_progress(tmp_path, "megatron"), before), "nothing was saved"


def test_checkpoints_that_our_trainer_wrote(tmp_path: Path) -> None:
    before = None
    for step in (200, 1000, 400):
        unfinished = store.begin(tmp_path, f"x--step={step}")
        (unfinished / "common.pt").write_bytes(b"0")
        if before:
            assert read_progress(tmp_path, "megatron") == before, "it is not complete yet"
        saved = store.finish(unfinished, f"x--step={step}", Marker(step, step * 16, 1, 1, 1, {}))
        now = read_progress(tmp_path, "megatron")
        assert (now.step, now.order) == (step, saved.marker.serial)
        assert is_newer(now, before)
        before = now


def test_the_serial_decides_where_clocks_differ(tmp_path: Path) -> None:
    save_megatron(tmp_path, 10, 1, hour=5)
    before = read_progress(tmp_path, "megatron")
    save_megatron(tmp_path, 20, 2, hour=4)  # by a node whose clock is late
    assert is_newer(read_progress(tmp_path, "megatron"), before)


def test_a_serial_that_is_given_again_is_newer_by_its_time(tmp_path: Path) -> None:
    """The newest one was damaged and set aside: the next save counts on from the one before."""
    save_megatron(tmp_path, 10, 1, hour=1)
    damaged = save_megatron(tmp_path, 20, 2, hour=2)
    before = read_progress(tmp_path, "megatron")
    (tmp_path / "damaged").mkdir()
    damaged.rename(tmp_path / "damaged" / damaged.name)
    assert not is_newer(read_progress(tmp_path, "megatron"), before), "an older one is no progress"
    save_megatron(tmp_path, 25, 2, hour=3)
    assert is_newer(read_progress(tmp_path, "megatron"), before)


@pytest.mark.parametrize("engine", ["megatron", "megatron_lm", "nemo"])
def test_the_same_step_saved_again_is_no_progress(tmp_path: Path, engine: str) -> None:
    """A training that fails right where it began may save the same step."""
    before = None
    for hour in (1, 2):
        if engine == "megatron":
            save_megatron(tmp_path / str(hour), 10, hour, hour)
        elif engine == "megatron_lm":
            save_megatron_lm(tmp_path / str(hour), 10, hour)
        else:
            save_nemo(tmp_path / str(hour), 10, hour, last=True)
        now = read_progress(tmp_path / str(hour), engine)
        assert is_newer(now, before) is (hour == 1)
        before = now


def test_directories_that_are_no_checkpoints_are_passed_over(tmp_path: Path) -> None:
    save_megatron(tmp_path, 8, 1, hour=1)
    hidden = save_megatron(tmp_path, 70, 7, hour=7)
    hidden.rename(tmp_path / ".unfinished-step=70-x")
    for name, text in {
        "a": "[]",
        "b": "{",
        "c": '{"step": "$(id)", "serial": 9}',
        "d": '{"step": true}',
    }.items():
        (tmp_path / f"step=9{name}").mkdir()
        (tmp_path / f"step=9{name}" / "complete.json").write_text(text)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "step=99").mkdir()
    os.mkfifo(tmp_path / "step=99" / "complete.json")
    assert read_progress(tmp_path, "megatron")[:2] == (8, 1)


def test_a_marker_of_the_first_version_has_no_serial(tmp_path: Path) -> None:
    for step in (10, 9):
        path = save_megatron(tmp_path, step, 0, hour=step)
        (path / "complete.json").write_text(json.dumps({"step": step}))
    assert read_progress(tmp_path, "megatron").step == 10


def test_megatron_lm_that_went_back_gets_on(tmp_path: Path) -> None:
    save_megatron_lm(tmp_path, 1000, hour=1)
    before = read_progress(tmp_path, "megatron_lm")
    for hour, iteration in enumerate((400, 600), start=2):
        save_megatron_lm(tmp_path, iteration, hour)
        now = read_progress(tmp_path, "megatron_lm")
        assert now.step == iteration and is_newer(now, before)
        before = now
    (tmp_path / "iter_0002000").mkdir()  # half written: the tracker does not name it
    assert not is_newer(read_progress(tmp_path, "megatron_lm"), before)


@pytest.mark.parametrize("text", ["", "release", "$(id)", "-5", "4 5", "9" * 2000])
def test_a_tracker_without_a_number_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert progress(str(tmp_path), "megatron_lm") is None


def test_nemo_that_went_back_gets_on(tmp_path: Path) -> None:
    """Checkpoints that are kept for their loss have higher steps than the `-last` after it."""
    save_nemo(tmp_path, 800, hour=1)
    save_nemo(tmp_path, 1000, hour=2)
    last = save_nemo(tmp_path, 200, hour=3, last=True)  # by hand: where the training goes on from
    before = read_progress(tmp_path, "nemo")
    assert before.step == 200
    for hour, step in enumerate((400, 600), start=4):
        save_nemo(tmp_path, step, hour)
        assert read_progress(tmp_path, "nemo").step == step, "NeMo died before it copied it"
        next_last = save_nemo(tmp_path, step, hour + 0.1, last=True)
        for path in (last / "weights", last / "metadata.json", last):
            path.rmdir() if path.is_dir() else path.unlink()
        last = next_last
        now = read_progress(tmp_path, "nemo")
        assert now.step == step and is_newer(now, before)
        before = now
    assert not is_newer(read_progress(tmp_path, "nemo"), before)


def test_unfinished_checkpoint_of_nemo_is_no_progress(tmp_path: Path) -> None:
    save_nemo(tmp_path, 4, hour=1, last=True)
    before = read_progress(tmp_path, "nemo")
    half = save_nemo(tmp_path, 6, hour=2, last=True)
    (tmp_path / f"{half.name}-unfinished").touch()
    assert read_progress(tmp_path, "nemo") == before
    (tmp_path / f"{half.name}-unfinished").unlink()
    assert is_newer(read_progress(tmp_path, "nemo"), before)


def test_files_of_single_ranks_are_nemo_checkpoints(tmp_path: Path) -> None:
    for rank in ("mp_rank_00", "mp_rank_01"):
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "megatron_gpt--step=4-consumed_samples=8.0.ckpt").touch()
        (tmp_path / rank / "megatron_gpt--step=6-consumed_samples=12.0-last.ckpt").touch()
    assert read_progress(tmp_path, "nemo").step == 6
    (tmp_path / "megatron_gpt--step=6-consumed_samples=12.0-last-unfinished").touch()
    assert read_progress(tmp_path, "nemo").step == 4


def test_a_mark_of_the_version_before_has_a_step_alone() -> None:
    before = from_fields({"checkpoint": 20})
    assert is_newer(Progress(21, 21, 5), before)
    assert not is_newer(Progress(20, 20, 5), before)
    assert from_fields({"checkpoint": "BASH_VERSINFO[$(id)]"}) is None
