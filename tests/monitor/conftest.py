"""Fixtures: runs on disk, and the scheduler that their manifests name."""

from __future__ import annotations

from pathlib import Path

import pytest
from monitor_samples import FakeScheduler, Runs

from launcher import schedulers
from launcher.monitor import logs as log_reading
from launcher.monitor import polling, watching
from launcher.monitor.follow import LinesView


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """The scheduler that `scheduler_for` returns for every manifest."""
    fake = FakeScheduler()
    monkeypatch.setattr(schedulers, "scheduler_for", lambda *_: fake)
    return fake


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "results")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the intervals of all displays and polls."""
    monkeypatch.setattr(polling.job_poller, "__defaults__", (0.05, 0.3, 0.3))
    *_, refresh = polling.StatusPoller.__init__.__defaults__ or ()
    monkeypatch.setattr(polling.StatusPoller.__init__, "__defaults__", (0.05, 0.3, 0.5, refresh))
    monkeypatch.setattr(watching, "_REDRAW_SECONDS", 0.02)
    monkeypatch.setattr(log_reading, "_POLL", 0.02)
    monkeypatch.setattr(LinesView, "interval", 0.02)
