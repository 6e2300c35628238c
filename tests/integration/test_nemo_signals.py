"""Signals that reach NeMo when its job is to save, on a real Slurm; a script stands in for NeMo."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command

# Like NeMo, it saves on TERM with the help of another process. Other signals end it by default, and so does a
# second TERM.
STAND_IN = """#!/bin/bash
sleep 60 &
save() {
    trap - TERM
    echo "$SLURM_PROCID: Received SIGTERM, saving checkpoint and exiting"
    sleep 2
    kill -0 $! && echo "saved by $SLURM_PROCID"
    kill $!
    exit 0
}
trap save TERM
echo "task $SLURM_PROCID trains"
for ((second = 0; second < 240; second++)); do sleep 0.25; done
"""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.slurm
@pytest.mark.parametrize("target", [["--batch"], []], ids=["to the script", "to all tasks"])
def test_a_warning_becomes_the_signal_that_nemo_saves_on(
    tmp_path: Path, sandbox: Sandbox, target: list[str]
) -> None:
    """On the warning itself Lightning would requeue the job and save what NeMo cannot read."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    script = tmp_path / "examples/nlp/language_modeling/megatron_gpt_pretraining.py"
    script.parent.mkdir(parents=True)
    script.touch()
    environment = sandbox.environment()
    overrides = [
        "training=gpt3/126m",
        "cluster=sandbox",
        "engine=nemo",
        "container=null",
        f"cluster.python={stand_in}",
        f"nemo_path={tmp_path}",
        "training.trainer.num_nodes=1",
        "training.trainer.devices=2",
    ]
    run = tmp_path / "results" / "gpt3_126m"
    half = run / "checkpoints" / "megatron_gpt--step=4-consumed_samples=8.0-last"
    half.mkdir(parents=True)
    mark = half.with_name(f"{half.name}-unfinished")
    mark.touch()
    run_command(SLIPWAY, "launch", *overrides, cwd=tmp_path, **environment)
    launch = run / "launches" / "1"
    job = (launch / "launcher.log").read_text().split()[-1]

    def log() -> str:
        return "".join(path.read_text() for path in launch.glob("log-*.out"))

    try:
        wait_until(lambda: log().count("trains") == 2)
        # The signal of a user, and then that of the time limit.
        for _ in range(2):
            subprocess.run(["scancel", "--signal=USR1", *target, job], env=environment, check=True)
            wait_until(lambda: log().count("saving checkpoint") == 2)
        wait_until(lambda: list((launch / "marks").glob("*.ended.json")))
    finally:
        subprocess.run(["scancel", job], env=environment, check=False)
    assert '"exit_code": 75' in next((launch / "marks").glob("*.ended.json")).read_text()
    assert {"saved by 0", "saved by 1"} <= set(log().splitlines())
    # Remains of a job that was killed while it saved are out of NeMo's way.
    assert not list((run / "checkpoints").iterdir())
    aside = run / "checkpoints-set-aside" / f"{job}.0"
    assert {path.name for path in aside.iterdir()} == {half.name, mark.name}
