"""`slipway launch --ramp` on a real Slurm: rungs, a planted slow node, interruptions; and refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command

# In place of the trainer: all ranks work, on the node $SLOW for longer, and rank 0 writes down the steps.
STAND_IN = """#!/bin/bash
cd ../results
while [[ -e $HOLD && $WORLD_SIZE -gt 2 ]]; do sleep 0.1; done
delay=0.4; [[ $SLURMD_NODENAME == "$SLOW" ]] && delay=2
began=${EPOCHREALTIME/./}
sleep $delay
echo $((${EPOCHREALTIME/./} - began)) >"new.$SLURM_JOB_ID.$RANK"
mv "new.$SLURM_JOB_ID.$RANK" "done.$SLURM_JOB_ID.$RANK"
((RANK)) && exit 0
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
    until [[ -e done.$SLURM_JOB_ID.$rank ]]; do sleep 0.05; done
done
slowest=$(cat done.$SLURM_JOB_ID.* | sort -n | tail -1)
echo '{"kind": "start", "time": 1, "step": 0, "max_steps": 20}' >>metrics.jsonl
for step in {1..20}; do
    speed=$((WORLD_SIZE * 20000 * 1000000 / slowest))
    echo '{"kind": "train", "time": '$step', "step": '$step', "loss": 5.0, "tokens_per_second": '$speed'}'
done >>metrics.jsonl
"""
TINY = [
    *("training=gpt3/tiny", "cluster=sandbox", "training.trainer.num_nodes=4"),
    *("training.model.global_batch_size=64", "training.model.data.data_impl=mock"),
]


@pytest.fixture
def command(tmp_path: Path, sandbox: Sandbox) -> list[str]:
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    conf = sandbox.environment()["SLURM_CONF"]
    own = [
        f"cluster.slurm_conf={conf}",
        f"cluster.python={tmp_path}/python",
        f"env_vars.HOLD={tmp_path}/hold",
    ]
    return [str(SLIPWAY), "launch", *TINY, *own, "--ramp-drop=50"]


@pytest.mark.slurm
def test_a_slow_node_is_named_at_its_rung(tmp_path: Path, command: list[str]) -> None:
    """n4 is the last of the two suspects: the half that is tried first is fast."""
    words = [*command, "env_vars.SLOW=n4", "cluster.nodelist='n[1-4]'", "--ramp=2,4"]
    done = run_command(*words, "--json", cwd=tmp_path, check=1)
    content = json.loads(done.stdout)
    assert [(rung["nodes"], rung["verdict"]) for rung in content["rungs"]] == [(2, "good"), (4, "slow")]
    assert content["suspects"] == ["n4"] and content["rungs"][1]["of_before"] < 0.5
    parts = sorted(path.name for path in (tmp_path / "results").glob("*_part_*"))
    assert parts == ["gpt3_tiny_ramp_part_1", "gpt3_tiny_ramp_part_2"], done.stderr
    assert not (tmp_path / "results" / "gpt3_tiny").exists()
    # Without it: the good rung is not repeated, as its files are the same.
    done = run_command(*words, "--ramp=2", cwd=tmp_path)
    assert "rung 1 of 1, 2 nodes: was good already" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("slipway launch training=gpt3/tiny ")
    assert "--ramp" not in done.stdout.splitlines()[-1]


@pytest.mark.slurm
def test_a_killed_ramp_goes_on_and_an_interrupted_one_cancels(tmp_path: Path, command: list[str]) -> None:
    hold, log = tmp_path / "hold", tmp_path / "stderr"
    hold.touch()
    words = [*command, "env_vars.SLOW=none", "--ramp=1,2"]

    def start_until_second_rung(then: signal.Signals) -> int:
        with log.open("w") as stderr:
            ramp = subprocess.Popen([sys.executable, *words], cwd=tmp_path, stderr=stderr)
        end = time.monotonic() + 120
        while " RUNNING on n" not in log.read_text().partition("rung 2 of 2, 2 nodes: ")[2]:
            assert time.monotonic() < end and ramp.poll() is None, log.read_text()
            time.sleep(0.1)
        ramp.send_signal(then)
        return ramp.wait()

    assert start_until_second_rung(signal.SIGKILL) == -signal.SIGKILL
    assert start_until_second_rung(signal.SIGINT) == 130
    text = log.read_text()
    assert "rung 1 of 2, 1 node: was good already, job " in text
    assert "rung 2 of 2, 2 nodes: goes on with job " in text
    assert "cancelled" in text and "the same command goes on after the rungs that were good" in text
    assert list((tmp_path / "results" / "gpt3_tiny_ramp_2").glob("newest/marks/*.cancelled.json"))
    hold.unlink()
    done = run_command(*words, "--json", cwd=tmp_path)
    content: dict[str, Any] = json.loads(done.stdout)
    assert [rung["verdict"] for rung in content["rungs"]] == ["good", "good"]
    assert content["rungs"][1]["launch"] == 2, "the cancelled one is not taken for the result"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ramp=4,2"], "--ramp 4,2: each rung has more nodes than the one before"),
        (["--ramp=1,8"], "--ramp 1,8: more nodes than training.trainer.num_nodes=4"),
        (["--ramp=0"], "'0' is not a list of numbers of nodes"),
        (["--ramp=1,2", "--ramp-drop=x"], "'x' is not a whole number of at least 1"),
        (["--ramp-drop=5"], "--ramp-drop: only with --ramp"),
        (["--ramp=1,2", "--smoke"], "--ramp and --smoke: a ramp launches its rungs alone"),
        (["--ramp=1,2", "--follow"], "--ramp and --follow: a ramp launches its rungs alone"),
        (
            ["--ramp=1,2,4", "training.model.tensor_model_parallel_size=4"],
            "--ramp: 1 node of 2 GPUs cannot hold tensor 4 × pipeline 1 × context 1",
        ),
    ],
)
def test_mistakes_submit_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    done = run_command(SLIPWAY, "launch", *TINY, *words, "--dry-run", cwd=tmp_path, check=2)
    assert message in done.stderr and not list(tmp_path.iterdir())


def test_only_a_training_has_a_ramp(tmp_path: Path) -> None:
    words = ["stages=[command]", "command.argv=[true]", "--ramp=1", "--dry-run"]
    done = run_command(SLIPWAY, "launch", *words, cwd=tmp_path, check=2)
    assert "--ramp: stages=[command] has no steps to time, or no layout" in done.stderr


def test_dry_run_prints_the_scripts_of_all_rungs(tmp_path: Path) -> None:
    done = run_command(SLIPWAY, "launch", *TINY, "--ramp=1,4", "--dry-run", cwd=tmp_path)
    assert [line for line in done.stdout.splitlines() if line.startswith("#SBATCH --nodes")] == [
        "#SBATCH --nodes=1",
        "#SBATCH --nodes=4",
    ]
    assert "ramp: 1 node, 20 steps, global batch 16" in done.stderr
    assert "ramp: 4 nodes, 20 steps, global batch 64" in done.stderr
