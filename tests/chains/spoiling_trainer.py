"""The trainer, stopped after some steps; its newest checkpoint is damaged before each job but the first."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.trainer.damages import damage, swap_steps
from trainer.checkpoint import store
from trainer.checkpoint.marker import MARKER

# The directory of checkpoints, a seed, and how many jobs find damages: `DIRECTORY:SEED:COUNT`. None: it is
# left alone, and not stopped.
SPOIL = "CHAIN_TEST_SPOIL"
RECORD = "damages.jsonl"
STEPS = 6


def spoil(checkpoints: Path, record: Path, seed: str) -> None:
    """Damage the newest checkpoint, sometimes the one before as well; record how, and what is left."""
    found = store.complete(checkpoints)
    chance = random.Random(f"{seed} {len(found)} {os.environ['SLURM_JOB_ID']}")
    many = 2 if chance.random() < 0.25 else 1
    damages = [damage(one.path, found[0].path, chance) for one in found[: -many - 1 : -1]]
    aside = [
        one.path.name
        for one, told in zip(reversed(found), damages, strict=False)
        if told != f"{swap_steps.__name__} {MARKER}"
    ]
    told = {"damages": damages, "aside": aside, "step": found[-many - 1].marker.step}
    with record.open("a") as file:
        file.write(json.dumps({"job": os.environ["SLURM_JOB_ID"], **told}) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Take ``-u -m trainer.pretrain ...``, as the interpreter that this stands for would."""
    from trainer import pretrain
    from trainer.loop import run

    directory, seed, count = os.environ[SPOIL].rsplit(":", 2)
    checkpoints, record = Path(directory), Path(directory).with_name(RECORD)
    if store.complete(checkpoints) and os.environ["RANK"] == "0":
        spoil(checkpoints, record, seed)
    compute, left = run.train_losses, STEPS

    def stopping(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        found = len(record.read_text().splitlines()) if record.exists() else 0
        if left == 0 and found < int(count) and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGUSR1)
        return compute(*arguments)

    run.train_losses = stopping
    return pretrain.main(arguments[arguments.index("-m") + 2 :])
