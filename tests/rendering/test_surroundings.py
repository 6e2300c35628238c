"""The environment of the payload: variables that depend on the model, secrets, the profiler."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.plan import Job, Payload, Plan
from launcher.stages.planning import plan_launch
from tests.fakes.programs import write_program
from tests.launch_files import script_of, task_of, write_files


def plan_of(tmp_path: Path, *overrides: str) -> Plan:
    config = compose([f"base_results_dir={tmp_path}", *overrides]).config
    return plan_launch(config, number=1, tag="x")


def job_of(*overrides: str) -> Job:
    return plan_of(Path("/r"), *overrides).job


def run_task(plan: Plan, tmp_path: Path, command: str, rank: int = 0, **env: str) -> str:
    """Run one task's script with a command for its payload; `tmp_path/bin` has the machine's tools."""
    payload = Payload(argv=("bash", "-c", command), working_dir="/")
    job = dataclasses.replace(plan.job, payload=payload, binding=None)
    script = task_of(dataclasses.replace(plan, job=job))
    step = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    variables = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **step, **ranks, **env}
    done = subprocess.run(
        ["bash", "-c", script, "task.sh", *payload.argv],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        ([], None),
        (["training.model.tensor_model_parallel_size=2"], "1"),
        (["training.model.context_parallel_size=2"], "1"),
        (["training.model.tensor_model_parallel_size=2", "training.model.fsdp=True"], None),
        (["training.model.tensor_model_parallel_size=2", "env_vars.CUDA_DEVICE_MAX_CONNECTIONS=8"], "8"),
        (["training.model.tensor_model_parallel_size=2", "env_vars.CUDA_DEVICE_MAX_CONNECTIONS=null"], None),
        (
            ["training.model.tensor_model_parallel_size=2", "cluster.env_vars.CUDA_DEVICE_MAX_CONNECTIONS=4"],
            "4",
        ),
        (["training=gpt3/tiny"], None),  # two tensor parallel ranks, on CPUs
    ],
)
def test_one_connection_for_tensor_and_context_parallel(overrides: list[str], value: str | None) -> None:
    assert job_of(*overrides).environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == value


VARIABLES = "NVTE_FWD_LAYERNORM_SM_MARGIN NVTE_BWD_LAYERNORM_SM_MARGIN NVTE_UB_SPLIT_AG"
SHOW = f"for name in {VARIABLES}; do echo ${{!name-unset}}; done"


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("8.0", "unset unset unset"), ("9.0", "8 8 0"), ("10.0", "8 8 unset"), (None, "unset unset unset")],
)
def test_variables_follow_from_the_gpus_capability(
    tmp_path: Path, capability: str | None, expected: str
) -> None:
    if capability:
        write_program(tmp_path / "bin" / "nvidia-smi", f"printf '{capability}\\n%.0s' 1 2 3 4 5 6 7 8")
    else:
        write_program(tmp_path / "bin" / "nvidia-smi", "exit 9")
    plan = plan_of(tmp_path, "training=llama/llama2_70b")
    assert run_task(plan, tmp_path, SHOW).split() == expected.split()


def test_a_variable_that_is_set_stays(tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "nvidia-smi", "echo 9.0")
    bare = plan_of(tmp_path, "training=llama/llama2_70b", "container=null")
    assert run_task(bare, tmp_path, SHOW, NVTE_UB_SPLIT_AG="1").split() == ["8", "8", "1"]
    contained = plan_of(tmp_path, "training=llama/llama2_70b")
    values = run_task(contained, tmp_path, SHOW, NVTE_UB_SPLIT_AG="1").split()
    assert values == ["8", "8", "0"], "in a container it is the image that set it"
    dropped = plan_of(tmp_path, "training=llama/llama2_70b", "env_vars.NVTE_FWD_LAYERNORM_SM_MARGIN=null")
    assert run_task(dropped, tmp_path, SHOW).split() == ["unset", "8", "0"]


@pytest.mark.parametrize(
    "overrides", [["training=gpt3/126m"], ["training=llama/llama1_7b"], ["training=gpt3/40b_improved"]]
)
def test_no_gpu_variables_without_a_virtual_pipeline(overrides: list[str]) -> None:
    assert job_of(*overrides).gpu_environment == {}


def test_only_the_chosen_ranks_run_under_the_profiler(tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "nsys", 'echo "nsys $*"')
    plan = plan_of(
        tmp_path / "a %p b",
        "training.model.nsys_profile.enabled=True",
        "training.model.nsys_profile.ranks=[0,3]",
    )
    outputs = [
        run_task(plan, tmp_path, "echo payload", rank, SLURM_JOB_ID="7", SLURM_NODEID="1")
        for rank in range(4)
    ]
    assert outputs[1] == outputs[2] == "payload\n"
    reports = f"{tmp_path}/a %%p b/gpt3_126m/launches/1/results/profile_logs"  # nsys reads patterns
    assert f"-o {reports}/profile_7_node1_rank3 --force-overwrite true" in outputs[3]
    assert (
        outputs[0].startswith("nsys profile -s none -t nvtx,cuda -o ")
        and "bash -c echo payload" in outputs[0]
    )
    assert plan.paths.profiles in plan.job.directories


def test_each_engine_is_profiled_where_its_configuration_says_so() -> None:
    assert job_of("engine=megatron").profile is None
    assert job_of("training.model.nsys_profile.enabled=True", "engine=megatron").profile is not None
    assert job_of("training=gpt3/5b_16k").profile is not None


@pytest.mark.parametrize(
    "inherited",
    [
        {},
        {"SHELLOPTS": "braceexpand:verbose:xtrace"},
        {"BASH_ENV": "{}/traced", "PS4": "+ $HF_TOKEN$WANDB_API_KEY "},
    ],
)
def test_a_secret_reaches_the_tasks_and_nothing_else(inherited: dict[str, str], tmp_path: Path) -> None:
    """The log has no secret either, although the launching shell prints every command."""
    (tmp_path / "traced").write_text("set -xv\n")
    (tmp_path / "my key").write_bytes(b"hunter2\r\nsecond line\r\n")
    overrides = [
        "cluster=local",
        "training=gpt3/tiny",
        "training.trainer.num_nodes=1",
        "training.trainer.devices=1",
    ]
    secret = [f"wandb_api_key_file='{tmp_path}/my key'", f"env_files.HF_TOKEN='{tmp_path}/my key'"]
    plan = plan_of(tmp_path / "r", *overrides, *secret)
    # No bash, which would be traced as well, and is not ours.
    show = "import os; print(f\"{os.environ['WANDB_API_KEY']}-{os.environ['HF_TOKEN']}\".upper())"
    payload = Payload(argv=(sys.executable, "-c", show), working_dir="/")
    plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, payload=payload))
    write_files(plan)
    done = subprocess.run(
        ["bash", plan.paths.script],
        env={**os.environ, **{name: value.format(tmp_path) for name, value in inherited.items()}},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "HUNTER2-HUNTER2" in done.stdout
    assert "hunter2" not in script_of(plan) + task_of(plan) + json.dumps(plan.job.config, default=str)
    assert "hunter2" not in done.stdout + done.stderr


def test_a_job_whose_secret_is_missing_fails_before_it_trains(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "cluster=local", "training=gpt3/tiny", "env_files.HF_TOKEN=/no/such/file")
    write_files(plan)
    done = subprocess.run(["bash", plan.paths.script], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "/no/such/file" in done.stderr
    assert not list(plan.paths.marks.glob("*.started.json"))
