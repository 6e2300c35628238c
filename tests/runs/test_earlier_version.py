"""A chain of the version before the packages `slipway.*`: a run that this version shows, and goes on with.

`run_before_the_common_floor` is what its four jobs left on a real Slurm, at commit 62bf4a50; of its steps
each hundredth is kept, and neither its checkpoints nor its copy of the code.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main

_RUN = Path(__file__).parent / "run_before_the_common_floor"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a results directory with the run, which Slurm has forgotten."""
    results = tmp_path / "results"
    shutil.copytree(_RUN, results / "gpt3_tiny", symlinks=True)
    for path in (results / "gpt3_tiny").rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_text(path.read_text().replace("@ROOT@", str(tmp_path)))
    for name in ("squeue", "sacct", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLIPWAY_RESULTS_DIR", str(results))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.chdir(tmp_path)  # as `resume` goes to where the launch was made
    return results


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_of_the_version_before_is_shown(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = _json(capsys, "status", "gpt3_tiny")
    assert {key: row[key] for key in ("state", "launch", "job_id", "link", "step", "max_steps")} == {
        "state": "COMPLETED",
        "launch": 1,
        "job_id": "50829111",
        "link": 4,
        "step": 3000,
        "max_steps": 3000,
    }
    (launch,) = _json(capsys, "history", "gpt3_tiny")
    assert [(link["job_id"], link["state"], link["elapsed"]) for link in launch["links"]] == [
        ("50829108", "INTERRUPTED", "00:01:10"),
        ("50829109", "INTERRUPTED", "00:00:59"),
        ("50829110", "INTERRUPTED", "00:01:30"),
        ("50829111", "COMPLETED", "00:00:19"),
    ]
    assert main(["history", "gpt3_tiny"]) == 0
    text = capsys.readouterr().out
    assert all(steps in text for steps in ("0→979", "979→1721", "1721→2831", "2831→3000")), text


def test_the_logs_of_the_version_before_are_read(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "gpt3_tiny"]) == 0
    assert "| loss 0.0925 |" in capsys.readouterr().out
    assert main(["verify", "gpt3_tiny", "--json"]) == 1, "the checkpoints are not kept"
    verdicts = {row["name"]: row["verdict"] for row in json.loads(capsys.readouterr().out)["checks"]}
    assert verdicts["ended well"] == verdicts["last step"] == verdicts["loss falling"] == "ok"


def test_a_run_of_the_version_before_goes_on(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "gpt3_tiny", "training.trainer.max_steps=4000", "--dry-run"]) == 0
    script, before = capsys.readouterr().out, next(results.glob("*/launches/1/*_submission.sh")).read_text()
    flags = [
        [line for line in text.splitlines() if line.startswith("#SBATCH")]
        for text in (before, script.replace("/launches/2/", "/launches/1/"))
    ]
    assert flags[0] == flags[1]
    assert "slipway.trainer.pretrain" in script
