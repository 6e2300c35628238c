"""Slurm's words as statuses: against what Slurm 22.05.8 printed for 24 jobs that ended in many ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.schedulers.base import JobStatus, State, Ticket
from launcher.schedulers.states import (
    SLURM_STATES,
    from_markers,
    parse_sacct,
    parse_squeue,
    resolve,
)

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("1", JobStatus(State.COMPLETED, None, "n1", "00:00:01", 0)),
        ("2", JobStatus(State.FAILED, "exit code 3", "n1", "00:00:00", 3)),
        ("4", JobStatus(State.FAILED, "JobLaunchFailure", "n1", "00:00:00", 137)),
        ("5", JobStatus(State.CANCELLED, None, "n1", "00:00:02", 143)),
        ("6", JobStatus(State.CANCELLED, None, None, "00:00:00", None)),
        ("7", JobStatus(State.TIMEOUT, "TimeLimit", "n1", "00:01:04", 143)),
        ("8", JobStatus(State.PENDING, "DependencyNeverSatisfied", None, "00:00:00")),
        ("9_2", JobStatus(State.COMPLETED, None, "n1", "00:01:00", 0)),
        ("13", JobStatus(State.NODE_FAIL, "NodeDown", "n2", "00:01:05", None)),
        ("21", JobStatus(State.RUNNING, None, "n1", "00:00:01")),
        ("22", JobStatus(State.COMPLETING, None, "n1", "00:00:01")),
        ("24", JobStatus(State.PENDING, "ReqNodeNotAvail, UnavailableNodes:n2", None, "00:00:00")),
    ],
)
def test_squeue(job: str, expected: JobStatus) -> None:
    assert parse_squeue(recorded("squeue"))[job] == expected


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("1", JobStatus(State.COMPLETED, None, "n1", "00:00:01", 0)),
        ("2", JobStatus(State.FAILED, "exit code 3", "n1", "00:00:00", 3)),
        ("4", JobStatus(State.FAILED, "exit code 137 (SIGKILL)", "n1", "00:00:00", 137)),
        ("5", JobStatus(State.CANCELLED, "by 0", "n1", "00:00:02", None)),
        ("6", JobStatus(State.CANCELLED, "by 0", None, "00:00:00", None)),
        ("7", JobStatus(State.TIMEOUT, None, "n1", "00:01:04", None)),
        ("9_3", JobStatus(State.COMPLETED, None, "n1", "00:01:00", 0)),
        ("12", JobStatus(State.COMPLETED, None, "n1", "00:00:30", 0)),
        ("3", JobStatus(State.PENDING, "BeginTime", None, "00:00:00")),
    ],
)
def test_sacct(job: str, expected: JobStatus) -> None:
    assert parse_sacct(recorded("sacct"))[job] == expected


def test_every_line_is_understood() -> None:
    assert len(parse_squeue(recorded("squeue"))) == len(recorded("squeue").splitlines())
    assert len(parse_sacct(recorded("sacct"))) == len(recorded("sacct").splitlines())


def test_steps_and_garbage_are_passed_over() -> None:
    text = "12.batch|COMPLETED|0:0|None|n1|00:00:01\nsacct: error: x\n\n12|FAILED|1:0|None|n1|1-02:03:04"
    assert parse_sacct(text) == {"12": JobStatus(State.FAILED, "exit code 1", "n1", "1-02:03:04", 1)}
    assert parse_squeue("slurm_load_jobs error: Invalid job id specified\n") == {}


def test_a_training_that_saved_before_its_end_has_not_failed(tmp_path: Path) -> None:
    """Exit code 75 is EX_TEMPFAIL: 75 << 8 in squeue's wait status."""
    expected = JobStatus(
        State.INTERRUPTED, "saved before its end: launching again continues", "n1", "00:01:00", 75
    )
    assert parse_sacct("12|FAILED|75:0|None|n1|00:01:00") == {"12": expected}
    assert parse_squeue(f"12|FAILED|NonZeroExitCode|n1|1:00|{75 << 8}|") == {"12": expected}
    (tmp_path / "started.json").write_text('{"job_id": "12", "started": 100, "nodes": "n1"}')
    (tmp_path / "exit.json").write_text('{"job_id": "12", "exit_code": 75, "ended": 160}')
    assert from_markers(tmp_path) == expected
    # What Slurm ended itself stays what Slurm says it was.
    assert parse_sacct("12|TIMEOUT|75:0|None|n1|00:01:00")["12"].state is State.TIMEOUT
    assert State.INTERRUPTED.is_final
    assert not State.INTERRUPTED.is_good


@pytest.mark.parametrize(
    ("word", "state", "reason"),
    [
        ("BOOT_FAIL", State.NODE_FAIL, None),
        ("CONFIGURING", State.PENDING, "CONFIGURING"),
        ("REQUEUED", State.PENDING, None),
        ("CANCELLED by 1000", State.CANCELLED, "by 1000"),
        ("OUT_OF_MEMORY", State.OUT_OF_MEMORY, None),
        ("STOPPED", State.SUSPENDED, None),
        ("WARP_CORE_BREACH", State.UNKNOWN, "Slurm says 'WARP_CORE_BREACH'"),
        ("", State.UNKNOWN, "Slurm says ''"),
    ],
)
def test_words(word: str, state: State, reason: str | None) -> None:
    status = parse_sacct(f"1|{word}|0:0|None|n1|00:00:01")["1"]
    assert (status.state, status.reason) == (state, reason)


