"""Recorded lines of squeue and sacct of Slurm 22.05.8 for jobs that ended in many ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.schedulers.base import JobStatus
from launcher.schedulers.job_status import status_of
from launcher.slurm.records import SEPARATOR, Record, group_by_job, parse_sacct, parse_squeue, script_of
from launcher.slurm.states import State
from slipway.common.node.slurm_states import STATES

RECORDED = Path(__file__).parent / "recorded"


def read_recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


QUEUE = {record.command.rpartition(" ")[2]: record for record in parse_squeue(read_recorded("squeue"))}
ATTEMPTS = group_by_job(parse_sacct(read_recorded("sacct")))


def row(*fields: object) -> str:
    return SEPARATOR.join(map(str, fields)) + "\n"


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("completed", JobStatus(State.COMPLETED, None, "n1", "00:00:00", 0)),
        ("failed", JobStatus(State.FAILED, "exit code 3", "n1", "00:00:00", 3)),
        (
            "saved",
            JobStatus(
                State.INTERRUPTED, "saved before its end: launching again continues", "n1", "00:00:00", 75
            ),
        ),
        ("kill9", JobStatus(State.FAILED, "exit code 137 (SIGKILL)", "n1", "00:00:00", 137)),
        ("cancelrun", JobStatus(State.CANCELLED, None, "n1", "00:00:04", 143)),
        ("cancelpend", JobStatus(State.CANCELLED, None, None, "00:00:00", None)),
        ("timeout", JobStatus(State.TIMEOUT, "TimeLimit", "n1", "00:01:07", 143)),
        ("nodefail", JobStatus(State.NODE_FAIL, "NodeDown", "n3", "00:00:29", None)),
        ("running", JobStatus(State.RUNNING, None, "n1", "00:02:05")),
        ("requeued", JobStatus(State.COMPLETED, None, "n1", "00:00:00", 0, restarts=1)),
    ],
)
def test_squeue_gives_the_status_of_a_job(tag: str, expected: JobStatus) -> None:
    assert status_of(QUEUE[f"t-{tag}"]) == expected


def test_a_cancellation_by_slurm_has_a_reason() -> None:
    status = status_of(replace(QUEUE["t-depnever"], word="CANCELLED"))
    assert status.state is State.CANCELLED
    assert status.reason == "its dependency failed, or can no longer be satisfied"


@pytest.mark.parametrize(
    ("tag", "restarts", "reason"),
    [
        ("pending", 0, "PartitionDown: its partition takes no jobs now"),
        ("held", 0, "JobHeldUser: held, `slipway release RUN` lets it go"),
        (
            "depnever",
            0,
            "DependencyNeverSatisfied: its dependency can no longer be satisfied, `slipway cancel RUN`",
        ),
        ("begin", 0, "BeginTime: its time to begin has not come; after a requeue that takes two minutes"),
        ("preempted", 1, "BeginTime: its time to begin has not come; after a requeue that takes two minutes"),
        ("reqhold", 1, "job requeued in held state: held, `slipway release RUN` lets it go"),
        (
            "special",
            1,
            "SPECIAL_EXIT: its site requeued it for how it ended; held, `slipway release RUN` lets it go",
        ),
    ],
)
def test_why_a_job_waits_is_said_in_plain_words(tag: str, restarts: int, reason: str) -> None:
    expected = JobStatus(State.PENDING, reason, None, "00:00:00", restarts=restarts)
    assert status_of(QUEUE[f"t-{tag}"]) == expected


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("completed", [JobStatus(State.COMPLETED, None, "n1", "00:00:00", 0)]),
        ("failed", [JobStatus(State.FAILED, "exit code 3", "n1", "00:00:00", 3)]),
        ("kill9", [JobStatus(State.FAILED, "exit code 137 (SIGKILL)", "n1", "00:00:00", 137)]),
        ("cancelrun", [JobStatus(State.CANCELLED, "by root", "n1", "00:00:04", None)]),
        ("timeout", [JobStatus(State.TIMEOUT, None, "n1", "00:01:07", None)]),
        (
            "requeued",
            [
                JobStatus(State.PENDING, "REQUEUED", "n1", "00:00:03"),
                JobStatus(State.COMPLETED, None, "n1", "00:00:00", 0),
            ],
        ),
        (
            "preempted",
            [
                JobStatus(State.PREEMPTED, None, "n4", "00:00:18"),
                JobStatus(
                    State.PENDING,
                    "BeginTime: its time to begin has not come; after a requeue that takes two minutes",
                    None,
                    "00:00:00",
                ),
            ],
        ),
    ],
)
def test_sacct_has_each_attempt(tag: str, expected: list[JobStatus]) -> None:
    attempts = ATTEMPTS[QUEUE[f"t-{tag}"].parent_id]
    assert [status_of(record) for record in attempts] == expected
    assert {record.tag for record in attempts} == {f"t-{tag}"}


def test_tasks_of_arrays_are_read() -> None:
    queue = group_by_job(parse_squeue(read_recorded("squeue")))
    (array,) = {record.parent_id for record in queue[QUEUE["t-array"].parent_id]}
    assert sorted(record.task or "" for record in queue[array]) == ["0", "1", "2", "3", "4"]
    waiting = QUEUE["t-arraypend"]
    assert (waiting.job_id, waiting.task) == (f"{waiting.parent_id}_[0,2-4%1]", "0,2-4")
    assert sorted(record.task or "" for record in ATTEMPTS[array]) == ["0", "1", "2", "3", "4"]


def test_every_line_is_understood() -> None:
    for name, parse in (("squeue", parse_squeue), ("sacct", parse_sacct)):
        records = parse(read_recorded(name))
        assert len(records) == len(read_recorded(name).splitlines())
        assert State.UNKNOWN not in {record.state for record in records}
        # squeue and sacct name the same script, each in its own way.
        assert {script_of(record) for record in records} == {Path("/results/rec_submission.sh")}


def test_a_notice_around_the_answer_hides_no_job() -> None:
    """A site's wrapper may print one; a job without its tag would be submitted once more."""
    (line, *_) = read_recorded("squeue").splitlines()
    (plain,) = parse_squeue(f"{line}\n")
    assert parse_squeue(f"Welcome\n{line}\nMaintenance on Monday\n\nat 9:00\n") == [plain]


