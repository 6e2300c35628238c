"""`slipway gpu-check` as a user runs it; a script stands in for the trainer, which has its own tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.app import main
from launcher.cli.gpu_check import batch_overrides
from launcher.sandbox.lifecycle import Sandbox

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


def python_that_writes(directory: Path, rows: list[dict[str, Any]], code: int, finished: bool = True) -> Path:
    """Write a stand-in for the interpreter that prints its arguments and leaves a table."""
    content = {"machine": {"host": "n1", "gpus": [{}]}, "rows": rows, "finished": finished}
    table = json.dumps(content)
    script = directory / "python"
    script.write_text(
        '#!/bin/sh\necho "GPUs: $CUDA_VISIBLE_DEVICES" >&2\necho "$@" >&2\n'
        'while [ "$1" != --directory ]; do shift; done\n'
        f'test -s "$2/throughput_config.yaml" && cat > "$2/gpu_check.json" <<\'END\'\n{table}\nEND\n'
        f"exit {code}\n"
    )
    script.chmod(0o755)
    return script


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an srun first on PATH that prints its arguments and runs the command behind its options."""
    script = tmp_path / "bin" / "srun"
    script.parent.mkdir()
    runs = 'echo "srun $@" >&2\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
    for program, text in ((script, runs), (script.with_name("scontrol"), "echo ClusterName = here\n")):
        program.write_text(f"#!/bin/sh\n{text}")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")


def test_table_has_remedies_and_estimates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    python = python_that_writes(tmp_path, ROWS, 1)
    words = ["gpu-check", "cluster=local", f"cluster.python={python}", "cluster.gpu=h100"]
    assert main([*words, "--directory", str(tmp_path / "a"), "--only", "versions,throughput"]) == 1
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0] == "versions           passed   torch 2.9"
    assert lines[2].split() == ["->", "see", "NCCL"]
    assert lines[3].startswith("throughput         passed   1.500 s a step; estimated for h100-80gb: ")
    assert " s a step, peak " in lines[3].partition("estimated")[2]
    assert lines[4] == "2 passed, 1 failed, 0 skipped; fix first: layout pipeline 2"
    assert "-m slipway.trainer.gpu_check" in err
    assert err.strip().endswith("--only versions,throughput")
    # Evidence is never overwritten.
    assert main([*words, "--directory", str(tmp_path / "a")]) == 2
    assert "it holds an earlier check" in capfd.readouterr().err


def test_passed_checks_exit_with_0_and_print_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    python = python_that_writes(tmp_path, ROWS[:1], 0)
    words = ["gpu-check", "cluster=local", f"cluster.python={python}", "--json"]
    assert main([*words, "--directory", str(tmp_path / "a")]) == 0
    content = json.loads(capfd.readouterr().out)
    assert content["ok"] is True
    assert content["machine"]["host"] == "n1"
    assert [row["check"] for row in content["rows"]] == ["versions"]
    assert content["estimate"]["step_seconds"] > 0
    for name in ("slipway/trainer/gpu_check/__main__.py", "slipway/arithmetic/gpus.json"):
        assert (tmp_path / "a" / "code" / name).exists()
    # A few micro batches, in place of a global batch of 256.
    config = yaml.safe_load((tmp_path / "a" / "throughput_config.yaml").read_text())
    assert config["model"]["global_batch_size"] == 4 * config["model"]["micro_batch_size"]


