"""The benchmark wrappers: the command that each hands to the launcher, and a run of one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.sandbox.lifecycle import Sandbox
from slipway.arithmetic.parameters import count_parameters, vocabulary_size

pytestmark = pytest.mark.usefixtures("forked_slipway_on_path")

WRAPPERS = (
    "bmk-pretrain-gpt3-126m2",
    "bmk-pretrain-gpt3-5b2",
    "bmk-pretrain-t5-220m2",
    "bmk-pretrain-t5-3b2",
)
VARIABLES = (
    "MODEL",
    "MODEL_SIZE",
    "NUM_NODES",
    "RUNTIME",
    "MAX_STEPS",
    "GLOBAL_BATCH_SIZE",
    "UNIQUE_OUTPUT_DIR",
)

# These overrides make 126m small enough for two cores.
SHRUNK = [
    "training.trainer.accelerator=cpu",
    "training.trainer.devices=2",
    "training.trainer.precision=32",
    "training.model.megatron_amp_O2=False",
    "training.model.num_layers=2",
    "training.model.hidden_size=32",
    "training.model.num_attention_heads=4",
    "training.model.encoder_seq_length=32",
    "training.model.data.seq_length=32",
    "training.model.max_position_embeddings=32",
    "training.model.micro_batch_size=2",
]


def run(
    repository: Path, wrapper: str, target: Path | None, *more: str, check: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a wrapper as a user of a clean shell with `slipway` on the PATH."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment["ENROOT_IMAGE"] = "null"
    if target is not None:
        environment["TARGET_PATH"] = str(target)
    command = [str(repository / "benchmarks" / f"{wrapper}.sh"), *more]
    result = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=280, cwd="/"
    )
    assert result.returncode == check, f"{result.stdout}\n{result.stderr}"
    return result


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapper_renders_the_script_of_its_size(repository: Path, tmp_path: Path, wrapper: str) -> None:
    target = tmp_path / "it's shared"
    image = "nvcr.io#nvidia/nemo:24.07"
    result = run(repository, wrapper, target, "--dry-run", "cluster=bcm", ENROOT_IMAGE=image)
    match = re.fullmatch(r"bmk-pretrain-(\w+)-(\w+?)2", wrapper)
    assert match is not None
    script = result.stdout
    assert f"#SBATCH --job-name=nemo-megatron-{match[1]}_{match[2]}\n#SBATCH --nodes=2\n" in script
    assert re.search(r"^#SBATCH --time=0[04]:[30]0:00$", script, re.MULTILINE)
    assert f'--output="{target}/results/{match[1]}_{match[2]}/launches/1/log-' in script
    assert "export TRANSFORMERS_OFFLINE=0\n" in script
    assert f"'--container-image={image}'" in script
    assert not target.exists()


def test_each_variable_changes_the_script(repository: Path, tmp_path: Path) -> None:
    variables = {
        "MODEL": "gpt3",
        "MODEL_SIZE": "5b",
        "NUM_NODES": "3",
        "RUNTIME": "1h30m",
        "MAX_STEPS": "12",
        "GLOBAL_BATCH_SIZE": "96",
        "TRANSFORMERS_OFFLINE": "1",
        "UNIQUE_OUTPUT_DIR": "1",
    }
    arguments = ["--dry-run", "cluster=bcm", "cluster.partition=p5", "training.trainer.max_steps=13"]
    script = run(repository, "1.bmk-pretrain", tmp_path, *arguments, **variables).stdout
    lines = ("--nodes=3", "--time=01:30:00", "--partition=p5", "--job-name=nemo-megatron-gpt3_5b")
    assert all(f"#SBATCH {line}\n" in script for line in lines)
    assert "export TRANSFORMERS_OFFLINE=1\n" in script
    assert re.search(rf"--output={tmp_path}/results-\d{{8}}-\d{{6}}-\d{{3}}/gpt3_5b/", script)


@pytest.mark.parametrize(
    ("runtime", "time"),
    [
        ("30m", "00:30:00"),
        ("08m", "00:08:00"),
        ("90s", "00:01:30"),
        ("2d", "48:00:00"),
        ("1h", "01:00:00"),
        ("00:10:00", "00:10:00"),
        ("1-00:00:00", "1-00:00:00"),
        ("45", "45"),
    ],
)
def test_the_runtime_becomes_the_time_limit(
    repository: Path, tmp_path: Path, runtime: str, time: str
) -> None:
    result = run(repository, "bmk-pretrain-gpt3-126m2", tmp_path, "--dry-run", RUNTIME=runtime)
    assert f"#SBATCH --time={time}\n" in result.stdout


def test_missing_variables_are_named(repository: Path, tmp_path: Path) -> None:
    assert "TARGET_PATH: set it" in run(repository, "bmk-pretrain-t5-3b2", None, check=1).stderr
    assert "ENROOT_IMAGE: set" in run(repository, "1.bmk-pretrain", tmp_path, check=1, ENROOT_IMAGE="").stderr


def test_mistake_is_reported_by_the_launcher(repository: Path, tmp_path: Path) -> None:
    result = run(repository, "1.bmk-pretrain", tmp_path, "--dry-run", check=2, MODEL_SIZE="126b")
    assert "training=gpt3/126b: there is no such choice" in result.stderr


def test_checkout_is_used_without_slipway_on_path(repository: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "date", "dirname", "readlink"):
        (tools / tool).symlink_to(f"/usr/bin/{tool}")
    (tools / "python3").symlink_to(sys.executable)
    # Through a link from elsewhere, as one keeps such scripts in ~/bin.
    (tmp_path / "mine.sh").symlink_to(repository / "benchmarks" / "bmk-pretrain-gpt3-126m2.sh")
    environment = {"PATH": str(tools), "TARGET_PATH": str(tmp_path), "ENROOT_IMAGE": "null"}
    command = [str(tmp_path / "mine.sh"), "--dry-run"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr
    assert "#SBATCH --nodes=2\n" in result.stdout


def test_shellcheck_passes(repository: Path) -> None:
    scripts = sorted((repository / "benchmarks").glob("*.sh"))
    assert len(scripts) == 5
    result = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), *scripts], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.slurm
@pytest.mark.trainer
def test_a_benchmark_runs(repository: Path, tmp_path: Path, sandbox: Sandbox, warm_python: Path) -> None:
    variables = {"MAX_STEPS": "3", "RUNTIME": "5m", "GLOBAL_BATCH_SIZE": "16", "UNIQUE_OUTPUT_DIR": "1"}
    environment = variables | {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    overrides = ["cluster=sandbox", f"cluster.python={warm_python}", *SHRUNK, "--follow"]
    result = run(repository, "bmk-pretrain-gpt3-126m2", tmp_path, *overrides, **environment)
    assert "COMPLETED" in result.stdout
    (results,) = tmp_path.glob("results-*")
    launch = results / "gpt3_126m" / "launches" / "1"
    steps = [json.loads(line) for line in (launch / "results" / "metrics.jsonl").read_text().splitlines()]
    assert max(step.get("step", 0) for step in steps) == 3
    model = yaml.safe_load((launch / "gpt3_126m_hydra.yaml").read_text())["model"]
    parameters = next(step["parameters"] for step in steps if "parameters" in step)
    assert parameters == count_parameters(model, vocabulary_size(model) or 0), "as `slipway list` counts"
    manifest = json.loads((launch / "launcher.json").read_text())
    assert (manifest["nodes"], manifest["tasks_per_node"], manifest["time_limit"]) == (2, 2, "00:05:00")
    assert not list((results / "gpt3_126m" / "checkpoints").iterdir())