def squeue_row(**changes: str) -> str:
    fields = {
        "job_id": "12", "raw": "12", "word": "RUNNING", "reason": "None", "nodes": "n1", "elapsed": "1:00",
        "code": "0", "restarts": "0", "user": "me", "command": "/a/b_submission.sh tag",
    } | changes  # fmt: skip
    return SEPARATOR.join(fields.values()) + SEPARATOR + "\n"


def sacct_row(**changes: str) -> str:
    fields = {
        "job_id": "12", "raw": "12", "word": "RUNNING", "reason": "None", "nodes": "n1",
        "elapsed": "00:01:00", "code": "0:0", "submit": "2026-01-01T00:00:00", "user": "me", "dir": "/w",
        "command": "sbatch /a/b_submission.sh tag",
    } | changes  # fmt: skip
    return SEPARATOR.join(fields.values()) + "\n"


HOSTILE = st.text(alphabet=st.one_of(st.sampled_from("|%_[]\n\r\t\x1e\x85\u2028 '9"), st.characters()))


@given(st.lists(HOSTILE, min_size=1, max_size=4))
def test_no_command_line_hides_or_invents_a_job(arguments: list[str]) -> None:
    """Commands hold all but the separator and NUL: bytes that are no text come as lone surrogates."""
    clean = [text.replace(SEPARATOR, "").replace("\0", "") for text in arguments]
    queue = "".join(
        squeue_row(job_id=str(number), command=f"/x_submission.sh {text} tag-{number}")
        for number, text in enumerate(clean, 1)
    )
    parsed = parse_squeue(queue)
    assert [record.parent_id for record in parsed] == [str(number) for number in range(1, len(clean) + 1)]
    assert [record.tag for record in parsed] == [f"tag-{record.parent_id}" for record in parsed]
    assert all(script_of(record) == Path("/x_submission.sh") for record in parsed)
    accounted = "".join(
        sacct_row(job_id=str(number), command=f"sbatch /x_submission.sh {text} tag-{number}")
        for number, text in enumerate(clean, 1)
    )
    assert [record.tag for record in parse_sacct(accounted)] == [
        f"tag-{record.parent_id}" for record in parsed
    ]


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    for parse in (parse_squeue, parse_sacct):
        for record in parse(text):
            status_of(record)


@pytest.mark.parametrize(
    ("job_id", "parent_id", "task"),
    [
        ("9", "9", None),
        ("9_3", "9", "3"),
        ("9_[3-5%1]", "9", "3-5"),
        ("9_[1,3,7-9]", "9", "1,3,7-9"),
        ("9_[0-8:4%1]", "9", "0-8:4"),
        ("12+0", "12+0", None),
    ],
)
def test_job_ids_are_taken_apart(job_id: str, parent_id: str, task: str | None) -> None:
    (record,) = parse_squeue(squeue_row(job_id=job_id))
    assert (record.parent_id, record.task) == (parent_id, task)


