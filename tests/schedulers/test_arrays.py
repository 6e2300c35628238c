"""The status of a job array, from the statuses of its tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.schedulers.base import JobStatus
from launcher.schedulers.job_status import declared_tasks, sum_up
from launcher.slurm.notations import compress_tasks, expand_tasks
from launcher.slurm.states import State

LETTERS = {
    "P": State.PENDING,
    "R": State.RUNNING,
    "G": State.COMPLETING,
    "C": State.COMPLETED,
    "F": State.FAILED,
    "T": State.TIMEOUT,
    "X": State.CANCELLED,
    "I": State.INTERRUPTED,
    "U": State.UNKNOWN,
}


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ("CRPPP", State.RUNNING),
        ("CUFRP", State.RUNNING),
        ("CGPPP", State.COMPLETING),
        ("CCPPP", State.PENDING),
        ("FPPPP", State.PENDING),
        ("CCCCC", State.COMPLETED),
        ("CFTCC", State.FAILED),
        ("CTFCC", State.TIMEOUT),
        # Nobody knows whether it runs.
        ("CFUCC", State.UNKNOWN),
        ("CCCCU", State.UNKNOWN),
        # Each task went on with what the one before had saved, up to the end.
        ("IICCC", State.COMPLETED),
        ("IIIII", State.INTERRUPTED),
        ("IIFCC", State.FAILED),
        ("CCCCI", State.INTERRUPTED),
        ("ICICX", State.CANCELLED),
        ("C", State.COMPLETED),
    ],
)
def test_the_state_of_an_array_sums_up_its_tasks(tasks: str, expected: State) -> None:
    statuses = {number: JobStatus(LETTERS[letter]) for number, letter in enumerate(tasks)}
    summed = sum_up(statuses)
    assert summed.state is expected
    assert list(summed.tasks) == [str(number) for number in statuses]
    assert summed.state.is_live or not any(status.state.is_live for status in statuses.values())


def test_the_other_fields_are_those_of_the_task_that_decides() -> None:
    running = JobStatus(State.RUNNING, None, "n3", "00:10:00", restarts=2)
    waiting = JobStatus(State.PENDING, "JobHeldUser: held")
    summed = sum_up({2: waiting, 1: running, 0: JobStatus(State.COMPLETED, None, "n1", "01:00:00", 0)})
    assert (summed.nodes, summed.elapsed, summed.restarts) == ("n3", "00:10:00", 2)
    # That the rest is held would be a surprise later.
    assert summed.reason == "tasks: 1 COMPLETED, 1 RUNNING, 1 PENDING; 2: JobHeldUser: held"
    held = sum_up({0: JobStatus(State.COMPLETED, exit_code=0), 1: waiting})
    assert held.reason == "tasks: 1 COMPLETED, 1 PENDING; 1: JobHeldUser: held"
    assert held.exit_code is None
    in_turn = JobStatus(State.PENDING, "JobArrayTaskLimit: the tasks before it come first")
    assert sum_up({0: running, 1: in_turn}).reason == "tasks: 1 RUNNING, 1 PENDING"


def test_a_task_that_never_ran_gives_no_elapsed_time() -> None:
    saved = JobStatus(State.INTERRUPTED, None, "n1", "00:13:34", 75)
    dropped = JobStatus(State.CANCELLED, "by root", None, "00:00:00")
    summed = sum_up({0: saved, 1: dropped, 2: dropped})
    assert (summed.state, summed.nodes, summed.elapsed) == (State.CANCELLED, "n1", "00:13:34")


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [("3", [3]), ("0-2,7", [0, 1, 2, 7]), ("0-8:4", [0, 4, 8]), ("1,3,...", [1, 3]), ("", [])],
)
def test_task_numbers_are_expanded_and_compressed(numbers: str, expected: list[int]) -> None:
    assert expand_tasks(numbers) == expected
    if ":" not in numbers:
        assert expand_tasks(compress_tasks(expected)) == expected


def test_the_tasks_that_a_script_asks_for(tmp_path: Path) -> None:
    assert declared_tasks(tmp_path) == []
    script = tmp_path / "x_submission.sh"
    script.write_text('#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --array="1,3-4%1"\n')
    assert declared_tasks(tmp_path) == [1, 3, 4]
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2\n")
    assert declared_tasks(tmp_path) == []