def test_checks_that_end_early_have_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The time limit of a job leaves the rows so far, all of them passed."""
    for code in (0, 143):
        python = python_that_writes(tmp_path, ROWS[:1], code, finished=False)
        words = ["gpu-check", "cluster=local", f"cluster.python={python}"]
        assert main([*words, "--directory", str(tmp_path / f"{code}")]) == 1
        lines = capfd.readouterr().out.splitlines()
        assert lines[0].startswith("versions  passed")
        assert lines[1] == (
            "1 passed, 0 failed, 0 skipped; "
            "FAILED: the checks were ended before the last of them: see what they said above"
        )
        assert lines[2].endswith(f"{tmp_path}/{code}")


@pytest.mark.parametrize(
    ("overrides", "gres"),
    [
        ([], "gpu:8"),
        (["cluster.gpus_per_node=null", "cluster.gres=gpu:h100:4"], "gpu:h100:4"),
    ],
)
def test_a_node_of_the_documented_cluster_gets_all_its_gpus(
    tmp_path: Path, srun: None, capfd: pytest.CaptureFixture[str], overrides: list[str], gres: str
) -> None:
    python = python_that_writes(tmp_path, ROWS[:1], 0)
    words = ["gpu-check", "cluster=bcm", "cluster.partition=gpu", f"cluster.python={python}", *overrides]
    assert main([*words, "--directory", str(tmp_path / "a")]) == 0, capfd.readouterr().err
    (options,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("srun "))
    assert {"--partition=gpu", f"--gres={gres}", "--exclusive"} <= set(options.split())


def test_without_slurm_one_line_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert main(["gpu-check", "cluster=bcm", "container=null", "--directory", str(tmp_path / "a")]) == 2
    first, *hint = capfd.readouterr().err.splitlines()
    assert first == "slipway: scontrol is not on this machine: there is no Slurm here"
    assert len(hint) == 1
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        ({}, ["training.model.global_batch_size=64"]),
        ({"tensor_model_parallel_size": 4}, ["training.model.global_batch_size=16"]),
        ({"pipeline_model_parallel_size": 8}, ["training.model.global_batch_size=16"]),
        ({"global_batch_size": 32}, []),
        (
            {"global_batch_size": 32, "rampup_batch_size": [16, 16, 320]},
            ["training.model.rampup_batch_size=null"],
        ),
    ],
)
def test_a_measured_step_takes_a_few_micro_batches(changes: dict[str, Any], batch: list[str]) -> None:
    model = {"micro_batch_size": 2, "global_batch_size": 2048, **changes}
    assert batch_overrides({"trainer": {"devices": 8}, "model": model}) == batch


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["cluster=bcm", "cluster.gpus_per_node=null", "cluster.gres=null", "cluster.gpus_per_task=1"],
            "cluster.gpus_per_task=1 leaves the GPUs of a node open",
        ),
        (["cluster=local", "engine=nemo", "container=/x.sqsh"], "stages=[training] and engine=megatron"),
        (["cluster=bcm", "container=/x.sqsh"], "container= is not for it yet"),
        (["cluster=local", "cluster.python=/absent/python"], "/absent/python: No such file or directory"),
        (["cluster=local", "cluster.python=/bin/false"], "exit code 1 and without a table"),
        (["cluster=local", "--minutes", "0"], "--minutes 0: a number of minutes"),
    ],
)
def test_checks_that_cannot_start_name_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["gpu-check", *words, "--directory", str(tmp_path / "a")]) == 2
    assert message in capfd.readouterr().err


def test_checks_that_cannot_start_leave_no_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["gpu-check", "cluster=bcm", "container=/x.sqsh", "--directory", str(tmp_path / "a")]
    assert main(words) == 2
    assert not (tmp_path / "a").exists()


@pytest.mark.slurm
def test_node_of_a_real_slurm_is_checked(
    no_accounting_sandbox: Sandbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in no_accounting_sandbox.environment().items():
        monkeypatch.setenv(name, value)
    python = python_that_writes(tmp_path, ROWS[:1], 0)
    words = ["gpu-check", "cluster=sandbox", f"cluster.python={python}", "--directory", str(tmp_path / "a")]
    code = main(words)
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out.startswith("versions  passed   torch 2.9\n")
    # The check gets a share of the node's GPUs, not all of them.
    assert "GPUs: 0,1" in err.splitlines()


@pytest.mark.slurm
def test_node_of_an_allocation_is_checked(
    no_accounting_sandbox: Sandbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in no_accounting_sandbox.environment().items():
        monkeypatch.setenv(name, value)
    allocate = ["salloc", "--no-shell", "--nodes=1", "--gres=gpu:2", "--time=5"]
    output = subprocess.run(allocate, capture_output=True, text=True, check=True, timeout=60).stderr
    job = output.partition("Granted job allocation ")[2].split()[0]
    try:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        python = python_that_writes(tmp_path, ROWS[:1], 0)
        words = ["gpu-check", "cluster=interactive", f"cluster.python={python}"]
        code = main([*words, "--directory", str(tmp_path / "a")])
        err = capfd.readouterr().err
        assert code == 0, err
        assert "GPUs: 0,1" in err.splitlines()
    finally:
        subprocess.run(["scancel", job], check=True, timeout=60)
