"""`slipway gpu-check` as a user runs it; the trainer's side is another test's, and here a script's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main
from launcher.sandbox import Sandbox

ROWS = [
    {"check": "versions", "state": "passed", "detail": "torch 2.9", "fix": None, "numbers": {}},
    {"check": "layout pipeline 2", "state": "failed", "detail": "3.1e-02", "fix": "see NCCL", "numbers": {}},
    {
        "check": "throughput",
        "state": "passed",
        "detail": "1.500 s a step",
        "fix": None,
        "numbers": {"step_seconds": 1.5},
    },
]


def python_that_writes(directory: Path, rows: list[dict[str, Any]], code: int) -> Path:
    """Write what stands in for the interpreter: it tells its arguments and leaves a table."""
    table = json.dumps({"machine": {"host": "n1", "gpus": [{}]}, "rows": rows})
    script = directory / "python"
    script.write_text(
        '#!/bin/sh\necho "$@" >&2\n'
        'while [ "$1" != --directory ]; do shift; done\n'
        f'test -s "$2/throughput_config.yaml" && cat > "$2/gpu_check.json" <<\'END\'\n{table}\nEND\n'
        f"exit {code}\n"
    )
    script.chmod(0o755)
    return script


def test_a_table_with_what_to_mend_and_the_estimate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = python_that_writes(tmp_path, ROWS, 1)
    words = ["gpu-check", "cluster=local", f"cluster.python={python}", "cluster.gpu=h100"]
    assert main([*words, "--directory", str(tmp_path / "a"), "--only", "versions,throughput"]) == 1
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0] == "versions           passed   torch 2.9"
    assert lines[2].split() == ["->", "see", "NCCL"]
    assert lines[3].startswith("throughput         passed   1.500 s a step; estimated for h100-80gb: ")
    assert " s a step, peak " in lines[3].partition("estimated")[2]
    assert lines[4] == "2 passed, 1 failed, 0 skipped; mend first: layout pipeline 2"
    assert "-m trainer.gpu_check" in err
    assert err.strip().endswith("--only versions,throughput")
    # Evidence is never overwritten.
    assert main([*words, "--directory", str(tmp_path / "a")]) == 2
    assert "there is a table of an earlier check" in capfd.readouterr().err


def test_without_a_failure_and_for_programs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    python = python_that_writes(tmp_path, ROWS[:1], 0)
    words = ["gpu-check", "cluster=local", f"cluster.python={python}", "--json"]
    assert main([*words, "--directory", str(tmp_path / "a")]) == 0
    content = json.loads(capfd.readouterr().out)
    assert content["ok"] is True
    assert content["machine"]["host"] == "n1"
    assert [row["check"] for row in content["rows"]] == ["versions"]
    assert content["estimate"]["step_seconds"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster=local", "engine=nemo", "container=/x.sqsh"], "stages=[training] and engine=megatron"),
        (["cluster=bcm", "container=/x.sqsh"], "container= is not for it yet"),
        (["cluster=local", "cluster.python=/absent/python"], "/absent/python: No such file or directory"),
        (["cluster=local", "cluster.python=/bin/false"], "exit code 1 and without a table"),
        (["cluster=local", "--minutes", "0"], "--minutes 0: a number of minutes"),
    ],
)
def test_what_cannot_be_started_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["gpu-check", *words, "--directory", str(tmp_path / "a")]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.slurm
def test_a_node_of_a_real_slurm(
    no_accounting_sandbox: Sandbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in no_accounting_sandbox.environment().items():
        monkeypatch.setenv(name, value)
    python = python_that_writes(tmp_path, ROWS[:1], 0)
    words = ["gpu-check", "cluster=sandbox", f"cluster.python={python}", "--directory", str(tmp_path / "a")]
    assert main(words) == 0, capfd.readouterr().err
    assert capfd.readouterr().out.startswith("versions  passed   torch 2.9\n")
