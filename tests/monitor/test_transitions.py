"""The time of a job's last transition, without further questions to Slurm."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from monitor_samples import COMPLETED, FAILED, PENDING, RUNNING, FakeScheduler, Runs, slipway

from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from launcher.ui.tables import since
from slipway.common.node.marks import ChainEnd, end_chain, note_cancelled
from tests.job_marks import leave_marks

pytestmark = pytest.mark.usefixtures("fast")

CREATED = "2026-11-21T12:00:00Z"
NAMES = ("submitted", "started", "ended", "last_transition")


def seconds(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


@pytest.fixture
def read_times(runs: Runs, capsys: pytest.CaptureFixture[str]) -> Any:
    def read() -> tuple[str | None, ...]:
        slipway(runs, "status", "--json")
        (item,) = json.loads(capsys.readouterr().out)
        return tuple(item[name] for name in NAMES)

    return read


def test_times_of_a_waiting_job(runs: Runs, scheduler: FakeScheduler, read_times: Any) -> None:
    runs.launch()
    scheduler.set("11", PENDING)
    assert read_times() == (CREATED, None, None, CREATED)


def test_times_of_a_running_job(runs: Runs, scheduler: FakeScheduler, read_times: Any) -> None:
    launch = runs.launch()
    scheduler.set("11", RUNNING)
    # Before its script leaves a mark, Slurm's elapsed time gives the start.
    _, started, ended, last = read_times()
    assert started == last and ended is None
    assert abs((seconds(started) or 0) - (time.time() - 50)) < 5
    leave_marks(launch, "11", started=1000.0)
    assert read_times() == (CREATED, "1970-01-01T00:16:40Z", None, "1970-01-01T00:16:40Z")


def test_times_of_a_job_that_ended(runs: Runs, scheduler: FakeScheduler, read_times: Any) -> None:
    launch = runs.launch()
    leave_marks(launch, "11", started=1000.0)
    scheduler.set("11", FAILED)  # killed with its node: it ran for 3 s
    assert read_times() == (CREATED, "1970-01-01T00:16:40Z", "1970-01-01T00:16:43Z", "1970-01-01T00:16:43Z")
    leave_marks(launch, "11", started=1000.0, ended=1100.0)
    for status in (FAILED, COMPLETED):
        scheduler.set("11", status)
        assert read_times()[2:] == ("1970-01-01T00:18:20Z", "1970-01-01T00:18:20Z")


def test_marks_give_the_times_without_a_scheduler(
    runs: Runs, scheduler: FakeScheduler, read_times: Any
) -> None:
    launch = runs.launch()
    leave_marks(launch, "11", started=1000.0, ended=1100.0)
    scheduler.error = "squeue cannot reach the controller"
    assert read_times() == (CREATED, "1970-01-01T00:16:40Z", "1970-01-01T00:18:20Z", "1970-01-01T00:18:20Z")


def test_an_unknown_state_has_no_time(runs: Runs, scheduler: FakeScheduler, read_times: Any) -> None:
    launch = runs.launch()
    leave_marks(launch, "11", started=1000.0)
    scheduler.error = "squeue cannot reach the controller"
    assert read_times() == (CREATED, "1970-01-01T00:16:40Z", None, None)


def test_times_of_a_requeued_job(runs: Runs, scheduler: FakeScheduler, read_times: Any) -> None:
    year = 365 * 86400
    launch = runs.launch(created="1971-01-01T00:00:00Z")
    leave_marks(launch, "11", started=year + 1000.0, ended=year + 1100.0, code=143)
    scheduler.set("11", replace(PENDING, restarts=1))
    assert read_times() == ("1971-01-01T00:00:00Z", None, None, "1971-01-01T00:18:20Z")
    scheduler.set("11", replace(RUNNING, restarts=1))
    assert (seconds(read_times()[3]) or 0) > time.time() - 60, "the mark is of the attempt before"
    leave_marks(launch, "11", attempt=1, started=year + 2000.0)
    assert read_times()[3] == "1971-01-01T00:33:20Z"


def test_times_of_a_job_that_was_cancelled_while_it_waited(
    runs: Runs, scheduler: FakeScheduler, read_times: Any
) -> None:
    launch = runs.launch()
    note_cancelled(launch, "11", "me")
    scheduler.set("11", JobStatus(State.CANCELLED, "by me"))
    _, started, ended, last = read_times()
    assert started is None and ended == last
    assert abs((seconds(last) or 0) - time.time()) < 60


def test_times_of_a_job_whose_end_slurm_alone_knows(
    runs: Runs, scheduler: FakeScheduler, read_times: Any
) -> None:
    """The job waited, and was cancelled with scancel."""
    runs.launch()
    scheduler.set("11", JobStatus(State.CANCELLED, "by me", elapsed="00:00:00", ended=1000.0))
    assert read_times() == (CREATED, None, "1970-01-01T00:16:40Z", "1970-01-01T00:16:40Z")


def test_times_of_a_chain_that_was_ended_between_its_links(
    runs: Runs, scheduler: FakeScheduler, read_times: Any
) -> None:
    launch = runs.launch(links=3)
    end_chain(launch, ChainEnd("me", "cancelled", 3000.0))
    scheduler.set("11", JobStatus(State.CANCELLED))
    assert read_times()[3] == "1970-01-01T00:50:00Z"


def test_times_of_a_launch_that_was_refused(runs: Runs, scheduler: FakeScheduler, read_times: Any) -> None:
    runs.launch(job_id=None, error="sbatch: error: invalid partition")
    assert read_times() == (None, None, None, CREATED)


@pytest.mark.parametrize("created", ["soon", "", "9999-99-99T00:00:00Z"])
def test_times_of_a_manifest_without_a_valid_time(
    runs: Runs, scheduler: FakeScheduler, read_times: Any, created: str
) -> None:
    launch = runs.launch(created=created)
    leave_marks(launch, "11", started=1e300, ended=1e300)
    scheduler.set("11", COMPLETED)
    assert read_times() == (None, None, None, None)


def test_a_time_is_shown_in_a_few_characters() -> None:
    now = datetime(2026, 11, 22, 12, 30)
    assert since(datetime(2026, 11, 22, 12, 4).timestamp(), now) == "12:04"
    assert since(datetime(2026, 11, 2, 12, 4).timestamp(), now) == "2 Nov"
    assert since(datetime(2025, 12, 31).timestamp(), now) == "2025-12"
    assert since(None, now) == since(1e300, now) == "-"
    assert max(len(since(day * 86400.0, now)) for day in range(20000, 20800)) <= 7


def test_a_narrow_terminal_keeps_the_column_since(
    runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.jobs.lookup import RunRef
    from launcher.monitor.run_status import collect_status, make_table
    from launcher.ui.tables import rich_table

    launch = runs.launch("gpt3_126m_with_a_name")
    leave_marks(launch, "11", started=datetime.now(UTC).timestamp())
    scheduler.set("11", RUNNING)
    rows = collect_status([RunRef(runs.base / "gpt3_126m_with_a_name")])
    table = rich_table(*make_table(rows), [row.state for row in rows], 80)
    names = [str(column.header) for column in table.columns]
    assert {"run", "job", "state", "since"} <= set(names)


def test_a_narrow_terminal_keeps_the_column_that_a_sweep_ranks_by() -> None:
    from launcher.ui.tables import rich_table

    row = {
        "RANK": "1", "POINT": "12", "lr": "1.5e-4", "batch": "1024", "STATE": "COMPLETED",
        "STEP": "10000/10000", "VAL LOSS": "2.3456", "LOSS": "2.4567", "TOKENS/S": "1.23M",
        "ELAPSED": "1-02:03:04", "JOB": "9529820_12", "REASON": "-",
    }  # fmt: skip
    table = rich_table(list(row), [list(row.values())], [State.COMPLETED], 80)
    names = [str(column.header) for column in table.columns]
    assert {"rank", "point", "lr", "batch", "state", "val loss"} <= set(names)
    assert "tokens/s" not in names


@pytest.mark.parametrize(
    ("asked", "granted", "shown"),
    [
        ("1:00:00", 120, "/00:02:00 (1:00:00 asked for)"),
        ("1:00:00", 3600, "/1:00:00"),
        ("60", 3600, "/60"),
        (None, 3600, "/01:00:00"),
        ("1:00:00", None, "/1:00:00"),
        ("an hour", 3600, "/01:00:00 (an hour asked for)"),
        ("1:00:00", "many", "/1:00:00"),
    ],
)
def test_limit_is_the_granted_one_with_the_other_beside_it(
    runs: Runs,
    scheduler: FakeScheduler,
    capsys: pytest.CaptureFixture[str],
    asked: str | None,
    granted: Any,
    shown: str,
) -> None:
    launch = runs.launch(time_limit=asked)
    scheduler.set("11", RUNNING)
    (launch / "marks").mkdir(exist_ok=True)
    (launch / "marks" / "11.0.started.json").write_text(json.dumps({"started": 1, "time_limit": granted}))
    slipway(runs, "status")
    assert f"00:00:50{shown} " in capsys.readouterr().out
    slipway(runs, "status", "--json")
    (item,) = json.loads(capsys.readouterr().out)
    expected = {120: "00:02:00", 3600: "01:00:00"}.get(granted)
    assert (item["time_limit"], item["granted_limit"]) == (asked, expected)
