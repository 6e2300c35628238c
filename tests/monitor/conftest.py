"""Fixtures: runs on disk, and the scheduler that their manifests name."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from monitor_samples import FakeScheduler, Runs


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """The scheduler that `open_scheduler` returns for every manifest."""
    fake = FakeScheduler()
    registry = types.ModuleType("launcher.schedulers.registry")
    registry.open_scheduler = lambda manifest: fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "launcher.schedulers.registry", registry)
    return fake


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "results")
