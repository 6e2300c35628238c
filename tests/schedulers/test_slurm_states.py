"""States of jobs, from the queue, the accounting and the marks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.schedulers.base import JobRef, JobStatus
from launcher.schedulers.job_status import ANOTHER_JOB, read_marks, resolve, status_of_job
from launcher.slurm.records import SEPARATOR, Record, parse_sacct
from launcher.slurm.states import State
from slipway.common.node.marks import note_cancelled
from tests.job_marks import leave_marks


@pytest.fixture
def ref(tmp_path: Path) -> JobRef:
    return JobRef({1: "12"}, tmp_path, ["a-tag"], "login")


def queue_record(
    word: str, *, job_id: str = "12", tag: str = "a-tag", restarts: int = 0, code: int = 0
) -> Record:
    command = f"/x_submission.sh {tag}"
    return Record(job_id, "77", word, None, "n1", "00:01:00", code, restarts, "me", command)


def accounting_record(
    word: str, *, job_id: str = "12", tag: str = "a-tag", command: str | None = None
) -> Record:
    line = f"sbatch /x_submission.sh {tag}" if command is None else command
    return Record(job_id, "77", word, None, "n1", "00:01:00", 0, 0, "me", line, "/w")


def mark(ref: JobRef, *, started: float | None = None, ended: float | None = None, code: int = 0) -> None:
    leave_marks(ref.launch_dir, "12", started=started, ended=ended, code=code)


def test_marks_give_the_status(ref: JobRef) -> None:
    assert read_marks(ref) is None
    mark(ref, started=100.0)
    running = read_marks(ref)
    assert running and running.state is State.UNKNOWN and running.nodes == "n[1-2]"
    mark(ref, ended=100.0 + 90061)
    done = JobStatus(State.COMPLETED, None, "n[1-2]", "1-01:01:01", 0)
    assert read_marks(ref) == done
    mark(ref, ended=160.0, code=143)
    failed = JobStatus(State.FAILED, "exit code 143 (SIGTERM)", "n[1-2]", "00:01:00", 143)
    assert read_marks(ref, "12") == failed
    assert read_marks(ref, "13") is None
    mark(ref, ended=160.0, code=75)
    saved = read_marks(ref)
    assert saved and saved.state is State.INTERRUPTED


def test_the_end_of_a_jobs_first_attempt_is_not_its_end(ref: JobRef) -> None:
    mark(ref, started=100.0, ended=200.0)
    leave_marks(ref.launch_dir, "12", attempt=1, started=300.0)
    status = read_marks(ref)
    assert status and status.state is State.UNKNOWN and status.restarts == 1


def test_a_torn_mark_gives_no_state(ref: JobRef) -> None:
    mark(ref, ended=1.0)
    path = ref.launch_dir / "marks" / "12.0.ended.json"
    path.write_text('{"exit_code": 0, "en')
    assert read_marks(ref) is None
    path.write_text('{"job_id": "12"}')
    status = read_marks(ref)
    assert status and status.state is State.UNKNOWN


P, R, C, F = (JobStatus(state) for state in (State.PENDING, State.RUNNING, State.COMPLETED, State.FAILED))
U = JobStatus(State.UNKNOWN, "Slurm says 'X'")
AGAIN = JobStatus(State.FAILED, restarts=1)


@pytest.mark.parametrize(
    ("live", "past", "marked", "expected"),
    [
        (P, None, None, State.PENDING),
        (R, None, None, State.RUNNING),
        # The queue is believed while the job lives: accounting lags, and a requeued job left an exit mark.
        (R, C, None, State.RUNNING),
        (P, F, F, State.PENDING),
        (JobStatus(State.COMPLETING), C, C, State.COMPLETING),
        # Then the accounting, then the queue's memory, then the marks.
        (C, F, C, State.FAILED),
        (F, None, C, State.FAILED),
        (F, R, C, State.FAILED),
        (None, JobStatus(State.TIMEOUT), C, State.TIMEOUT),
        (None, None, C, State.COMPLETED),
        (None, None, F, State.FAILED),
        (U, None, F, State.FAILED),
        (None, R, C, State.COMPLETED),
        # A record of an earlier attempt is late.
        (AGAIN, JobStatus(State.PREEMPTED), C, State.FAILED),
        (None, JobStatus(State.PREEMPTED), AGAIN, State.FAILED),
        (None, JobStatus(State.PREEMPTED), JobStatus(State.UNKNOWN, "began", restarts=1), State.UNKNOWN),
        (None, JobStatus(State.PENDING, restarts=1), C, State.UNKNOWN),
        # An unknown state is never healthy.
        (None, None, None, State.UNKNOWN),
        (None, R, None, State.UNKNOWN),
        (None, U, None, State.UNKNOWN),
        (U, U, None, State.UNKNOWN),
    ],
)
def test_the_state_is_resolved_from_queue_accounting_and_marks(
    live: JobStatus | None, past: JobStatus | None, marked: JobStatus | None, expected: State
) -> None:
    status = resolve(live, past, marked)
    assert status.state is expected
    assert status.reason or status.state is not State.UNKNOWN


def test_facts_missing_in_one_source_come_from_another_of_the_same_end() -> None:
    live = JobStatus(State.TIMEOUT, "TimeLimit", "n1", "00:01:04", 143)
    past = JobStatus(State.TIMEOUT, None, "n1", "00:01:04", None)
    assert resolve(live, past, None) == live
    assert resolve(None, past, C).exit_code is None


def test_each_attempt_in_the_accounting_is_a_restart(ref: JobRef) -> None:
    attempts = [accounting_record("REQUEUED"), accounting_record("PREEMPTED"), accounting_record("COMPLETED")]
    status = status_of_job(ref, [], attempts)
    assert (status.state, status.restarts) == (State.COMPLETED, 2)
    back = status_of_job(ref, [queue_record("PENDING", restarts=2)], attempts[:2])
    assert (back.state, back.restarts) == (State.PENDING, 2)
    # Preempted for good, where the job may not be requeued.
    assert status_of_job(ref, [], attempts[1:2]).state is State.PREEMPTED
    # The first attempt was preempted and is accounted; the second has ended, and is not yet.
    late = status_of_job(ref, [queue_record("FAILED", restarts=1, code=3)], [accounting_record("PREEMPTED")])
    assert (late.state, late.exit_code, late.restarts) == (State.FAILED, 3, 1)


def test_a_job_of_the_same_id_without_our_tag_is_not_ours(ref: JobRef) -> None:
    other = status_of_job(
        ref, [queue_record("RUNNING", tag="other")], [accounting_record("COMPLETED", tag="other")]
    )
    assert other == JobStatus(State.UNKNOWN, ANOTHER_JOB)
    # A tag that ends with ours is another one, too.
    assert status_of_job(ref, [queue_record("RUNNING", tag="not-a-tag")], []).reason == ANOTHER_JOB
    ours = status_of_job(
        ref,
        [queue_record("RUNNING", tag="other")],
        [accounting_record("FAILED"), accounting_record("COMPLETED", tag="other")],
    )
    assert (ours.state, ours.restarts) == (State.FAILED, 0)
    mark(ref, started=100.0, ended=160.0, code=3)
    assert status_of_job(ref, [queue_record("RUNNING", tag="other")], []).exit_code == 3


def test_an_accounting_without_command_lines_is_believed(ref: JobRef) -> None:
    """Slurm before 21.08, and jobs from before its upgrade."""
    record = accounting_record("COMPLETED", command="")
    assert status_of_job(ref, [], [record]).state is State.COMPLETED
    # This accounting is only late, and says later whose job this is.
    late = status_of_job(ref, [], [replace(record, work_dir="")])
    assert late == JobStatus(State.UNKNOWN, "the scheduler does not know this job")


def test_gone_from_the_queue_and_not_yet_accounted_is_not_healthy(ref: JobRef) -> None:
    assert status_of_job(ref, [], []).reason == "the scheduler does not know this job"
    mark(ref, started=100.0)
    status = status_of_job(ref, [], [])
    assert (status.state, status.reason) == (State.UNKNOWN, "it started, and recorded no end")


def test_canceller_is_known_when_slurm_has_forgotten_the_job(ref: JobRef) -> None:
    note_cancelled(ref.launch_dir, "12", "ada")
    never_began = status_of_job(ref, [], [])
    assert (never_began.state, never_began.reason) == (State.CANCELLED, "by ada")
    assert status_of_job(ref, [queue_record("RUNNING")], []).state is State.RUNNING, "it is not over yet"
    mark(ref, started=100.0, ended=160.0, code=143)
    ended = status_of_job(ref, [], [])
    assert (ended.state, ended.elapsed, ended.exit_code) == (State.CANCELLED, "00:01:00", 143)
    mark(ref, started=100.0, ended=160.0, code=0)
    assert status_of_job(ref, [], []).state is State.COMPLETED, "it was quicker"


@pytest.fixture
def array(ref: JobRef) -> JobRef:
    script = ref.launch_dir / "x_submission.sh"
    script.write_text("#!/bin/bash\n#SBATCH --array=0-4%1\n")
    return ref


def test_the_status_of_an_array_is_from_queue_and_accounting(array: JobRef) -> None:
    live = [queue_record("RUNNING", job_id="12_1"), queue_record("PENDING", job_id="12_[2-4%1]")]
    past = [accounting_record("COMPLETED", job_id="12_0"), accounting_record("PENDING", job_id="12_[1-4%1]")]
    status = status_of_job(array, live, past)
    assert (status.state, status.reason) == (State.RUNNING, "tasks: 1 COMPLETED, 1 RUNNING, 3 PENDING")
    assert status.tasks == {
        "0": State.COMPLETED,
        "1": State.RUNNING,
        **dict.fromkeys("234", State.PENDING),
    }


def test_a_task_that_was_cancelled_before_it_began_has_no_record(array: JobRef) -> None:
    """Slurm forgets it at once; the script has five tasks."""
    past = [accounting_record("COMPLETED", job_id=f"12_{number}") for number in range(4)]
    status = status_of_job(array, [], past)
    assert (status.state, status.tasks["4"]) == (State.CANCELLED, State.CANCELLED)
    assert status.reason == "tasks: 4 COMPLETED, 1 CANCELLED; 4: before it began"
    leave_marks(array.launch_dir, "12_4", started=1.0, ended=2.0)
    assert status_of_job(array, [], past).state is State.COMPLETED
    # Where Slurm knows nothing of the array, it may wait.
    assert status_of_job(array, [], []).tasks["0"] is State.UNKNOWN


def test_sacct_takes_128_from_exit_codes(ref: JobRef) -> None:
    """Exit code 139 (SIGSEGV) becomes 11, and 203 becomes 75, that of a training that has saved."""
    (record,) = parse_sacct(sacct_line("FAILED", "11:0"))
    assert status_of_job(ref, [], [record]).exit_code == 11
    assert (
        status_of_job(ref, [queue_record("FAILED", code=139)], [record]).reason == "exit code 139 (SIGSEGV)"
    )
    mark(ref, started=100.0, ended=160.0, code=203)
    status = status_of_job(ref, [], [*parse_sacct(sacct_line("FAILED", "75:0"))])
    assert (status.state, status.exit_code) == (State.FAILED, 203)


def sacct_line(word: str, code: str) -> str:
    fields = ("12", "12", word, "", "n1", "00:01:00", code, "2026-01-01", "me", "/w", "sbatch /x.sh a-tag")
    return SEPARATOR.join(fields)


def test_marks_of_tasks_give_the_status_of_an_array(array: JobRef) -> None:
    leave_marks(array.launch_dir, "12_0", started=1.0, ended=2.0)
    leave_marks(array.launch_dir, "12_1", attempt=0, started=3.0, ended=4.0, code=3)
    leave_marks(array.launch_dir, "12_1", attempt=1, started=5.0)
    status = read_marks(array, "12")
    assert status and status.state is State.UNKNOWN
    assert status.reason == "tasks: 1 COMPLETED, 4 UNKNOWN; 1: it started, and recorded no end"
    for number in range(1, 5):
        leave_marks(
            array.launch_dir, f"12_{number}", attempt=1, started=5.0, ended=6.0, code=int(number == 2)
        )
    status = read_marks(array)
    assert status and (status.state, status.exit_code) == (State.FAILED, 1)
    assert status.reason == "tasks: 4 COMPLETED, 1 FAILED; 2: exit code 1"
