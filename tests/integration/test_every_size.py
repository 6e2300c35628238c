"""Every size of the tree is a script that Slurm takes, on as many nodes as the size asks for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.config.compose import compose, list_options
from launcher.sandbox.lifecycle import Sandbox
from launcher.stages.planning import plan_launch
from tests.launch_files import script_of

# One of each kind. "many flags" has most options of a cluster that the sandbox supports.
FURTHER = {
    "cluster=p4d": ["training=gpt3/5b", "cluster=p4d"],
    "cluster=p5en": ["training=llama/llama3_8b", "cluster=p5en"],
    "many flags": [
        "cluster.mem=64GB",
        "cluster.exclusive=False",
        "training.run.time_limit=30",
        "cluster.mail_type=[END,FAIL]",
        "cluster.comment='a try, the 2nd'",
        "cluster.signal='B:USR1@300'",
        "cluster.requeue=True",
        "cluster.begin=now+1hour",
        "cluster.switches=1@10:00",
        "cluster.sbatch={spread-job: true, nice: 100}",
    ],
    "exclusive=user": ["cluster.exclusive=user", "cluster.gpu_request=gres"],
}


@pytest.mark.slurm
def test_slurm_takes_every_size(tmp_path: Path, sandbox: Sandbox) -> None:
    cases = {size: [f"training={size}"] for size in list_options("training")} | FURTHER
    environment = sandbox.environment()
    refusals = {}
    for name, overrides in cases.items():
        config = compose([*overrides, f"base_results_dir={tmp_path}"]).config
        script = script_of(plan_launch(config, number=1, tag="x"))
        done = subprocess.run(
            ["sbatch", "--test-only", "--partition=cloud"],
            input=script,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode != 0 or "to start at" not in done.stderr:
            refusals[name] = done.stderr
    assert refusals == {}
