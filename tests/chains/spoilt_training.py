"""A training whose checkpoints are damaged between its jobs, in a chain and in launches by hand."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from tests.chains import spoiling_trainer
from tests.chains.chain_runs import ChainRuns
from tests.chains.chain_training import CHECKPOINTS, TRAINING
from tests.chains.spoiling_trainer import RECORD, SPOIL, STEPS
from tests.jobs.on_slurm.sandbox_runs import Done

SPOILT, UNSPOILT = "spoilt", "unspoilt"
# Number of damages; 20 take three minutes.
COUNT = int(os.environ.get("SLIPWAY_TEST_DAMAGES", "3"))
SEED = int(os.environ.get("SLIPWAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
EVERY = 2
# A job goes back by one checkpoint or by two.
MAX_STEPS = STEPS * (COUNT + 2)
SETTINGS = [
    *TRAINING,
    f"training.trainer.max_steps={MAX_STEPS}",
    "training.trainer.limit_val_batches=0",
    f"{CHECKPOINTS}.every_n_train_steps={EVERY}",
    f"{CHECKPOINTS}.save_top_k=-1",
]


def spoilt(runs: ChainRuns, run: str) -> None:
    """Launch a chain whose links each find damages but the first; then launch it by itself several times."""
    launches = max(COUNT // 3, 1)
    _launch(runs, UNSPOILT, count=0)
    links = COUNT - launches + 1
    _launch(runs, run, f"resilience.links={links}", count=COUNT)
    for number in range(1, links):
        # A wait for all of them would last longer than the patience of one.
        runs.until(f"damage {number}", lambda number=number: len(damage_records(runs, run)) >= number, run)
    runs.until_over(run)
    for _ in range(launches):
        _launch(runs, run, count=COUNT)
        runs.until_over(run)
    runs.until_over(UNSPOILT)


def damage_records(runs: ChainRuns, run: str) -> list[dict[str, Any]]:
    """Return the damage before each job but the first, what is to be set aside, and the newest whole step."""
    path = _results(runs, run) / RECORD
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events(runs: ChainRuns, run: str, kind: str) -> list[dict[str, Any]]:
    """Return the events of all launches, in their order."""
    launches = sorted((_results(runs, run) / "launches").iterdir(), key=lambda path: int(path.name))
    lines = [
        json.loads(line)
        for launch in launches
        for line in (launch / "results" / "metrics.jsonl").read_text().splitlines()
    ]
    return [line for line in lines if line["kind"] == kind]


def damaged_names(runs: ChainRuns, run: str) -> list[str]:
    """Return the names of the checkpoints that were set aside."""
    return sorted(path.name for path in (_results(runs, run) / "checkpoints" / "damaged").iterdir())


def _results(runs: ChainRuns, run: str) -> Path:
    return runs.launch_directory(run).parent.parent


def _launch(runs: ChainRuns, run: str, *overrides: str, count: int) -> Done:
    work = runs.work(run)
    work.mkdir(exist_ok=True)
    interpreter = work / "python"
    runs.pool.write_interpreter(interpreter, spoiling_trainer.__name__)
    checkpoints = runs.directory / "results" / run / "checkpoints"
    own = [f"training.run.name={run}", f"cluster.python={interpreter}"]
    own.append(f"env_vars.{SPOIL}='{checkpoints}:{SEED}:{count}'")
    done = runs.begin(*SETTINGS, *own, *overrides, nodes="n8")
    assert done.returncode == 0, done
    return done
