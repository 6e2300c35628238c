"""Fixtures: a project that launches jobs of a few lines of shell, and cancels the ones left at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from control_project import Project

from launcher.sandbox.lifecycle import Sandbox


@pytest.fixture
def project(
    tmp_path: Path,
    plain_sandbox: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Project]:
    """A project on a Slurm without accounting."""
    monkeypatch.setenv("SLURM_CONF", plain_sandbox.environment()["SLURM_CONF"])
    yield from _project(tmp_path, monkeypatch, capsys, "cluster=sandbox")


@pytest.fixture
def local_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Project]:
    """A project on this machine, without Slurm."""
    yield from _project(tmp_path, monkeypatch, capsys, "cluster=local")


def _project(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cluster: str
) -> Iterator[Project]:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
    project = Project(directory, cluster, capsys)
    try:
        yield project
    finally:
        project.cancel_all()
