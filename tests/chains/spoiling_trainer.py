"""The trainer, stopped after some steps; its newest checkpoint is damaged before each job but the first."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipway.trainer.checkpoint import store
from slipway.trainer.checkpoint.marker import MARKER
from tests.trainer.damages import damage, swap_steps

# The directory of checkpoints, a seed, and how many jobs find damages: `DIRECTORY:SEED:COUNT`. With a count
# of 0 the training is neither damaged nor stopped.
SPOIL = "CHAIN_TEST_SPOIL"
RECORD = "damages.jsonl"
STEPS = 6


def spoil(checkpoints: Path, record: Path, seed: str) -> None:
    """Damage the newest checkpoint, sometimes the one before as well; record how, and what is left."""
    complete = store.list_complete(checkpoints)
    chance = random.Random(f"{seed} {len(complete)} {os.environ['SLURM_JOB_ID']}")
    count = 2 if chance.random() < 0.25 else 1
    damages = [
        damage(checkpoint.path, complete[0].path, chance) for checkpoint in complete[: -count - 1 : -1]
    ]
    aside = [
        checkpoint.path.name
        for checkpoint, change in zip(reversed(complete), damages, strict=False)
        if change != f"{swap_steps.__name__} {MARKER}"
    ]
    fields = {"damages": damages, "aside": aside, "step": complete[-count - 1].marker.step}
    with record.open("a") as file:
        file.write(json.dumps({"job": os.environ["SLURM_JOB_ID"], **fields}) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Take ``-u -m slipway.trainer.pretrain ...``, as the interpreter that this stands for would."""
    from slipway.trainer import pretrain
    from slipway.trainer.loop import run

    directory, seed, count = os.environ[SPOIL].rsplit(":", 2)
    checkpoints, record = Path(directory), Path(directory).with_name(RECORD)
    if store.list_complete(checkpoints) and os.environ["RANK"] == "0":
        spoil(checkpoints, record, seed)
    compute, left = run.train_losses, STEPS

    def stopping(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        damages = len(record.read_text().splitlines()) if record.exists() else 0
        if left == 0 and damages < int(count) and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGUSR1)
        return compute(*arguments)

    run.train_losses = stopping
    return pretrain.main(arguments[arguments.index("-m") + 2 :])
