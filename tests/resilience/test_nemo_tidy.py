"""Remains of killed jobs in NeMo's directory of checkpoints are set aside before NeMo refuses them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from slipway.common.node.checkpoints import progress
from slipway.supervisor.nemo_checkpoints import tidy as tidy_checkpoints

STEP_2 = "megatron_gpt--val_loss=9.03-step=2-consumed_samples=4.0"
STEP_4 = "megatron_gpt--val_loss=8.77-step=4-consumed_samples=8.0"
STEP_10 = "megatron_gpt--val_loss=8.51-step=10-consumed_samples=20.0"
HOURS = itertools.count(1)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    directory = tmp_path / "a run" / "checkpoints"
    directory.mkdir(parents=True)
    return directory


def save(directory: Path, *names: str) -> None:
    """Write checkpoints as NeMo does, one after the other: directories with parts."""
    for name in names:
        (directory / name / "weights").mkdir(parents=True)
        (directory / name / "metadata.json").write_text(f"of {name}")
        (directory / name / "weights" / "0.0").write_bytes(b"\0" * 8)
        os.utime(directory / name, (0, next(HOURS) * 3600))


def mark(directory: Path, *names: str) -> None:
    for name in names:
        (directory / f"{name}-unfinished").touch()


def tidy(directory: Path) -> str:
    """Tidy as a job does; return its messages."""
    lines: list[str] = []

    def say(message: str, **_: Any) -> None:
        lines.append(f"{message}\n")

    tidy_checkpoints(str(directory), "7.0", say)
    return "".join(lines)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


def set_aside_dir(directory: Path) -> Path:
    return directory.with_name("checkpoints-set-aside") / "7.0"


def test_checkpoints_that_nemo_accepts_are_left_alone(checkpoints: Path) -> None:
    save(checkpoints, STEP_2, STEP_4, f"{STEP_4}-last")
    (checkpoints / "notes.txt").touch()
    before = sorted(checkpoints.rglob("*"))
    assert tidy(checkpoints) == ""
    assert sorted(checkpoints.rglob("*")) == before
    assert names(checkpoints.parent) == {"checkpoints"}


@pytest.mark.parametrize("missing", [True, False])
def test_a_run_that_begins_has_nothing_to_tidy(checkpoints: Path, missing: bool) -> None:
    if missing:
        checkpoints.rmdir()
    assert tidy(checkpoints) == ""
    assert names(checkpoints.parent) == (set() if missing else {"checkpoints"})


def test_unfinished_checkpoints_are_set_aside_with_their_marks(checkpoints: Path) -> None:
    """The job was killed while it wrote the next `-last`, and had not removed the one before."""
    save(checkpoints, STEP_2, f"{STEP_2}-last", f"{STEP_4}-last")
    mark(checkpoints, f"{STEP_4}-last")
    output = tidy(checkpoints)
    assert names(checkpoints) == {STEP_2, f"{STEP_2}-last"}
    assert names(set_aside_dir(checkpoints)) == {f"{STEP_4}-last", f"{STEP_4}-last-unfinished"}
    assert (set_aside_dir(checkpoints) / f"{STEP_4}-last" / "weights" / "0.0").read_bytes() == b"\0" * 8
    assert f"set aside {STEP_4}-last, because a job ended while it wrote or removed it" in output
    assert str(set_aside_dir(checkpoints) / f"{STEP_4}-last") in output


def test_a_mark_alone_is_moved_too(checkpoints: Path) -> None:
    """The job was killed after it had removed a checkpoint, before its mark."""
    save(checkpoints, f"{STEP_4}-last")
    mark(checkpoints, STEP_2)
    tidy(checkpoints)
    assert names(checkpoints) == {f"{STEP_4}-last"}
    assert names(set_aside_dir(checkpoints)) == {f"{STEP_2}-unfinished"}


def test_unfinished_first_save_is_set_aside(checkpoints: Path) -> None:
    """Nothing whole is left: NeMo starts anew, which it refuses to do beside what is half done."""
    save(checkpoints, f"{STEP_2}-last")
    mark(checkpoints, f"{STEP_2}-last")
    tidy(checkpoints)
    assert names(checkpoints) == set()
    assert names(set_aside_dir(checkpoints)) == {f"{STEP_2}-last", f"{STEP_2}-last-unfinished"}


def test_newest_of_several_last_checkpoints_stays(checkpoints: Path) -> None:
    """The step decides, as a number: the job was killed before it removed the previous `-last`."""
    save(checkpoints, f"{STEP_10}-last", f"{STEP_4}-last", f"{STEP_2}-last")
    output = tidy(checkpoints)
    assert names(checkpoints) == {f"{STEP_10}-last"}
    assert names(set_aside_dir(checkpoints)) == {f"{STEP_4}-last", f"{STEP_2}-last"}
    assert f"set aside {STEP_4}-last, because NeMo takes one `-last` only, {STEP_10}-last" in output


def test_a_whole_checkpoint_that_is_newer_is_continued_from(checkpoints: Path) -> None:
    """The job was killed between the checkpoint that is kept for its loss and its copy, `-last`."""
    save(checkpoints, STEP_4, f"{STEP_4}-last", STEP_10, f"{STEP_10}-last")
    mark(checkpoints, f"{STEP_10}-last")
    output = tidy(checkpoints)
    assert names(checkpoints) == {STEP_4, STEP_10, f"{STEP_10}-last"}
    assert (checkpoints / f"{STEP_10}-last" / "metadata.json").read_text() == f"of {STEP_10}"
    part, linked = (checkpoints / name / "weights" / "0.0" for name in (STEP_10, f"{STEP_10}-last"))
    assert part.samefile(linked), "it takes no room"
    assert names(set_aside_dir(checkpoints)) == {
        f"{STEP_4}-last",
        f"{STEP_10}-last",
        f"{STEP_10}-last-unfinished",
    }
    assert f"NeMo continues from {STEP_10}, which is newer" in output


def test_an_unfinished_checkpoint_is_never_continued_from(checkpoints: Path) -> None:
    save(checkpoints, f"{STEP_4}-last", STEP_10)
    mark(checkpoints, STEP_10)
    tidy(checkpoints)
    assert names(checkpoints) == {f"{STEP_4}-last"}


def test_a_training_that_went_back_does_not_go_forth_again(checkpoints: Path) -> None:
    """A kept checkpoint of a higher step is older than the `-last`: the training went back from it."""
    save(checkpoints, STEP_2, STEP_10, f"{STEP_4}-last")
    assert tidy(checkpoints) == ""
    assert names(checkpoints) == {STEP_2, STEP_10, f"{STEP_4}-last"}


def test_a_linked_checkpoint_is_no_progress(checkpoints: Path) -> None:
    save(checkpoints, f"{STEP_4}-last", STEP_10)
    before = progress(str(checkpoints), "nemo")
    assert tidy(checkpoints)
    assert names(checkpoints) == {STEP_10, f"{STEP_10}-last"}
    assert progress(str(checkpoints), "nemo") == before


def test_tidying_again_changes_nothing(checkpoints: Path) -> None:
    save(checkpoints, STEP_10, f"{STEP_4}-last", f"{STEP_2}-last")
    mark(checkpoints, f"{STEP_2}-last")
    assert tidy(checkpoints)
    first = sorted(checkpoints.parent.rglob("*"))
    assert tidy(checkpoints) == ""
    assert sorted(checkpoints.parent.rglob("*")) == first


def test_directories_set_aside_are_never_overwritten(checkpoints: Path) -> None:
    """NeMo leaves a `-last` that was made for it: surplus when it is done, and its name is taken."""
    save(checkpoints, STEP_4, f"{STEP_4}-last")
    mark(checkpoints, f"{STEP_4}-last")
    tidy(checkpoints)
    save(checkpoints, f"{STEP_10}-last")
    tidy(checkpoints)
    assert names(checkpoints) == {STEP_4, f"{STEP_10}-last"}
    expected = {f"{STEP_4}-last", f"{STEP_4}-last-unfinished", f"{STEP_4}-last.again"}
    assert names(set_aside_dir(checkpoints)) == expected


def test_files_of_single_ranks_are_set_aside(checkpoints: Path) -> None:
    """Checkpoints that are not distributed have a file for each rank, and one mark for all."""
    for rank in ("mp_rank_00", "mp_rank_01"):
        (checkpoints / rank).mkdir()
        (checkpoints / rank / f"{STEP_4}.ckpt").write_text(rank)
    mark(checkpoints, STEP_4)
    tidy(checkpoints)
    assert names(checkpoints / "mp_rank_00") == set() == names(checkpoints / "mp_rank_01")
    assert (set_aside_dir(checkpoints) / "mp_rank_01" / f"{STEP_4}.ckpt").read_text() == "mp_rank_01"


def test_checkpoint_that_cannot_be_moved_keeps_its_mark_and_the_job_goes_on(checkpoints: Path) -> None:
    save(checkpoints, STEP_4)
    mark(checkpoints, STEP_4)
    set_aside_dir(checkpoints).parent.write_text("a file in the way")
    output = tidy(checkpoints)
    assert names(checkpoints) == {STEP_4, f"{STEP_4}-unfinished"}
    assert f"could not set {checkpoints / STEP_4} aside" in output


def test_names_are_no_commands(checkpoints: Path) -> None:
    name = "a $(touch pwned) `x` 'y' -step=3;consumed_samples=6.0-last"
    save(checkpoints, name, "-rf-step=1-last")
    tidy(checkpoints)
    assert names(checkpoints) == {name}
    assert names(set_aside_dir(checkpoints)) == {"-rf-step=1-last"}
    assert not list(checkpoints.parent.rglob("pwned"))