def test_no_word_of_slurm_is_taken_for_unknown() -> None:
    assert State.UNKNOWN not in SLURM_STATES.values()


@pytest.fixture
def ticket(tmp_path: Path) -> Ticket:
    return Ticket("12", tmp_path)


def mark(ticket: Ticket, *, started: float | None = None, ended: float | None = None, code: int = 0) -> None:
    if started is not None:
        marker = {"job_id": "12", "started": started, "nodes": "n[1-2]", "host": "n1"}
        (ticket.launch_dir / "started.json").write_text(json.dumps(marker))
    if ended is not None:
        marker = {"job_id": "12", "ended": ended, "exit_code": code}
        (ticket.launch_dir / "exit.json").write_text(json.dumps(marker))


def test_markers(ticket: Ticket) -> None:
    assert from_markers(ticket.launch_dir) is None
    mark(ticket, started=100.0)
    begun = from_markers(ticket.launch_dir)
    assert begun and begun.state is State.UNKNOWN and begun.nodes == "n[1-2]"
    mark(ticket, ended=100.0 + 90061)
    done = JobStatus(State.COMPLETED, None, "n[1-2]", "1-01:01:01", 0)
    assert from_markers(ticket.launch_dir) == done
    mark(ticket, ended=160.0, code=143)
    failed = JobStatus(State.FAILED, "exit code 143 (SIGTERM)", "n[1-2]", "00:01:00", 143)
    assert from_markers(ticket.launch_dir, "12") == failed
    assert from_markers(ticket.launch_dir, "13") is None


def test_the_end_of_a_jobs_first_life_is_not_its_end(ticket: Ticket) -> None:
    mark(ticket, started=300.0, ended=200.0)
    begun = from_markers(ticket.launch_dir)
    assert begun and begun.state is State.UNKNOWN


def test_a_torn_marker_tells_nothing(ticket: Ticket) -> None:
    (ticket.launch_dir / "exit.json").write_text('{"exit_code": 0, "en')
    assert from_markers(ticket.launch_dir) is None
    (ticket.launch_dir / "exit.json").write_text('{"job_id": "12"}')
    status = from_markers(ticket.launch_dir)
    assert status and status.state is State.UNKNOWN


P, R, C, F = (JobStatus(state) for state in (State.PENDING, State.RUNNING, State.COMPLETED, State.FAILED))
U = JobStatus(State.UNKNOWN, "Slurm says 'X'")


@pytest.mark.parametrize(
    ("live", "accounted", "exit_code", "expected"),
    [
        (P, None, None, State.PENDING),
        (R, None, None, State.RUNNING),
        # The queue is believed while the job lives: accounting lags, and a requeued job left an exit mark.
        (R, C, None, State.RUNNING),
        (P, F, 1, State.PENDING),
        (JobStatus(State.COMPLETING), C, 0, State.COMPLETING),
        # Then the accounting, then the queue's memory, then the marks.
        (C, F, 0, State.FAILED),
        (F, None, 0, State.FAILED),
        (F, R, 0, State.FAILED),
        (None, JobStatus(State.TIMEOUT), 0, State.TIMEOUT),
        (None, None, 0, State.COMPLETED),
        (None, None, 3, State.FAILED),
        (U, None, 3, State.FAILED),
        (None, R, 0, State.COMPLETED),
        # What nobody can tell is never healthy.
        (None, None, None, State.UNKNOWN),
        (None, R, None, State.UNKNOWN),
        (None, U, None, State.UNKNOWN),
        (U, U, None, State.UNKNOWN),
    ],
)
def test_resolve(
    ticket: Ticket,
    live: JobStatus | None,
    accounted: JobStatus | None,
    exit_code: int | None,
    expected: State,
) -> None:
    if exit_code is not None:
        mark(ticket, started=100.0, ended=160.0, code=exit_code)
    status = resolve(ticket, live, accounted)
    assert status.state is expected
    assert status.reason or status.state is not State.UNKNOWN


def test_resolve_fills_in_what_another_source_knows(ticket: Ticket) -> None:
    live = parse_squeue(recorded("squeue"))["7"]
    accounted = parse_sacct(recorded("sacct"))["7"]
    assert resolve(ticket, live, accounted) == JobStatus(State.TIMEOUT, "TimeLimit", "n1", "00:01:04", 143)
    mark(ticket, started=100.0, ended=160.0, code=0)  # another ending: its exit code says nothing here
    assert resolve(ticket, None, accounted).exit_code is None


def test_begun_and_gone_says_so(ticket: Ticket) -> None:
    mark(ticket, started=100.0)
    status = resolve(ticket, None, None)
    assert status.state is State.UNKNOWN and status.reason == "it started, and recorded no end"
