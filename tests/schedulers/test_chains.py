"""The status of a chain, from the statuses of its jobs and from their marks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.schedulers.base import ChainJobs, JobRef, JobStatus
from launcher.schedulers.chain_status import may_go_on, read_marks_alone, status_of_chain
from launcher.schedulers.job_status import ANOTHER_JOB, read_marks
from launcher.slurm.states import State
from slipway.common.node.marks import (
    GIVEN_UP,
    ChainEnd,
    chain_end,
    claim,
    end_chain,
    later_jobs,
    link_jobs,
    read_attempts,
)

S = State
JOBS = ("17", "18", "19", "20", "21")


def ref(directory: Path, jobs: int, links: int = 5) -> JobRef:
    return JobRef(dict(enumerate(JOBS[:jobs], 1)), directory, ["a-tag"], "login", max_links=links)


def mark(
    directory: Path, link: int, code: int | None = None, start_time: float = 100.0, **ended: Any
) -> None:
    """Write the marks of a link: of its start and, with a code or more, of its end."""
    marks = directory / "marks"
    marks.mkdir(exist_ok=True)
    job = JOBS[link - 1]
    start_mark = {"job_id": job, "started": start_time, "nodes": "n1", "link": link}
    (marks / f"{job}.0.started.json").write_text(json.dumps(start_mark))
    if code is not None:
        ended = {"exit_code": code, "ended": start_time + 50, **ended}
    if ended:
        (marks / f"{job}.0.ended.json").write_text(json.dumps({"job_id": job, **ended}))


def statuses(*states: State) -> list[JobStatus]:
    return [JobStatus(state) for state in states]


def current(directory: Path, job_statuses: Sequence[JobStatus], links: int = 5) -> tuple[int, JobStatus]:
    status = status_of_chain(ref(directory, len(job_statuses), links), job_statuses)
    assert status.chain and list(status.chain.jobs) == list(JOBS[: len(job_statuses)])
    assert status.chain.job_id == JOBS[status.chain.current - 1]
    return status.chain.current, status


def test_the_status_of_a_job_that_is_no_chain_is_not_changed(tmp_path: Path) -> None:
    (running,) = statuses(S.RUNNING)
    assert status_of_chain(ref(tmp_path, 1, links=1), [running]) is running


@pytest.mark.parametrize(
    ("states", "link", "state"),
    [
        ((S.PENDING,), 1, S.PENDING),
        ((S.RUNNING, S.PENDING), 1, S.RUNNING),
        ((S.COMPLETING, S.PENDING), 1, S.COMPLETING),
        ((S.PENDING, S.PENDING, S.PENDING), 1, S.PENDING),
        ((S.TIMEOUT, S.PENDING, S.PENDING), 2, S.PENDING),
        ((S.FAILED, S.NODE_FAIL, S.RUNNING, S.PENDING), 3, S.RUNNING),
        ((S.UNKNOWN, S.RUNNING), 2, S.RUNNING),
        ((S.INTERRUPTED, S.SUSPENDED, S.PENDING), 2, S.SUSPENDED),
        ((S.TIMEOUT, S.CANCELLED), 2, S.CANCELLED),
        ((S.TIMEOUT, S.UNKNOWN), 2, S.UNKNOWN),
    ],
)
def test_the_current_link_gives_the_state(
    tmp_path: Path, states: Sequence[State], link: int, state: State
) -> None:
    current_link, status = current(tmp_path, statuses(*states))
    assert (current_link, status.state) == (link, state)


def test_waiting_link_reports_the_end_of_the_one_before(tmp_path: Path) -> None:
    job_statuses = [JobStatus(S.FAILED, "exit code 3"), JobStatus(S.PENDING, "Resources: it is next")]
    assert (
        current(tmp_path, job_statuses)[1].reason == "Resources: it is next; link 1 was FAILED (exit code 3)"
    )
    assert current(tmp_path, [JobStatus(S.PENDING, "Priority")])[1].reason == "Priority"


@pytest.mark.parametrize(
    ("links", "jobs"), [(5, (S.TIMEOUT, S.NODE_FAIL)), (1, (S.NODE_FAIL,)), (5, (S.TIMEOUT, S.FAILED))]
)
@pytest.mark.parametrize("verdict", ["done", "continue"])
def test_a_node_or_supervisor_may_die_when_all_is_done(
    tmp_path: Path, links: int, jobs: Sequence[State], verdict: str
) -> None:
    """The job or the next one says so; Slurm reports the node, or the exit code, alone."""
    mark(tmp_path, len(jobs), 0, verdict=verdict)
    state = S.COMPLETED if verdict == "done" else jobs[-1]
    assert status_of_chain(ref(tmp_path, len(jobs), links), statuses(*jobs)).state is state


@pytest.mark.parametrize("successor", [S.CANCELLED, S.PENDING, S.COMPLETED, S.UNKNOWN])
def test_after_a_success_the_next_link_does_not_count(tmp_path: Path, successor: State) -> None:
    mark(tmp_path, 1, code=75)
    mark(tmp_path, 2, code=0, start_time=200.0)
    job_statuses = [
        JobStatus(S.INTERRUPTED),
        JobStatus(S.COMPLETED, None, "n1", "00:00:50", 0),
        JobStatus(successor),
    ]
    # Also where the mark could not be written.
    assert current(tmp_path, job_statuses)[0] == 2
    end_chain(tmp_path, ChainEnd("job 18", "all is done"))
    link, status = current(tmp_path, job_statuses)
    assert (link, status.state, status.reason, status.exit_code) == (2, S.COMPLETED, None, 0)
    last_state = S.CANCELLED if successor is S.COMPLETED else successor
    assert status.chain and [link.state for link in status.chain.jobs.values()] == [
        job_statuses[0].state,
        S.COMPLETED,
        last_state,
    ]


def test_the_reason_says_why_a_chain_stopped(tmp_path: Path) -> None:
    for link in (1, 2, 3):
        mark(tmp_path, link, code=1, start_time=100.0 * link)
    job_statuses = [JobStatus(S.FAILED, "exit code 1", exit_code=1) for _ in range(3)]
    why = "3 links in a row ended without a new checkpoint: its tasks failed"
    end_chain(tmp_path, ChainEnd("job 19", why))
    link, status = current(tmp_path, [*job_statuses, JobStatus(S.CANCELLED)])
    assert (link, status.state, status.exit_code) == (3, S.FAILED, 1)
    assert status.reason == f"exit code 1; {why}"


def test_the_reason_names_the_last_link_or_a_missing_one(tmp_path: Path) -> None:
    job_statuses = [JobStatus(S.TIMEOUT), JobStatus(S.INTERRUPTED, "saved")]
    assert current(tmp_path, job_statuses, links=2)[1].reason == "saved; the last of 2 links"
    broken = current(tmp_path, job_statuses, links=3)[1]
    assert broken.state is S.INTERRUPTED and "link 2 of 3, and the next one is not known" in str(
        broken.reason
    )
    assert may_go_on(ref(tmp_path, 2, links=3), broken)
    assert not may_go_on(ref(tmp_path, 2, links=2), broken)
    end_chain(tmp_path, ChainEnd("job 18", "stopped"))
    assert not may_go_on(ref(tmp_path, 2, links=3), broken)


def test_a_link_that_was_cancelled_before_it_began_has_no_next_one(tmp_path: Path) -> None:
    never = JobStatus(S.CANCELLED, "what it waited for can no longer happen")
    link, status = current(tmp_path, [never])
    assert (link, status.state, status.reason) == (1, S.CANCELLED, never.reason)
    mark(tmp_path, 1, code=75)
    link, status = current(tmp_path, [JobStatus(S.INTERRUPTED, "saved"), JobStatus(S.CANCELLED, "by ada")])
    assert (link, status.state, status.reason) == (2, S.CANCELLED, "by ada")


def test_a_chain_that_a_user_cancelled_is_cancelled(tmp_path: Path) -> None:
    mark(tmp_path, 1, code=143, start_time=100.0)  # ended at 150
    job_statuses = [JobStatus(S.TIMEOUT), JobStatus(S.CANCELLED)]
    end_chain(tmp_path, ChainEnd("ada", "cancelled by ada", ended=170.0))
    # No link ran then: the chain did not end by the time limit of link 1.
    link, status = current(tmp_path, job_statuses)
    assert (link, status.state, status.reason) == (1, S.CANCELLED, "by ada")
    # The link that ran saved and left after that.
    mark(tmp_path, 2, code=75, start_time=140.0)
    _, status = current(tmp_path, [JobStatus(S.TIMEOUT), JobStatus(S.INTERRUPTED, "saved")])
    assert (status.state, status.reason) == (S.INTERRUPTED, "saved")


def test_a_chain_that_was_cancelled_before_it_began_is_cancelled(tmp_path: Path) -> None:
    end_chain(tmp_path, ChainEnd("ada", "cancelled by ada"))
    job_statuses = [JobStatus(S.UNKNOWN, "forgotten"), JobStatus(S.UNKNOWN, "forgotten")]
    # Slurm has forgotten both; the mark has not.
    assert current(tmp_path, [JobStatus(S.CANCELLED), *job_statuses[:1]])[1].reason == "by ada"


@pytest.mark.parametrize(
    ("verdict", "restarts", "state"),
    [
        # Requeued by an administrator: the job took that for a cancellation, its next attempt left at once.
        ({"verdict": "stop", "rule": "cancelled", "state": "CANCELLED"}, 1, S.CANCELLED),
        ({"verdict": "continue", "rule": "ended_by_user"}, 1, S.CANCELLED),
        ({"verdict": "stop", "rule": "failed"}, 0, S.FAILED),
        # Ended in an earlier attempt, or one of an earlier version: nothing speaks against Slurm's word.
        ({"verdict": "done"}, 1, S.COMPLETED),
        ({}, 0, S.COMPLETED),
    ],
)
def test_job_that_leaves_at_once_is_no_success(
    tmp_path: Path, verdict: dict[str, str], restarts: int, state: State
) -> None:
    """To Slurm it is COMPLETED, with exit code 0."""
    done = state is S.COMPLETED
    mark(tmp_path, 1, code=0 if done else 143, **verdict)
    end_chain(tmp_path, ChainEnd("job 17", "as its verdict says"))
    job_statuses = [JobStatus(S.COMPLETED, exit_code=0, restarts=restarts), JobStatus(S.CANCELLED)]
    link, status = current(tmp_path, job_statuses)
    assert (link, status.state, status.restarts) == (1, state, restarts)
    assert status.chain and status.chain.jobs["17"].state is state
    if restarts:
        job_statuses[0] = replace(job_statuses[0], state=S.FAILED, exit_code=1)
        assert current(tmp_path, job_statuses)[1].state is state, "whatever it left with"


def test_chain_of_which_no_link_began_is_no_success(tmp_path: Path) -> None:
    completed = JobStatus(S.COMPLETED, exit_code=0)
    assert current(tmp_path, [completed])[1].state is S.COMPLETED, "as where no mark could be written at all"
    end_chain(tmp_path, ChainEnd("ada", "cancelled by ada"))
    link, status = current(tmp_path, [completed, JobStatus(S.CANCELLED)])
    assert (link, status.state, status.reason, status.exit_code) == (1, S.CANCELLED, "by ada", None)


def test_links_whose_jobs_are_not_known_are_skipped(tmp_path: Path) -> None:
    links = replace(ref(tmp_path, 1), links={1: "17", 3: "19", 5: "21"})
    status = status_of_chain(links, statuses(S.FAILED, S.TIMEOUT, S.PENDING))
    assert status.chain and (str(status.chain), status.chain.job_id) == ("5/5", "21")
    assert (status.chain.numbers, status.reason) == ([1, 3, 5], "link 3 was TIMEOUT")
    status = status_of_chain(links, statuses(S.FAILED, S.RUNNING, S.PENDING))
    assert status.chain and (str(status.chain), status.chain.after_current) == ("3/5", ["21"])
    assert status_of_chain(links, statuses(S.FAILED, S.FAILED, S.FAILED)).reason == "the last of 5 links"
    assert may_go_on(links, JobStatus(S.FAILED))


def test_jobs_of_another_launch_are_no_links(tmp_path: Path) -> None:
    """The run was removed and launched anew while its chain waited; the marks, or Slurm, have the tag."""
    mark(tmp_path, 1)
    mark(tmp_path, 2, code=0, tag="of-old")
    links = ref(tmp_path, 3)
    job_statuses = [JobStatus(S.RUNNING), JobStatus(S.COMPLETED), JobStatus(S.UNKNOWN, ANOTHER_JOB)]
    status = status_of_chain(links, job_statuses)
    assert (status.state, status.chain) == (S.RUNNING, ChainJobs(1, 5, {"17": job_statuses[0]}, [1]))
    assert [attempt.job_id for attempt in read_attempts(tmp_path, tags=("a-tag",))] == ["17"]
    assert [attempt.tag for attempt in read_attempts(tmp_path)] == [None, "of-old"]


def test_the_first_end_of_a_chain_is_recorded(tmp_path: Path) -> None:
    end_chain(tmp_path, ChainEnd("job 17", "all is done", ended=12.0))
    end_chain(tmp_path, ChainEnd("ada", "cancelled by ada", ended=13.0))
    assert chain_end(tmp_path) == ChainEnd("job 17", "all is done", 12.0)


def test_claims_name_the_known_links(tmp_path: Path) -> None:
    assert later_jobs(tmp_path) == {}
    for link, job in enumerate(JOBS[:3], 1):
        assert claim(tmp_path, job, link) == job
    assert claim(tmp_path, "99", 2) == "18", "a second job of link 2 leaves"
    assert later_jobs(tmp_path) == {2: "18", 3: "19"}
    assert link_jobs(tmp_path) == ["17", "18", "19"]


def test_missing_claim_hides_no_other(tmp_path: Path) -> None:
    """A disk was full, or the answer to a submission was lost for good."""
    for link, holder in ((1, "17"), (2, GIVEN_UP), (5, "21"), (12, "30")):
        claim(tmp_path, holder, link)
    (tmp_path / "marks" / "job.x").write_text("40\n")
    (tmp_path / "marks" / ".job-4").write_text("40\n")
    assert later_jobs(tmp_path) == {5: "21", 12: "30"}
    mark(tmp_path, 1)
    mark(tmp_path, 3)
    mark(tmp_path, 4, tag="of-old")
    assert later_jobs(tmp_path, ("a-tag",)) == {3: "19", 5: "21", 12: "30"}
    assert link_jobs(tmp_path) == ["17", "19", "20", "21", "30"]


def test_marks_alone_give_the_state_of_a_chain_that_is_over(tmp_path: Path) -> None:
    """A chain that may go on is not over while no scheduler can be asked."""
    assert read_marks_alone(ref(tmp_path, 2)) is None
    mark(tmp_path, 1, code=75)
    assert read_marks_alone(ref(tmp_path, 1)) is None
    mark(tmp_path, 2, code=0, start_time=300.0)
    done = read_marks_alone(ref(tmp_path, 3))
    assert done and done.state is S.COMPLETED and done.chain and done.chain.current == 2
    mark(tmp_path, 2, code=1, start_time=300.0)
    assert read_marks_alone(ref(tmp_path, 2)) is None
    assert read_marks_alone(ref(tmp_path, 2, links=2)) is not None
    end_chain(tmp_path, ChainEnd("job 18", "stopped"))
    stopped = read_marks_alone(ref(tmp_path, 3))
    assert stopped and stopped.state is S.FAILED and stopped.reason == "exit code 1; stopped"


@pytest.mark.parametrize(
    ("word", "code", "state"),
    [
        ("TIMEOUT", 143, S.TIMEOUT),
        ("TimeLimit", 143, S.TIMEOUT),
        ("PREEMPTED", 143, S.PREEMPTED),
        ("CANCELLED", 143, S.CANCELLED),
        ("TIMEOUT", 75, S.INTERRUPTED),
        ("TIMEOUT", 0, S.COMPLETED),
        ("SOMETHING", 1, S.FAILED),
        (None, 143, S.FAILED),
    ],
)
def test_slurms_state_in_the_mark_of_an_end_is_read(
    tmp_path: Path, word: str | None, code: int, state: State
) -> None:
    mark(tmp_path, 1, code=code, state=word)
    status = read_marks(JobRef({}, tmp_path, ()), "17")
    assert status and status.state is state


def test_a_link_has_the_state_that_the_next_one_recorded(tmp_path: Path) -> None:
    """The link's node failed: the link left no exit code and no time."""
    mark(tmp_path, 1, state="NODE_FAIL", rule="node_failed", why="a node of it failed", judged_by="job 18")
    status = read_marks(JobRef({}, tmp_path, ()), "17")
    assert status == JobStatus(S.NODE_FAIL, None, "n1", why="a node of it failed")
