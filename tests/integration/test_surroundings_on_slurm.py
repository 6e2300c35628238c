"""The environment of tasks on a real Slurm: flags, variables, the boost slider, cores."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.plan import Payload
from launcher.sandbox.lifecycle import Sandbox
from launcher.stages.planning import plan_launch
from tests.launch_files import write_files


@pytest.mark.slurm
def test_tasks_have_flags_variables_boost_and_cores(tmp_path: Path, sandbox: Sandbox) -> None:
    key = tmp_path / "key"
    key.write_text("hunter2\n")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sudo").write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >>{tmp_path}/boosted-$SLURMD_NODENAME\n')
    (tools / "sudo").chmod(0o755)
    overrides = [
        "cluster=sandbox",
        f"base_results_dir={tmp_path}",
        "training.trainer.num_nodes=2",
        "training.trainer.devices=2",
        "training.model.tensor_model_parallel_size=2",
        "cluster.mpi=none",
        "cluster.requeue=False",
        "cluster.comment='a try'",
        "cluster.sbatch.nice=100",
        "cluster.sbatch.export=NONE",  # of the shell's; what the script exports reaches the tasks
        "enable_vboost=True",
        f"env_files.HF_TOKEN={key}",
        f"env_vars.PATH={tools}:{os.environ['PATH']}",
    ]
    plan = plan_launch(compose(overrides).config, number=1, tag="x")
    command = 'echo "task $RANK: $CUDA_DEVICE_MAX_CONNECTIONS, $(printf "%s" "$HF_TOKEN" | tr a-z A-Z)"'
    payload = Payload(argv=("bash", "-c", command), working_dir="/")
    write_files(dataclasses.replace(plan, job=dataclasses.replace(plan.job, payload=payload)))
    done = subprocess.run(
        ["sbatch", "--wait", "--parsable", plan.paths.script],
        env={**sandbox.environment(), "SHELLOPTS": "braceexpand:verbose:xtrace"},  # prints every command
        capture_output=True,
        text=True,
        timeout=120,
    )
    log = plan.paths.log(done.stdout.strip()).read_text()
    assert done.returncode == 0, log + done.stderr
    assert sorted(re.findall(r"task (\d): 1, HUNTER2", log)) == ["0", "1", "2", "3"], log
    boost_files = sorted(tmp_path.glob("boosted-*"))
    assert len(boost_files) == 2, log
    assert [path.read_text() for path in boost_files] == ["-n nvidia-smi boost-slider --vboost 1\n"] * 2
    assert len(re.findall(r"Rank \d: ", log)) == 4, "each task tells of its cores"
    assert "hunter2" not in log
