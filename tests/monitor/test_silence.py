"""A training without new steps is silent: not while it starts, validates or saves, and by its own pace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from monitor_samples import FakeScheduler, Runs, append, end, slipway, start, train, validation

from launcher.monitor.progress import Progress, find_silence, read_schedule
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from launcher.ui.tables import REASON, colour, rich_table
from slipway.common.node.events import parse_event
from slipway.watch.pace import Schedule

# Ten steps, 28 seconds each, from the time 0 on.
SLOW: list[dict[str, Any]] = [start(0, 0.0), *(train(step, 28.0 * step) for step in range(1, 11))]
LONG_AGO = 100_000
CASES: list[tuple[str, list[dict[str, Any]], Schedule, int, float, str | None]] = [
    ("its pace", SLOW, Schedule(), LONG_AGO, 280 + 200, None),
    ("ten steps late", SLOW, Schedule(), LONG_AGO, 280 + 300, "no new step for 5 m 0 s (usual: 28 s)"),
    ("fast steps", [start(0, 0.0), *map(train, range(1, 11))], Schedule(), LONG_AGO, 1005 + 59, None),
    (
        "a minute",
        [start(0, 0.0), *map(train, range(1, 11))],
        Schedule(),
        LONG_AGO,
        1005 + 61,
        "no new step for 1 m",
    ),
    ("compiling", SLOW[:1], Schedule(), LONG_AGO, 1700, None),
    ("never begun", SLOW[:1], Schedule(), LONG_AGO, 1900, "no new step for 31 m 40 s"),
    ("a pause is due", SLOW, Schedule(5, None), LONG_AGO, 280 + 500, None),
    (
        "too long a pause",
        SLOW,
        Schedule(5, None),
        LONG_AGO,
        280 + 700,
        "no new step for 11 m 40 s (usual: 28 s)",
    ),
    ("validated", [*SLOW, validation(10, 3.0) | {"time": 400.0}], Schedule(), LONG_AGO, 400 + 200, None),
    ("over", [*SLOW, end(10, 290.0)], Schedule(), LONG_AGO, 9000, None),
    ("no events", [], Schedule(), LONG_AGO, 9000, None),
    ("the next link starts", SLOW, Schedule(), 100, 9000, None),
    ("the next link hangs", SLOW, Schedule(), 2000, 9000, "no new step for 33 m 20 s (usual: 28 s)"),
]


@pytest.mark.parametrize(
    ("events", "schedule", "elapsed", "now", "words"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_silence(
    events: list[dict[str, Any]], schedule: Schedule, elapsed: int, now: float, words: str | None
) -> None:
    parsed = [parse_event(json.dumps(event)) for event in events]
    silence = find_silence(Progress((event for event in parsed if event), schedule), elapsed, now)
    assert (silence is None) if words is None else str(silence).startswith(words)


def test_a_schedule_is_read_from_the_configuration_of_a_job(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  val_check_interval: 2000\n"
        "exp_manager:\n  checkpoint_callback_params:\n    every_n_train_steps: null\n"
    )
    assert read_schedule(config) == Schedule(save_every=None, validate_every=2000)
    assert read_schedule(tmp_path / "missing.yaml") == Schedule()


def test_a_job_without_a_trainer_is_not_silent(
    runs: Runs, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    append(runs.launch("trains", job_id="1"), SLOW)
    runs.launch("tokenizes", job_id="2", stage="data_preparation")
    for job in "12":
        scheduler.set(job, JobStatus(State.RUNNING, None, "n1", "40000-00:00:00"))
    assert slipway(runs, "status", "--json") == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["trains"]["step_seconds"] == 28.0 and rows["trains"]["no_step_seconds"] > 1e9
    assert rows["tokenizes"]["no_step_seconds"] is None


@pytest.mark.parametrize(
    ("reason", "style"), [("no new step for 5 m", "bold yellow"), ("-", colour(State.RUNNING))]
)
def test_the_state_of_a_silent_job_has_another_colour(reason: str, style: str) -> None:
    table = rich_table(("RUN", "STATE", REASON), [("trains", "RUNNING", reason)], [State.RUNNING], 80)
    (cell,) = table.columns[1].cells
    assert (str(cell), cell.style) == ("RUNNING", style)  # type: ignore[union-attr]
