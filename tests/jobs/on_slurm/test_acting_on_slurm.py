"""`cancel`, `hold` and `release` on a real Slurm: what they do, and what they say."""

from __future__ import annotations

import pytest

from tests.jobs.on_slurm.scenarios import REFUSED, STRANGER
from tests.jobs.on_slurm.zoo import Zoo

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
def test_outcome_of_each_job_is_reported(zoo: Zoo, run: str, done: str, was: str) -> None:
    """The outcome of each is in the states that `status` prints."""
    said = zoo.said[run]
    assert said.stdout.startswith(f"{done} job {zoo.jobs[run]} of {run} (launch 1): it was {was}")
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.parametrize("run", ["cancelled", "completed", "timed_out", "interrupted", REFUSED])
def test_ended_jobs_need_no_cancelling(zoo: Zoo, run: str) -> None:
    said = zoo.slipway("cancel", run)
    assert said.returncode == 0, said.stderr
    assert f"it is over: {zoo.rows[run]['state']}" in said.stdout


@pytest.mark.parametrize("verb", ["hold", "release"])
@pytest.mark.parametrize("run", ["running", "completed"])
def test_only_what_waits_is_held_or_released(zoo: Zoo, verb: str, run: str) -> None:
    said = zoo.slipway(verb, run)
    assert (said.returncode, said.stdout) == (2, "")
    assert (
        f"cannot be {'held' if verb == 'hold' else 'released'}: it is {zoo.rows[run]['state']}" in said.stderr
    )


def test_held_jobs_are_reported_as_held_already(zoo: Zoo) -> None:
    said = zoo.slipway("hold", "held")
    assert (said.returncode, "held already" in said.stdout) == (0, True), said.stderr


def test_a_stranger_and_a_typing_mistake_are_left_alone(zoo: Zoo) -> None:
    """A run is named with one letter wrong, a job by the id of somebody else's."""
    for word in ("runnign", zoo.jobs[STRANGER]):
        said = zoo.slipway("cancel", "running", word)
        assert (said.returncode, said.stdout) == (2, "")
        assert word in said.stderr
    left = zoo.slurm(
        "squeue", "--noheader", "--format=%T", f"--jobs={zoo.jobs['running']},{zoo.jobs[STRANGER]}"
    )
    assert left.split() == ["RUNNING", "RUNNING"]
