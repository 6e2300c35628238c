"""`slipway status`, once and with `--watch`, on runs on disk."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import threading
import time
from typing import Any

import pytest
from monitor_samples import (
    COMPLETED,
    FAILED,
    PENDING,
    RUNNING,
    FakeScheduler,
    Runs,
    append,
    slipway,
    start,
    train,
    whole_training,
)

from launcher.cli.status import _look as look
from launcher.errors import UserError
from launcher.jobs.lookup import RunRef, find_run
from launcher.monitor.polling import StatusPoller
from launcher.monitor.run_status import StatusRow, collect_status
from launcher.monitor.watching import draw
from launcher.runs.provenance import user
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from launcher.ui.tables import colour
from slipway.common.backoff import double_wait
from slipway.common.node.marks import note_cancelled
from tests.job_marks import leave_marks

pytestmark = pytest.mark.usefixtures("fast")

Capsys = pytest.CaptureFixture[str]

INTERRUPTED = JobStatus(State.INTERRUPTED, "saved before its end: launching again continues")


def test_status(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch("a", job_id="1"), whole_training(0, 100)[:-1])
    runs.launch("b", job_id="2", user=user())
    scheduler.set("1", JobStatus(State.RUNNING, None, "n[1-2]", "00:00:50", restarts=2))
    scheduler.set("2", PENDING)
    assert slipway(runs, "status", "a", "b") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["RUN", "LAUNCH", "JOB", "STATE"]
    # The first is another user's.
    assert " ".join(lines[1]) == (
        f"a 1 1 RUNNING {lines[1][4]} 00:00:50/00:30:00 2×2 100/300 5.2615 5.4264 4.10k 00:01:40 2 n[1-2] u -"
    )
    # Submitted on that day, and running for 50 s.
    assert re.fullmatch(r"\d\d:\d\d|\d+ [A-Z][a-z]{2}", lines[1][4])
    assert re.fullmatch(
        r"b 1 2 PENDING (12:00|21 Nov|2026-11) - 2×2 - - - - - - - - Resources", " ".join(lines[2])
    )
    assert scheduler.questions == [["1", "2"]]  # one question for all


def test_status_as_json(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch("a", job_id="1"), [start(), train(1, loss=float("nan"))])
    tasks = {"0": State.COMPLETED, "1": State.FAILED}
    scheduler.set("1", JobStatus(State.FAILED, "task 1: exit code 3", restarts=1, tasks=tasks))
    assert slipway(runs, "status", "--json") == 0
    (item,) = json.loads(capsys.readouterr().out)
    assert (item["run"], item["state"], item["step"], item["loss"]) == ("a", "FAILED", 1, "nan")
    assert item["tasks"] == {"0": "COMPLETED", "1": "FAILED"}
    assert (item["restarts"], item["user"], item["eta_seconds"]) == (1, "u", None)


def test_status_names_a_different_training(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    changes = [{"key": f"training.model.{name}", "old": 1, "new": 2} for name in ("seed", "lr", "k", "l")]
    runs.launch(differs={"launch": 1, "changes": changes})
    scheduler.set("11", RUNNING)
    assert slipway(runs, "status") == 0
    assert (
        "a different training than launch 1: model.seed, model.lr and 2 more changed"
        in capsys.readouterr().out
    )
    slipway(runs, "status", "--json")
    assert json.loads(capsys.readouterr().out)[0]["differs"] == {"launch": 1, "changes": changes}


@pytest.mark.parametrize(
    "differs", [{}, {"launch": 1}, {"launch": True, "changes": []}, {"launch": 1, "changes": [1, {"key": 2}]}]
)
def test_damaged_record_of_differences_is_reported_as_none(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, differs: dict[str, Any]
) -> None:
    runs.launch(differs=differs)
    scheduler.set("11", RUNNING)
    slipway(runs, "status", "--json")
    assert json.loads(capsys.readouterr().out)[0]["differs"] is None


def test_all_live_launches_of_a_run_are_shown(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    """An earlier launch is hidden by a newer one only when it is over."""
    requeued, array = runs.launch(number=1), runs.launch(number=2)
    now = time.time()
    leave_marks(requeued, "11", started=now, ended=now, code=143)  # killed by Slurm, and it waits again
    leave_marks(array, "12_0", started=1.0, ended=2.0)  # one task of several
    finished = runs.launch(number=3)
    leave_marks(finished, "13", started=1.0, ended=2.0)
    runs.launch(number=4)
    scheduler.set("11", PENDING)
    scheduler.set("12", RUNNING)
    scheduler.set("14", RUNNING)
    assert slipway(runs, "status", "--json") == 0
    assert [item["job_id"] for item in json.loads(capsys.readouterr().out)] == ["14", "12", "11"]
    assert scheduler.questions == [["14", "12", "11"]]


@pytest.mark.parametrize("source", ["its own mark", "the mark of slipway cancel", "Slurm"])
def test_launch_cancelled_before_it_began_hides_no_earlier_one(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, source: str
) -> None:
    now, code = time.time(), 75 if source == "Slurm" else 0
    leave_marks(runs.launch(number=1), "11", started=now, ended=now, code=code)
    cancelled = runs.launch(number=2)
    if source == "its own mark":
        leave_marks(cancelled, "12", ended=2.0, code=143, state="CANCELLED")
    elif source == "the mark of slipway cancel":
        note_cancelled(cancelled, "12", "me")
    scheduler.set("11", COMPLETED)
    scheduler.set("12", State.CANCELLED)
    slipway(runs, "status", "--json")
    assert [item["job_id"] for item in json.loads(capsys.readouterr().out)] == ["11"]
    leave_marks(cancelled, "12", started=1.0, ended=2.0, code=143)
    slipway(runs, "status", "--json")
    assert [item["job_id"] for item in json.loads(capsys.readouterr().out)] == ["12"]


def test_one_launch_by_its_job(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    runs.launch(number=1)
    runs.launch(number=2)
    scheduler.set("11", FAILED)
    scheduler.set("12", RUNNING)
    assert slipway(runs, "status", "11", "--json") == 0
    assert [item["job_id"] for item in json.loads(capsys.readouterr().out)] == ["11"]
    assert slipway(runs, "status", "12", "11", "--json") == 0
    assert [item["job_id"] for item in json.loads(capsys.readouterr().out)] == ["12", "11"]
    assert slipway(runs, "status", "11", "gpt3_tiny", "--json") == 0
    assert [item["job_id"] for item in json.loads(capsys.readouterr().out)] == ["12"]


def test_status_says_why_a_state_is_unknown(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    finished = runs.launch("done", job_id="1")
    leave_marks(finished, "1", ended=5.0)
    runs.launch("lost", job_id="2")
    runs.launch("refused", job_id=None, error="sbatch: error: invalid partition\nBatch job failed")
    broken = runs.launch("broken")
    (broken / "launcher.json").write_text("{")
    scheduler.error = "squeue cannot reach the controller"
    assert slipway(runs, "status", "--json") == 3
    rows = {item["run"]: (item["state"], item["reason"]) for item in json.loads(capsys.readouterr().out)}
    assert rows["done"] == ("COMPLETED", None)
    assert rows["lost"] == ("UNKNOWN", "squeue cannot reach the controller")
    assert rows["refused"] == ("NOT_SUBMITTED", "sbatch: error: invalid partition")
    assert rows["broken"][0] == "UNKNOWN" and "not a launch's manifest" in rows["broken"][1]


BROKEN: dict[str, dict[str, Any]] = {
    "nodes": {"nodes": "two"},
    "command": {"command": None},
    "overrides": {"overrides": [1]},
    "created": {"created": "yesterday"},
    "zone": {"created": "2026-11-21T12:00:00", "job_id": None},
    "path": {"run": "../../x"},
}


def test_broken_run_of_a_colleague_hides_nothing_else(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    for name, changes in BROKEN.items():
        path = runs.launch(name) / "launcher.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    marked = runs.launch("marks", job_id="1")
    leave_marks(marked, "1", started=1.0, ended=2.0)
    for mark in (marked / "marks").iterdir():
        mark.write_text('{"started": NaN, "ended": Infinity, "exit_code": NaN}')
    with append(runs.launch("steps", job_id="2"), [start(), train(1)]).open("a") as metrics:
        metrics.write('{"kind": "train", "time": 1, "step": Infinity}\n')
    (runs.launch("metrics", job_id="3") / "results" / "metrics.jsonl").mkdir()
    for job_id in ("1", "2", "3"):
        scheduler.set(job_id, RUNNING)
    assert slipway(runs, "status", "--json") == 3
    rows = {item["run"]: item for item in json.loads(capsys.readouterr().out)}
    assert all("not a launch's manifest" in rows[name]["reason"] for name in BROKEN)
    assert [rows[name]["state"] for name in ("marks", "steps", "metrics")] == ["RUNNING"] * 3
    assert rows["steps"]["step"] == 1


@pytest.mark.parametrize("verb", ["status", "follow", "logs"])
def test_control_characters_of_others_are_escaped(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, verb: str
) -> None:
    runs.launch("x", run="a\x1b[2Jb", job_id="1")
    scheduler.set("1", JobStatus(State.FAILED, "why\x1b]0;title\x07\nnext"))
    slipway(runs, verb, "x")
    output = capsys.readouterr()
    assert "why\\x1b]0;title\\x07\\nnext" in output.out + output.err
    assert "\x1b" not in output.out + output.err


def test_a_run_that_is_removed_has_not_completed(runs: Runs, scheduler: FakeScheduler) -> None:
    runs.launch("kept", job_id="1")
    runs.launch("gone", job_id="2")
    scheduler.set("1", COMPLETED)
    scheduler.set("2", RUNNING)
    refs = [find_run(name, runs.base) for name in ("kept", "gone")]
    shutil.rmtree(runs.base / "gone")
    states = {row.run: row.state for row in look(refs, runs.base)}
    assert states == {"kept": State.COMPLETED, "gone": State.UNKNOWN}


def test_status_without_runs(runs: Runs, capsys: Capsys) -> None:
    assert slipway(runs, "status") == 0
    assert "no run was launched" in capsys.readouterr().err
    assert slipway(runs, "status", "--watch") == 0
    with pytest.raises(UserError, match="there is no run 'x'"):
        slipway(runs, "status", "x")


def test_status_counts_the_runs_that_it_cannot_read(
    runs: Runs, scheduler: FakeScheduler, other_user: int, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setenv("SLIPWAY_CACHE_DIR", str(runs.base / "nowhere"))
    runs.launch("closed", job_id="1").parents[1].chmod(0o700)
    for is_there in True, False:
        os.seteuid(other_user)
        try:
            assert slipway(runs, "status") == 0
        finally:
            os.seteuid(0)
        err = capsys.readouterr().err
        assert ("slipway: runs that cannot be read, for want of permission: 1\n" in err) == is_there
        assert ("no run was launched" in err) == (not is_there)
        shutil.rmtree(runs.base / "closed", ignore_errors=True)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([COMPLETED, COMPLETED], 0),
        ([COMPLETED, RUNNING], 4),
        ([RUNNING, INTERRUPTED, COMPLETED], 75),
        ([INTERRUPTED, JobStatus(State.UNKNOWN), RUNNING], 3),
        ([JobStatus(State.UNKNOWN), FAILED, COMPLETED], 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst_state(
    runs: Runs, scheduler: FakeScheduler, states: list[JobStatus], code: int
) -> None:
    for number, status in enumerate(states, start=1):
        runs.launch(f"r{number}", job_id=str(number))
        scheduler.set(str(number), status)
    assert slipway(runs, "status", "--exit-code") == code
    assert slipway(runs, "status") == (3 if JobStatus(State.UNKNOWN) in states else 0)


def test_only_completed_jobs_are_green() -> None:
    assert [state for state in State if "green" in colour(state)] == [State.COMPLETED]
    assert "magenta" in colour(State.UNKNOWN)


# status --watch


def test_watching_in_a_pipe_prints_each_change_once(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.cli.status._LEAST_INTERVAL", 0.01)
    append(runs.launch("a", job_id="1"), whole_training(0, 100)[:-1])
    runs.launch("b", job_id="2")
    scheduler.set("1", PENDING, PENDING, RUNNING, RUNNING, FAILED)
    scheduler.set("2", RUNNING, RUNNING, RUNNING, RUNNING, RUNNING, COMPLETED)
    assert slipway(runs, "status", "a", "b", "--watch", "--interval", "0.05") == 1
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "a  job 1  PENDING (Resources)  step 100/300  loss 5.2615",
        "b  job 2  RUNNING  on n[1-2]",
        "a  job 1  RUNNING  on n[1-2]  step 100/300  loss 5.2615",
        "a  job 1  FAILED (exit code 1)  after 00:00:03  step 100/300  loss 5.2615",
        "b  job 2  COMPLETED  after 00:01:30",
    ]


def test_watching_as_json(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.cli.status._LEAST_INTERVAL", 0.01)
    runs.launch("a", job_id="1")
    scheduler.set("1", RUNNING, RUNNING, COMPLETED)
    assert slipway(runs, "status", "--watch", "--json", "--interval", "0.05") == 0
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert states == ["RUNNING", "COMPLETED"]


def test_watching_takes_no_shorter_interval(runs: Runs, capsys: Capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        slipway(runs, "status", "--watch", "--interval", "0.5")
    assert "at least 2 seconds" in capsys.readouterr().err


def test_a_scheduler_that_goes_silent_and_comes_back(runs: Runs, scheduler: FakeScheduler) -> None:
    """The known state stays, and does not look healthy."""
    append(runs.launch("a", job_id="1"), whole_training(0, 100)[:-1])
    runs.launch("b", job_id="2")
    scheduler.set("1", RUNNING)
    scheduler.set("2", COMPLETED)
    with StatusPoller(
        lambda: collect_status([RunRef(runs.base / "a"), RunRef(runs.base / "b")]), 0.02, blind_patience=30.0
    ) as poller:
        assert poller.snapshot().states == [State.RUNNING, State.COMPLETED]
        assert poller.snapshot().silent is None
        leave_marks(runs.base / "b" / "launches" / "1", "2", ended=5.0)
        scheduler.error = "squeue: Connection refused"
        _until(lambda: poller.snapshot().silent is not None)
        snapshot = poller.snapshot()
        assert snapshot.why == "squeue: Connection refused" and not snapshot.is_over
        assert snapshot.states == [State.UNKNOWN, State.COMPLETED]  # the second has left marks
        first = snapshot.rows[0]
        assert first.reason == "no answer; before that RUNNING"
        assert (first.nodes, first.elapsed) == ("n[1-2]", "00:00:50")
        assert first.progress.step == 100
        scheduler.error = None
        _until(lambda: poller.snapshot().silent is None)
        assert poller.snapshot().states == [State.RUNNING, State.COMPLETED]


def test_a_scheduler_that_hangs_is_silent_too(
    runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.monitor.polling._STALE_SECONDS", 0.1)
    runs.launch("a", job_id="1")
    scheduler.set("1", RUNNING)
    rows, hang = collect_status([RunRef(runs.base / "a")]), threading.Event()
    answers = iter([rows, rows])

    def hanging() -> list[object]:
        answer = next(answers, [])
        if not answer:
            hang.wait(10)
        return answer  # type: ignore[return-value]

    with StatusPoller(hanging, 0.02, blind_patience=0.4) as poller:  # type: ignore[arg-type]
        _until(lambda: poller.snapshot().states == [State.UNKNOWN])
        assert not poller.snapshot().is_over
        _until(lambda: poller.snapshot().is_over)
    hang.set()


def test_a_silent_scheduler_is_asked_ever_less_often() -> None:
    waits = [double_wait(attempt, 2.0, 30.0) for attempt in (0, 1, 2, 3, 4, 10_000)]
    assert waits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert double_wait(5, 60.0, 30.0) == 60.0


def test_watching_gives_up_on_unknown_states(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.cli.status._LEAST_INTERVAL", 0.01)
    runs.launch("forgotten", job_id="1")
    runs.launch("done", job_id="2")
    scheduler.set("2", COMPLETED)
    assert slipway(runs, "status", "--watch", "--interval", "0.05") == 3
    assert "UNKNOWN (the scheduler does not know this job)" in capsys.readouterr().out


def test_ctrl_c_ends_the_watching_and_not_the_jobs(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.launch()
    scheduler.set("11", RUNNING)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.monitor.watching.format_line", interrupt)
    assert slipway(runs, "status", "--watch") == 130
    assert "the jobs continue" in capsys.readouterr().err


def screen(poller: StatusPoller[StatusRow], width: int, height: int) -> list[str]:
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=height, color_system=None)
    console.print(draw(poller.snapshot(), console, 5.0))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (200, 50)])
def test_the_table_fits_on_any_screen(runs: Runs, scheduler: FakeScheduler, width: int, height: int) -> None:
    for number in range(40):
        append(runs.launch(f"run{number:02}", job_id=str(1 + number)), whole_training(0, 100)[:-1])
        scheduler.set(str(1 + number), COMPLETED if number < 37 else PENDING)
    scheduler.set("40", JobStatus(State.RUNNING, None, "n[1,3,5,7,9,11,13,15,17,19,21-99]", "00:00:50"))
    poller = StatusPoller(
        lambda: collect_status([RunRef(runs.base / f"run{number:02}") for number in range(40)]), 5.0
    )
    lines = screen(poller, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert "2 PENDING  1 RUNNING  37 COMP" in lines[0]
    # Waiting and running jobs are shown first if not all rows fit.
    for name in ("run37", "run38", "run39"):
        assert any(line.startswith(f"{name} ") for line in lines), lines
    row_count = sum(line.startswith("run") for line in lines) - 1  # the header is no run
    assert row_count == 40 or any(f"and {40 - row_count} more" in line for line in lines)
    assert any("run37, run38 PENDING Resources" in line for line in lines)
    assert ("n[1,3,5,7,9,11,13,1…" in "".join(lines)) == (width == 200)


def test_a_terminal_shows_the_last_table_when_the_watching_ends(runs: Runs) -> None:
    """The command has a terminal of its own, and restores the whole screen."""
    import pty
    import subprocess
    import sys

    runs.launch("refused", job_id=None, error="invalid partition")
    command = [sys.executable, "-m", "launcher.cli.app", "status", "--watch"]
    master, slave = pty.openpty()
    done = subprocess.run(
        [*command, "--base-results-dir", str(runs.base)], stdout=slave, stderr=slave, stdin=slave, timeout=60
    )
    os.close(slave)
    output = os.read(master, 1 << 16).decode()
    os.close(master)
    assert done.returncode == 1
    remainder = output.rpartition("\x1b[?1049l")[2]
    assert "refused" in remainder and "NOT_SUBMITTED" in remainder


def _until(condition: object) -> None:
    deadline = threading.Event()
    for _ in range(500):
        if condition():  # type: ignore[operator]
            return
        deadline.wait(0.02)
    raise AssertionError("it did not happen within ten seconds")
