"""Which checkpoint a launch starts from, and how. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import store
from trainer.checkpoint.store import Found
from trainer.config.resume import Resume
from trainer.config.saving import Saving
from trainer.errors import UserError, suggest
from trainer.logs import LOGGER

_KEY = "resume.checkpoint"


@dataclass(frozen=True)
class Choice:
    """What a launch starts from.

    Attributes
    ----------
    found
        The checkpoint.
    load_optimizer
        Whether the optimizer's states are taken over too.
    is_branch
        Whether the training goes on from an earlier point, so that what it saves has to be told from what
        it saved on its first way from there.
    """

    found: Found
    load_optimizer: bool
    is_branch: bool


def choose(saving: Saving, resume: Resume) -> Choice | None:
    """Return what to start from; None for step 0, where there is no checkpoint.

    An intervention that the newest checkpoint comes after has been made. A launch that is killed before its
    first checkpoint leaves the newest as it was, and the next one makes the intervention again, from the same
    point.

    Raises
    ------
    UserError
        If ``resume.checkpoint`` names what is no complete checkpoint.
    """
    found = _newest(saving)
    if found and resume.was_made(found.marker.resume):
        return Choice(found, True, False)
    if resume.checkpoint is not None:
        found = _named(resume.checkpoint, saving.directory)
        LOGGER.info("%s=%s: going back to step %d", _KEY, resume.checkpoint, found.marker.step)
    if found is None:
        return None
    if not resume.load_optimizer:
        LOGGER.info("resume.load_optimizer=False: the optimizer starts anew at step %d", found.marker.step)
    return Choice(found, resume.load_optimizer, is_branch=resume.checkpoint is not None)


def _newest(saving: Saving) -> Found | None:
    found, torn = store.newest(saving.directory)
    for path, reason in torn.items():
        LOGGER.warning("skipping %s: it is not a complete checkpoint (%s)", path, reason)
    if found and saving.enabled:
        # The launch before may have been killed between naming a checkpoint and this.
        store.point_latest(found.path)
    return found


def _named(name: str, directory: Path) -> Found:
    path = Path(name) if "/" in name else directory / name
    found, wrong = store.open_checkpoint(path)
    if found is None:
        wrong = wrong if path.is_dir() else "there is no such directory"
        names = [one.path.name for one in store.complete(directory) if store.damage(one) is None]
        listed = f"; complete ones in {directory} are {', '.join(names)}" if names else ""
        raise UserError(
            f"{_KEY}={name}: {path} is not a complete checkpoint ({wrong}){listed}{suggest(name, names)}"
        )
    return found
