"""`cancel`, `hold` and `release` on a real Slurm: their effects and their answers."""

from __future__ import annotations

import pytest

from tests.jobs.on_slurm.sandbox_runs import SandboxRuns
from tests.jobs.on_slurm.scenarios import REFUSED, STRANGER

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    ("run", "outcome", "previous_state"),
    [
        ("cancelled", "cancelled", "RUNNING on n1"),
        ("cancelled_waiting", "cancelled", "PENDING (PartitionDown)"),
        ("held", "held", "PENDING (PartitionDown)"),
        ("released", "released", "PENDING (JobHeldUser)"),
    ],
)
def test_outcome_of_each_job_is_reported(
    runs: SandboxRuns, run: str, outcome: str, previous_state: str
) -> None:
    """The outcome of each is in the states that `status` prints."""
    answer = runs.answers[run]
    assert answer.stdout.startswith(
        f"{outcome} job {runs.jobs[run]} of {run} (launch 1): it was {previous_state}"
    )
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("run", ["cancelled", "completed", "timed_out", "interrupted", REFUSED])
def test_ended_jobs_need_no_cancelling(runs: SandboxRuns, run: str) -> None:
    answer = runs.slipway("cancel", run)
    assert answer.returncode == 0, answer.stderr
    assert f"it is over: {runs.rows[run]['state']}" in answer.stdout


@pytest.mark.parametrize("verb", ["hold", "release"])
@pytest.mark.parametrize("run", ["running", "completed"])
def test_only_what_waits_is_held_or_released(runs: SandboxRuns, verb: str, run: str) -> None:
    answer = runs.slipway(verb, run)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert (
        f"cannot be {'held' if verb == 'hold' else 'released'}: it is {runs.rows[run]['state']}"
        in answer.stderr
    )


def test_held_jobs_are_reported_as_held_already(runs: SandboxRuns) -> None:
    answer = runs.slipway("hold", "held")
    assert (answer.returncode, "held already" in answer.stdout) == (0, True), answer.stderr


def test_a_stranger_and_a_typing_mistake_are_left_alone(runs: SandboxRuns) -> None:
    """A run is named with one letter wrong, a job by the id of somebody else's."""
    for word in ("runnign", runs.jobs[STRANGER]):
        answer = runs.slipway("cancel", "running", word)
        assert (answer.returncode, answer.stdout) == (2, "")
        assert word in answer.stderr
    states = runs.slurm(
        "squeue", "--noheader", "--format=%T", f"--jobs={runs.jobs['running']},{runs.jobs[STRANGER]}"
    )
    assert states.split() == ["RUNNING", "RUNNING"]