def test_lines_that_are_no_job_are_passed_over() -> None:
    assert parse_squeue("slurm_load_jobs error: Invalid job id specified\n") == []
    steps = sacct_row(job_id="12.batch") + "sacct: error: x\n\n" + sacct_row(word="FAILED", code="1:0")
    assert [record.job_id for record in parse_sacct(steps)] == ["12"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("0:9", (137, "exit code 137 (SIGKILL)")),
        ("2:0", (2, "exit code 2")),
        # Numbers of Slurm's own that are no signals.
        (
            "0:53",
            (
                None,
                "JobLaunchFailure: Slurm could not start the script; is the directory of its log there?",
            ),
        ),
        ("0:125", (None, None)),
    ],
)
def test_exit_codes_of_the_accounting(code: str, expected: tuple[int | None, str | None]) -> None:
    (record,) = parse_sacct(sacct_row(word="FAILED", code=code))
    status = status_of(record)
    assert (status.exit_code, status.reason) == expected


# Slurm 22.05 prints the wait status, later versions the exit code and the signal.
@pytest.mark.parametrize(
    ("field", "code"),
    [("768", 3), ("3:0", 3), ("9", 137), ("0:9", 137), ("0", 0), ("0:0", 0), ("0:125", None), ("", None)],
)
def test_exit_codes_of_the_queue(field: str, code: int | None) -> None:
    (record,) = parse_squeue(squeue_row(code=field))
    assert record.exit_code == code


def test_the_queue_tells_a_launch_failure_as_the_accounting_does() -> None:
    for reason, code in (("JobLaunchFailure", "53"), ("RaisedSignal:53(Real-time_signal_19)", "0:53")):
        (record,) = parse_squeue(squeue_row(word="FAILED", reason=reason, code=code))
        assert status_of(record).exit_code is None
        assert "Slurm could not start the script" in (status_of(record).reason or "")


@pytest.mark.parametrize(
    ("command", "work_dir", "expected"),
    [
        ("/a b/x_submission.sh tag", None, "/a b/x_submission.sh"),
        ("/a/x_submission.sh", None, "/a/x_submission.sh"),
        ("/a/submitted/t.1_submission.sh t", None, "/a/submitted/t.1_submission.sh"),
        ("sbatch --hold /a/submitted/t.2_submission.sh 2 t", "/w", "/a/submitted/t.2_submission.sh"),
        ("sbatch /a b/x_submission.sh tag", "/w", "/a b/x_submission.sh"),
        ("sbatch -o /dev/null --hold /a/x_submission.sh tag", "/w", "/a/x_submission.sh"),
        ("sbatch x_submission.sh", "/w", "/w/x_submission.sh"),
        ("sbatch other.sh", "/w", None),
        ("(null)", None, None),
    ],
)
def test_the_script_of_a_job(command: str, work_dir: str | None, expected: str | None) -> None:
    record = Record("1", "1", "RUNNING", None, None, None, None, 0, "me", command, work_dir)
    assert script_of(record) == (Path(expected) if expected else None)


# JOB STATE CODES of squeue(1) and sacct(1), 22.05 to 25.05, and the states in slurm.h that these leave out.
NAMES = """
BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PENDING PREEMPTED
RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT
STOPPED SUSPENDED TIMEOUT LAUNCH_FAILED POWER_UP_NODE RECONFIG_FAIL UPDATE_DB EXPEDITING
"""


def test_every_word_of_slurm_is_known() -> None:
    assert set(NAMES.split()) == set(STATES)
    assert set(STATES.values()) <= {state.value for state in State} - {"UNKNOWN"}


@pytest.mark.parametrize(
    ("word", "state", "reason"),
    [
        ("BOOT_FAIL", State.NODE_FAIL, "BOOT_FAIL"),
        ("CONFIGURING", State.PENDING, "CONFIGURING: its nodes are being made ready"),
        ("REQUEUED", State.PENDING, "REQUEUED"),
        ("CANCELLED by 4294967290", State.CANCELLED, "by 4294967290"),
        ("CANCELLED+", State.CANCELLED, None),
        ("OUT_OF_MEMORY", State.OUT_OF_MEMORY, None),
        ("STOPPED", State.SUSPENDED, "STOPPED"),
        ("WARP_CORE_BREACH", State.UNKNOWN, "Slurm says 'WARP_CORE_BREACH'"),
        ("", State.UNKNOWN, "Slurm says ''"),
    ],
)
def test_words_of_slurm_are_states(word: str, state: State, reason: str | None) -> None:
    (record,) = parse_sacct(sacct_row(word=word))
    status = status_of(record)
    assert (status.state, status.reason) == (state, reason)


def test_a_time_limit_with_exit_code_75_stays_a_time_limit() -> None:
    (record,) = parse_sacct(sacct_row(word="TIMEOUT", code="75:0"))
    assert status_of(record).state is State.TIMEOUT
    assert State.INTERRUPTED.is_final
    assert not State.INTERRUPTED.is_good
