"""A training whose checkpoints are damaged; run by test_damages.py in processes forked from a warm one.

``probe_damages CONFIG PRISTINE COUNT SEED``: COUNT times the checkpoints in PRISTINE are copied to where the
configuration has them, and the newest is damaged, sometimes the one before as well. All ranks then choose,
verify and load one, and take two steps. The last line lists for each the damages, the loaded checkpoint,
the losses, and the checkpoints set aside. The first entries are without damage, one for each newest
checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slipway.trainer.checkpoint import state, store
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten, load_config
from slipway.trainer.config.settings import read_settings
from slipway.trainer.distributed import broadcast_from_rank0, make_rank_context, process_group
from slipway.trainer.logs import LOGGER
from slipway.trainer.loop.session import Session, _choose, open_session
from slipway.trainer.world import World
from tests.trainer.damages import damage
from tests.trainer.looping import loop_of

STEPS = 2


@dataclass
class ChainRuns:
    """The directories, and the order of the checkpoints in them, newest last."""

    pristine: Path
    work: Path
    names: list[str]

    def restock(self, names: list[str]) -> None:
        """Refill the working directory with chosen checkpoints, as they were written."""
        shutil.rmtree(self.work, ignore_errors=True)
        for name in names:
            shutil.copytree(self.pristine / name, self.work / name)

    def damage(self, chance: random.Random) -> list[str]:
        """Damage the newest, and every fourth time the one before; return how."""
        self.restock(self.names)
        count = 2 if chance.random() < 0.25 else 1
        return [
            damage(self.work / self.names[-index], self.pristine / self.names[0], chance)
            for index in range(1, count + 1)
        ]


def continue_training(session: Session) -> dict[str, Any]:
    """Start from the newest checkpoint, as a launch does, and take some steps."""
    choice = _choose(session)
    assert choice
    session.progress = state.restore(
        choice, session.model, session.optimizer.inner, session.rank_context, session.settings.seed
    )
    start, losses = session.progress.step, list[str]()
    with loop_of(session) as loop:
        for _ in range(STEPS):
            loop.step()
            losses.append(loop.loss.hex())
    return {"name": choice.checkpoint.path.name, "step": start, "losses": losses}


def main(arguments: list[str]) -> int:
    config, pristine = Path(arguments[0]), Path(arguments[1])
    count, chance = int(arguments[2]), random.Random(arguments[3])
    LOGGER.addHandler(logging.StreamHandler())
    LOGGER.setLevel(logging.ERROR)
    settings = read_settings(flatten(load_config(config.parent, config.name)))
    settings.output.log_dir.mkdir(parents=True, exist_ok=True)
    world = World.from_environment(os.environ)
    names = [checkpoint.path.name for checkpoint in store.list_complete(pristine)]
    runs = ChainRuns(pristine, settings.saving.directory, names)
    entries: list[dict[str, Any]] = []
    with process_group(world, "auto") as device:
        broadcast_from_rank0(lambda: runs.restock(names))
        session = open_session(settings, make_rank_context(world, make_layout(settings, world.size), device))
        for newest in range(1, len(names) + 1):
            broadcast_from_rank0(lambda newest=newest: runs.restock(names[:newest]))
            entries.append(continue_training(session))
        for _ in range(count):
            damages = broadcast_from_rank0(lambda: runs.damage(chance))
            entry = continue_training(session)
            aside = sorted(path.name for path in store.list_damaged(runs.work))
            remaining = sorted(path.name for path in runs.work.iterdir() if not path.is_symlink())
            entries.append({**entry, "damages": damages, "aside": aside, "left": remaining})
            dist.barrier()
    if world.is_main:
        print(json.dumps(entries))
    return 0
