"""Users' wrappers of the NeMo Megatron launcher: the same overrides have the same meaning in Slipway."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from launcher.drafting import Draft, Request, draft
from launcher.errors import UserError
from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import run_command

WRAPPER = """\
#!/bin/bash
set -euo pipefail
: "${TARGET_PATH:?where the launcher is}"

declare -a BMK_ARGS=(
    # Only the training's time is measured.
    training.trainer.limit_val_batches=0.0
    training.exp_manager.create_checkpoint_callback=False
    training.exp_manager.resume_if_exists=False
    training.model.data.data_impl=mock
    training.model.data.data_prefix=[]
)
HYDRA_FULL_ERROR=1 python3 $TARGET_PATH/launcher_scripts/main.py \\
    stages=[training] \\
    training=${MODEL:-gpt3/126m} \\
    training.trainer.num_nodes=2 \\
    training.trainer.max_steps=${MAX_STEPS:-100} \\
    training.trainer.val_check_interval=${MAX_STEPS:-100} \\
    "${BMK_ARGS[@]}" "$@"
"""

# The overrides of the wrapper, for the tests that need no process.
WRAPPED = [
    "stages=[training]",
    "training=gpt3/126m",
    "training.trainer.num_nodes=2",
    "training.trainer.max_steps=100",
    "training.trainer.val_check_interval=100",
    "training.trainer.limit_val_batches=0.0",
    "training.exp_manager.create_checkpoint_callback=False",
    "training.exp_manager.resume_if_exists=False",
    "training.model.data.data_impl=mock",
    "training.model.data.data_prefix=[]",
]

SITE = [
    "cluster=bcm",
    "launcher_scripts_path=/fsx/launcher_scripts",
    "data_dir=/fsx/data",
    "base_results_dir=/fsx/results",
    "container=/apps/aws-nemo-megatron_23.07-py3.sqsh",
    "container_mounts=[/fsx,/opt/amazon:/opt/aws]",
    "env_vars.NCCL_DEBUG=INFO",
    "env_vars.NCCL_PROTO=null",
    "cluster.partition=p5",
    "cluster.job_name_prefix=bmk-",
]


@pytest.fixture
def wrapper(repository: Path, tmp_path: Path) -> Path:
    """A wrapper and the place that it knows the launcher by: `$TARGET_PATH/launcher_scripts/main.py`."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "launcher_scripts").symlink_to(repository / "launcher")
    path = tmp_path / "1.bmk-pretrain-gpt3.sh"
    path.write_text(WRAPPER)
    path.chmod(0o755)
    return path


def run_wrapper(wrapper: Path, *more: str, cwd: Path, check: int = 0, **env: str) -> tuple[str, str]:
    known = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TARGET_PATH": str(wrapper.parent / "target"),
    }
    done = run_command(wrapper, *more, cwd=cwd, check=check, **known, **env)
    return done.stdout, done.stderr


def header(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


def draft_wrapped(*more: str) -> Draft:
    # A directory without runs, so that nothing of this machine is read.
    return draft(Request([*WRAPPED, "cluster=bcm", "base_results_dir=/nowhere/results", *more], ["test"]))


def mounts(draft: Draft) -> list[str]:
    """Return the user's own mounts as `source:target`."""
    assert draft.plan.job.container is not None
    pairs = [f"{mount.source}:{mount.target}" for mount in draft.plan.job.container.mounts]
    return [text for text in pairs if not text.startswith(("/nowhere", str(Path.cwd())))]


def test_script_has_the_settings_of_the_wrapper(wrapper: Path, tmp_path: Path) -> None:
    script, _ = run_wrapper(wrapper, *SITE, "--dry-run", cwd=tmp_path)
    assert {
        "--job-name=bmk-gpt3_126m",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--mem=0",
        "--exclusive",
        "--partition=p5",
        "--time=1-00:00:00",
        "--dependency=singleton",
        "--output=/fsx/results/gpt3_126m/launches/1/log-bmk-gpt3_126m_%j.out",
    } <= set(header(script))
    assert "export NCCL_DEBUG=INFO\n" in script
    assert "export TRANSFORMERS_OFFLINE=0\n" in script
    assert "NCCL_PROTO" not in script
    assert "    --container-image=/apps/aws-nemo-megatron_23.07-py3.sqsh \\\n" in script
    assert "    --no-container-mount-home \\\n" in script
    (mounts_option,) = re.findall(r"^ +--container-mounts=(\S+)", script, re.MULTILINE)
    assert {"/fsx/results:/fsx/results", "/fsx/data:/fsx/data:ro"} <= set(mounts_option.split(","))
    assert mounts_option.split(",")[-2:] == ["/fsx:/fsx", "/opt/amazon:/opt/aws"]


def test_script_does_not_depend_on_the_directory(wrapper: Path, tmp_path: Path) -> None:
    scripts = {
        re.sub(r"(?<=supervisor\.pyz\" )\S+", "TAG", run_wrapper(wrapper, *SITE, "--dry-run", cwd=cwd)[0])
        for cwd in (tmp_path, Path("/"))
    }
    assert len(scripts) == 1


def test_a_dependency_of_null_is_none(wrapper: Path, tmp_path: Path) -> None:
    script, _ = run_wrapper(wrapper, *SITE, "training.run.dependency=null", "--dry-run", cwd=tmp_path)
    assert "dependency" not in script


def test_a_mistake_in_a_wrapper_is_one_message(wrapper: Path, tmp_path: Path) -> None:
    """HYDRA_FULL_ERROR=1, which wrappers set, brings no traceback."""
    stdout, stderr = run_wrapper(wrapper, "training.trainer.num_node=3", cwd=tmp_path, check=2)
    assert (stdout, "Traceback" in stderr) == ("", False)
    assert "num_nodes" in stderr


def test_configuration_of_the_job_has_the_values_of_the_wrapper() -> None:
    config = draft_wrapped().plan.job.config
    assert config is not None
    assert config["trainer"]["num_nodes"] == 2
    assert (config["trainer"]["max_steps"], config["trainer"]["val_check_interval"]) == (100, 100)
    assert config["trainer"]["limit_val_batches"] == 0.0
    assert config["exp_manager"]["create_checkpoint_callback"] is False
    assert config["exp_manager"]["resume_if_exists"] is False
    assert (config["model"]["data"]["data_impl"], config["model"]["data"]["data_prefix"]) == ("mock", [])


def test_the_launchers_path_moves_data_and_results() -> None:
    config = draft(Request([*WRAPPED, "launcher_scripts_path=/nowhere/scripts"], ["test"])).composition.config
    assert config.data_dir == "/nowhere/scripts/data"
    assert config.base_results_dir == "/nowhere/scripts/results"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("env_vars.X=1", "1"),
        ("+env_vars.X=1", "1"),
        ("++env_vars.X=1", "1"),
        ("env_vars={X: 1}", "1"),
        ("env_vars.X='a b'", "a b"),
        ("env_vars.X=null", None),
        ("+env_vars.X=null", None),
    ],
)
def test_variable_reaches_the_environment(override: str, value: str | None) -> None:
    assert draft_wrapped(override).plan.job.environment.get("X") == value


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("container_mounts=[/a,/b:/c]", ["/a:/a", "/b:/c"]),
        ("container_mounts=[null]", []),
        ("container_mounts=[null,/a]", ["/a:/a"]),
        ("container_mounts=[]", []),
    ],
)
def test_mounts_are_planned_as_source_and_target(override: str, expected: list[str]) -> None:
    assert mounts(draft_wrapped(override)) == expected


