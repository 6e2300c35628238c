"""Paths with letters beyond ASCII while Python takes the locale for ASCII."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LOCAL = ["cluster=local", "training=gpt3/tiny", "cluster.python=/bin/true", "--no-check=space.checkpoints"]
MOCK = "training.model.data.data_impl=mock"


@pytest.mark.parametrize("program", ["slipway", "main.py"])
def test_runs_below_a_path_with_an_umlaut(
    program: str, repository: Path, tmp_path: Path, cache_dir: Path
) -> None:
    (tmp_path / "größe").mkdir()
    slipway = [str(Path(sys.executable).with_name("slipway"))]
    launch = (
        [*slipway, "launch"]
        if program == "slipway"
        else [sys.executable, str(repository / "launcher/main.py")]
    )

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **ASCII}, capture_output=True, text=True
        )
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        return done.stdout

    output = run(*launch, *LOCAL, MOCK, "base_results_dir=größe/results", "training.run.name=erster")
    assert "größe/results/erster" in output
    for words in (["größe/results/erster"], ["erster"], ["--base-results-dir", "größe/results"]):
        assert "erster" in run(*slipway, "status", *words)
    (row,) = json.loads(run(*slipway, "status", "erster", "--json"))
    assert row["run_dir"] == str(tmp_path / "größe/results/erster")


def test_utf8_mode_is_handed_on_in_the_environment(tmp_path: Path) -> None:
    program = (
        "import os, sys; from launcher.cli.app import use_utf8; use_utf8();"
        "print(sys.flags.utf8_mode, os.environ['PYTHONUTF8'])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **ASCII}, capture_output=True, text=True)
    assert done.stdout == "1 0\n", done.stderr
