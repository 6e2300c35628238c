"""The table of a sweep shows points with an unknown state, too."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.cli.app import main
from launcher.monitor.run_status import StatusRow
from launcher.monitor.watching import format_line
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from launcher.sweeps.record import ArrayRecord, write_record
from launcher.sweeps.results import Result, Results

SEED = "training.model.seed"


def write_array_record(sweep: Path, number: int, seed: int) -> Path:
    """Write the record of an array of one point, whose run is missing; return its path."""
    directory = sweep / "arrays" / str(number)
    directory.mkdir(parents=True)
    point = {"name": f"seed={seed}", "launch": 1, "values": {SEED: str(seed)}}
    array = ArrayRecord(
        sweep=sweep.name,
        tag=f"tag-{number}",
        script="script.sh",
        created="2026-11-21T12:00:00Z",
        user="somebody",
        host="login",
        slurm_conf=None,
        command=["slipway", "sweep"],
        overrides=[],
        throttle=None,
        labels={SEED: "seed"},
        points=[point],
    )
    write_record(directory, array)
    return directory / "sweep.json"


@pytest.mark.parametrize("words", [[], ["--wait"]])
def test_a_point_that_is_gone_is_unknown(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_array_record(tmp_path / "sweep", 1, seed=7)
    assert main(["sweep", "--results", str(tmp_path / "sweep"), "--json", *words]) == 3
    (point,) = json.loads(capsys.readouterr().out)
    assert (point["point"], point["values"], point["state"]) == ("seed=7", {SEED: "7"}, "UNKNOWN")


@pytest.mark.parametrize("words", [[], ["--wait"]])
@pytest.mark.parametrize("text", ["{}", "no JSON", ""])
def test_broken_record_of_an_array_is_reported(
    tmp_path: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_array_record(tmp_path / "sweep", 1, seed=7).write_text(text)
    (tmp_path / "sweep" / "arrays" / "2").mkdir()  # its launcher died before there was anything to submit
    assert main(["sweep", "--results", str(tmp_path / "sweep"), *words]) == 3
    errors = capsys.readouterr().err
    assert errors.count("cannot be read: its points are not in the table") == 1
    assert "arrays/1/sweep.json" in errors


@pytest.mark.parametrize("words", [[], ["--wait"]])
def test_only_an_interrupted_wait_says_that_it_stopped_waiting(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_array_record(tmp_path / "sweep", 1, seed=7)
    monkeypatch.setattr("launcher.sweeps.results.gather", Mock(side_effect=KeyboardInterrupt))
    assert main(["sweep", "--results", str(tmp_path / "sweep"), *words]) == 130
    assert capsys.readouterr().err == ("stopped waiting; the jobs continue\n" if words else "")


def test_table_has_the_reason_why_a_point_failed(tmp_path: Path) -> None:
    """The table has the job's own reason, beside the exit code."""
    status = JobStatus(State.FAILED, "exit code 1", exit_code=1, why="a library was missing")
    row = StatusRow.extending(status, run_dir=tmp_path / "seed=7")
    (cells,) = Results({SEED: "seed"}, [Result(1, "seed=7", {SEED: "7"}, row)]).rows()
    assert cells[-1] == "exit code 1: a library was missing"
    assert "FAILED (exit code 1: a library was missing)" in format_line(row)