@pytest.mark.parametrize(
    ("written", "image"),
    [
        ("/apps/x.sqsh", "/apps/x.sqsh"),
        ("'nvcr.io#nvidia/nemo:24.07'", "nvcr.io#nvidia/nemo:24.07"),
        ("nvcr.io/nvidia/nemo:24.07", "nvcr.io#nvidia/nemo:24.07"),  # as Pyxis wants it
    ],
)
def test_images_are_planned_in_the_spelling_of_pyxis(written: str, image: str) -> None:
    container = draft_wrapped(f"container={written}").plan.job.container
    assert container is not None
    assert container.image == image


def test_a_key_is_dropped() -> None:
    config = draft_wrapped(
        "~training.exp_manager.log_step_timing", "~training.model.nsys_profile"
    ).plan.job.config
    assert config is not None
    assert "log_step_timing" not in config["exp_manager"]
    assert "nsys_profile" not in config["model"]


@pytest.mark.parametrize("override", ["stages=[training]", 'stages=["training"]', "stages=[ 'training' ]"])
def test_stages_are_read_in_several_spellings(override: str) -> None:
    assert draft_wrapped(override).plan.job.stage == "training"


@pytest.mark.parametrize("override", ["stages=training", "stages=[trainin]", "stages=[]", "stages=null"])
def test_invalid_stages_are_refused(override: str) -> None:
    with pytest.raises(UserError, match="stages"):
        draft_wrapped(override)


@pytest.mark.slurm
def test_slurm_accepts_the_wrappers_script(wrapper: Path, tmp_path: Path, sandbox: Sandbox) -> None:
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    # The sandbox knows no partition p5.
    site = [override for override in SITE if not override.startswith("cluster.partition")]
    script = tmp_path / "script.sh"
    script.write_text(run_wrapper(wrapper, *site, "--dry-run", cwd=tmp_path, **conf)[0])
    done = run_command("sbatch", "--test-only", "--partition=cloud", script, cwd=tmp_path, **conf)
    assert "to start at" in done.stderr


@pytest.mark.slurm
@pytest.mark.trainer
def test_the_wrappers_training_runs(
    wrapper: Path, tmp_path: Path, sandbox: Sandbox, warm_python: Path
) -> None:
    environment = {
        "SLURM_CONF": sandbox.environment()["SLURM_CONF"],
        "MODEL": "gpt3/tiny",
        "MAX_STEPS": "3",
    }
    more = ["cluster=sandbox", "base_results_dir=out", "env_vars.SEEN=1", "container_mounts=[null]"]
    small = ["training.model.encoder_seq_length=32", "training.run.dependency=null"]
    small += [f"cluster.python={warm_python}", "+training.model.override_vocab_size=512"]
    stdout, _ = run_wrapper(wrapper, *more, *small, "--follow", cwd=tmp_path, **environment)
    assert "COMPLETED" in stdout
    run = tmp_path / "out" / "gpt3_tiny"
    config = yaml.safe_load((run / "gpt3_tiny_hydra.yaml").read_text())
    assert (config["trainer"]["max_steps"], config["model"]["data"]["data_prefix"]) == (3, [])
    script = (run / "nemo-megatron-gpt3_tiny_submission.sh").read_text()
    assert "export SEEN=1\n" in script
    assert not any(line.startswith("--dependency") for line in header(script))
    assert '"step": 3' in (run / "results" / "metrics.jsonl").read_text()
    assert list((run / "checkpoints").iterdir()) == [], "no checkpoint was asked for"
