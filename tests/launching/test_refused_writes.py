"""A launch that cannot be written whole, as on a full disk, is refused and leaves nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.app import main
from tests.launching.fake_slurm import FakeSlurm, install, overrides, stages

MOCK = "training.model.data.data_impl=mock"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm = install(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/bash\necho 'MaxArraySize = 1001'\n")
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    return slurm


def fill_disk(monkeypatch: pytest.MonkeyPatch, module: str, name: str, good: int) -> None:
    """Make a function that writes below `results` fail for a full disk after some calls."""
    import importlib

    real, calls = getattr(importlib.import_module(module), name), []

    def limited(path: Path, *arguments: object, **options: object) -> object:
        calls.append(path)
        if len(calls) > good:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(f"{module}.{name}", limited)


@pytest.mark.parametrize("good", [0, 1, 3])
@pytest.mark.parametrize("kind", ["launch", "stages", "sweep"])
def test_a_full_disk_leaves_no_directories(
    tmp_path: Path,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    good: int,
) -> None:
    words = {
        "launch": ["launch", *overrides(tmp_path, MOCK)],
        "stages": ["launch", *stages(tmp_path)],
        "sweep": ["sweep", *overrides(tmp_path, MOCK, "training.model.seed=1,2")],
    }[kind]
    # In a sweep the disk is full at the end of a launch; with stages, in the second launch, too.
    fill_disk(monkeypatch, "launcher.runs.write", "write_atomic", good + 9 * (kind != "launch"))
    existing = tmp_path / "results" / "kept"
    if kind == "sweep":
        existing.mkdir(parents=True)
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "no space left on device" in message
    assert slurm.submitted() == []
    leftovers = [path for path in (tmp_path / "results").rglob("*") if path != existing]
    assert leftovers == []
    assert (tmp_path / "results").exists() == (kind == "sweep"), "what was there before stays"


def test_impossible_directories_of_a_job_leave_no_launch(
    tmp_path: Path,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = Path.mkdir

    def mkdir(path: Path, *arguments: int, **options: bool) -> None:
        if path.name == "checkpoints":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert main(["launch", *overrides(tmp_path, MOCK)]) == 2
    assert "no space left" in capsys.readouterr().err
    assert slurm.submitted() == []
    assert not list((tmp_path / "results").rglob("*"))


def test_an_existing_run_is_not_changed(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["launch", *overrides(tmp_path, MOCK)]) == 0
    before = sorted((tmp_path / "results").rglob("*"))
    fill_disk(monkeypatch, "launcher.runs.write", "write_atomic", 2)
    assert main(["launch", *overrides(tmp_path, MOCK)]) == 2
    assert sorted((tmp_path / "results").rglob("*")) == before
    assert len(slurm.submitted()) == 1


def test_a_launch_is_refused_if_no_file_can_be_written(tmp_path: Path) -> None:
    """Under a real limit directories can be made, and files cannot."""
    program = [sys.executable, "-m", "launcher.cli.app"]
    words = ["training=gpt3/tiny", "cluster=local", MOCK, "cluster.python=/bin/true"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 0; "$@"', "bash", *program, "launch", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "file too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()
