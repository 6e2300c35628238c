"""Jobs whose tasks start again inside their allocation."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from launcher.sandbox import state
from tests.chains.chain_runs import ChainRuns
from tests.chains.chain_training import CHECKPOINTS, EVERY, FAST, SLOW, Training
from tests.chains.paced_trainer import CRASH, OUT_OF_MEMORY

NODES = "n13,n14"
STEPS, RESTARTS = 32, 4
_SETTINGS = [
    "training.trainer.num_nodes=2",
    f"training.trainer.max_steps={STEPS}",
    "training.trainer.limit_val_batches=0",
    f"{CHECKPOINTS}.save_top_k=-1",
]
STEADY, CRASHED = "steady", "crashed"


def crashed(runs: ChainRuns, run: str) -> None:
    """Crash a training on two nodes in four ways, each after a new checkpoint; nothing crashes `STEADY`."""
    steady = Training(runs, STEADY, NODES)
    steady.launch(*_SETTINGS, pace=FAST)
    training = Training(runs, run, NODES)
    training.launch(*_SETTINGS, f"resilience.restarts={RESTARTS}", "resilience.max_failures=2", pace=SLOW)
    job = _wait(runs, training, 1)
    os.kill(training.ranks(job)[-1], signal.SIGKILL)
    _wait(runs, training, 2)
    os.kill(_find_srun(runs, job), signal.SIGKILL)
    _wait(runs, training, 3)
    training.order(1, OUT_OF_MEMORY)
    _wait(runs, training, 4)
    training.order(0, CRASH)
    _wait(runs, training, 5, steps=1)
    runs.answers[run] = runs.slipway("status", run, "--json")
    training.set_pace(FAST)
    for name in (run, STEADY):
        runs.until_over(name)


def _wait(runs: ChainRuns, training: Training, start: int, steps: int = EVERY + 2) -> str:
    """Wait until a start of the tasks has trained and saved; return its job."""

    def has_trained() -> bool:
        starts = training.events_by_link()
        kinds = [event["kind"] for event in starts[-1]] if len(starts) == start else []
        return kinds.count("train") >= steps and (steps < EVERY or "checkpoint" in kinds)

    runs.until(f"start {start} of {training.name} trains", has_trained, training.name)
    return runs.links(training.name)[0]


def _find_srun(runs: ChainRuns, job: str) -> int:
    """Return the srun of a job's tasks, which has started another one."""
    own = {"SLURM_JOB_ID": job, "SLURM_CONF": runs.environment["SLURM_CONF"]}
    names = {pid: Path(f"/proc/{pid}/comm") for pid in state.processes()}
    sruns = [pid for pid, name in names.items() if name.exists() and name.read_text().strip() == "srun"]
    return min(pid for pid in sruns if own.items() <= state.environment(pid).items())


RESTARTED = {CRASHED: crashed}
