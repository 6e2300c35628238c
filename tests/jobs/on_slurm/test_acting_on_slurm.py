"""`cancel`, `hold` and `release` on a real Slurm: what they do, and what they say."""

from __future__ import annotations

import pytest

from tests.jobs.on_slurm.sandbox_runs import SandboxRuns
from tests.jobs.on_slurm.scenarios import REFUSED, STRANGER

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    ("run", "done", "was"),
    [
        ("cancelled", "cancelled", "RUNNING on n1"),
        ("cancelled_waiting", "cancelled", "PENDING (PartitionDown)"),
        ("held", "held", "PENDING (PartitionDown)"),
        ("released", "released", "PENDING (JobHeldUser)"),
    ],
)
def test_outcome_of_each_job_is_reported(runs: SandboxRuns, run: str, done: str, was: str) -> None:
    """The outcome of each is in the states that `status` prints."""
    said = runs.said[run]
    assert said.stdout.startswith(f"{done} job {runs.jobs[run]} of {run} (launch 1): it was {was}")
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.parametrize("run", ["cancelled", "completed", "timed_out", "interrupted", REFUSED])
def test_ended_jobs_need_no_cancelling(runs: SandboxRuns, run: str) -> None:
    said = runs.slipway("cancel", run)
    assert said.returncode == 0, said.stderr
    assert f"it is over: {runs.rows[run]['state']}" in said.stdout


@pytest.mark.parametrize("verb", ["hold", "release"])
@pytest.mark.parametrize("run", ["running", "completed"])
def test_only_what_waits_is_held_or_released(runs: SandboxRuns, verb: str, run: str) -> None:
    said = runs.slipway(verb, run)
    assert (said.returncode, said.stdout) == (2, "")
    assert (
        f"cannot be {'held' if verb == 'hold' else 'released'}: it is {runs.rows[run]['state']}"
        in said.stderr
    )


def test_held_jobs_are_reported_as_held_already(runs: SandboxRuns) -> None:
    said = runs.slipway("hold", "held")
    assert (said.returncode, "held already" in said.stdout) == (0, True), said.stderr


def test_a_stranger_and_a_typing_mistake_are_left_alone(runs: SandboxRuns) -> None:
    """A run is named with one letter wrong, a job by the id of somebody else's."""
    for word in ("runnign", runs.jobs[STRANGER]):
        said = runs.slipway("cancel", "running", word)
        assert (said.returncode, said.stdout) == (2, "")
        assert word in said.stderr
    left = runs.slurm(
        "squeue", "--noheader", "--format=%T", f"--jobs={runs.jobs['running']},{runs.jobs[STRANGER]}"
    )
    assert left.split() == ["RUNNING", "RUNNING"]
