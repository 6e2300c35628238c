"""Fixtures of the tests that look at files."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import file_systems as systems
from tests.checks.path_jobs import set_mounts
from tests.checks.shelves import NFS, stock


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on a file system that machines share, with the files that a GPT needs, and no quota."""
    directory = tmp_path / "shared"
    directory.mkdir()
    stock(directory / "data")
    set_mounts(monkeypatch, tmp_path, NFS)
    monkeypatch.setattr(systems, "EXPORTS", (tmp_path / "exports",))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.chdir(directory)
    return directory
