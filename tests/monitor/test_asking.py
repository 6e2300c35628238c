"""A scheduler is asked seldom, and soon after the files of a job contradict its last answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from monitor_samples import PENDING, RUNNING, FakeScheduler, Runs, log

from launcher.jobs import asking
from launcher.jobs.asking import AskingTimes, is_outdated
from launcher.jobs.launches import open_launch
from launcher.jobs.status import LaunchStatus, poll
from launcher.schedulers.base import ChainJobs, JobStatus
from launcher.slurm.states import State
from slipway.common.node.marks import claim, note_cancelled
from tests.job_marks import leave_marks


def begin(directory: Path, job_id: str = "11", attempt: int = 0) -> None:
    leave_marks(directory, job_id, started=1.0, attempt=attempt)


def end(directory: Path, job_id: str = "11", attempt: int = 0) -> None:
    leave_marks(directory, job_id, started=1.0, ended=2.0, attempt=attempt)


CHAIN = ChainJobs(1, 4, {"11": RUNNING, "12": PENDING}, (1, 2))
ARRAY = replace(RUNNING, tasks={"0": State.RUNNING, "1": State.PENDING})
CASES: list[tuple[str, JobStatus, Callable[[Path], object], bool]] = [
    ("nothing happened", RUNNING, lambda d: None, False),
    ("it runs, as known", RUNNING, begin, False),
    ("it began", PENDING, begin, True),
    ("its log is there", PENDING, lambda d: log(d).touch(), True),
    ("it was requeued, and its log is old", replace(PENDING, restarts=1), lambda d: log(d).touch(), False),
    ("it ended", RUNNING, end, True),
    ("it began and ended since the answer", PENDING, end, True),
    ("an attempt before its requeue ended", replace(RUNNING, restarts=1), end, False),
    ("it is still ending", JobStatus(State.COMPLETING), end, True),
    ("it was cancelled", RUNNING, lambda d: note_cancelled(d, "11", "me"), True),
    ("it ended, as known", JobStatus(State.COMPLETED), end, False),
    ("Slurm does not answer", JobStatus(State.UNKNOWN), end, False),
    ("the next link began", replace(RUNNING, chain=CHAIN), lambda d: begin(d, "12"), True),
    ("a link that was not known began", replace(RUNNING, chain=CHAIN), lambda d: begin(d, "13"), True),
    (
        "a link before it ended",
        replace(RUNNING, chain=CHAIN._replace(current=2)),
        lambda d: end(d, "9"),
        False,
    ),
    ("a task of an array ended", ARRAY, lambda d: end(d, "11_0"), True),
    ("a task of an array began", ARRAY, lambda d: begin(d, "11_1"), True),
    ("a task of an array runs, as known", ARRAY, lambda d: begin(d, "11_0"), False),
]


@pytest.mark.parametrize(
    ("status", "change", "expected"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_files_contradict_a_status(
    runs: Runs, status: JobStatus, change: Callable[[Path], object], expected: bool
) -> None:
    directory = runs.launch(links=4 if status.chain else 1)
    if status.chain:
        claim(directory, "12", 2)
    change(directory)
    launch = open_launch(runs.base / "gpt3_tiny")
    assert is_outdated(LaunchStatus.extending(status, run_dir=runs.base, launch=launch)) is expected


class World:
    """A clock, and the seconds at which a scheduler was asked, looking once a second."""

    def __init__(self, runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(asking.time, "monotonic", lambda: self.now)
        self._launch = open_launch(runs.base / "gpt3_tiny")
        self._times = AskingTimes()
        self._times.note_answer(poll([self._launch]))

    def ask_until(self, second: int, changes: dict[int, Callable[[], object]]) -> list[int]:
        asked = []
        for now in range(1, second + 1):
            self.now = now
            changes.get(now, lambda: None)()
            if self._times.is_due():
                asked.append(now)
                self._times.note_answer(poll([self._launch]))
        return asked


def test_a_calm_job_is_asked_about_every_half_minute(
    runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = runs.launch()
    scheduler.set("11", RUNNING)
    begin(directory)
    assert World(runs, scheduler, monkeypatch).ask_until(100, {}) == [30, 60, 90]


def test_an_end_is_asked_about_at_once_and_then_ever_less_often(
    runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = runs.launch()
    scheduler.set("11", RUNNING)
    world = World(runs, scheduler, monkeypatch)
    assert world.ask_until(110, {40: lambda: end(directory)}) == [30, 40, 44, 52, 68, 98]


def test_a_burst_of_ends_is_few_questions(
    runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = runs.launch()
    states = {str(task): State.RUNNING for task in range(100)}
    scheduler.set("11", replace(RUNNING, tasks=dict(states)))

    def end_task(task: int) -> None:
        end(directory, f"11_{task}")
        states[str(task)] = State.COMPLETED
        scheduler.set("11", replace(RUNNING, tasks=dict(states)))

    world = World(runs, scheduler, monkeypatch)
    asked = world.ask_until(100, {second: lambda task=second: end_task(task) for second in range(1, 100)})
    assert asked == [2, 6, 14, 30, 60, 90]


@pytest.mark.parametrize(("scheduler_name", "asked"), [("local", [2, 4, 6]), ("slurm", [])])
def test_a_scheduler_without_a_controller_is_asked_often(
    runs: Runs,
    scheduler: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    scheduler_name: str,
    asked: list[int],
) -> None:
    runs.launch(scheduler=scheduler_name)
    scheduler.set("11", RUNNING)
    assert World(runs, scheduler, monkeypatch).ask_until(7, {}) == asked


def test_a_silent_scheduler_is_asked_ever_less_often(
    runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.launch()
    scheduler.error = "squeue: Connection refused"
    assert World(runs, scheduler, monkeypatch).ask_until(100, {}) == [4, 12, 28, 58, 88]
