"""Retention of checkpoints: the best are kept, the others removed. Imports no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from slipway.common.files import sync_path
from slipway.trainer.checkpoint.marker import MARKER
from slipway.trainer.checkpoint.store import REMOVING, Checkpoint, find_damage, list_complete, make_suffix
from slipway.trainer.config.saving import Saving
from slipway.trainer.logs import LOGGER


def keep_best(saving: Saving, latest: Checkpoint) -> None:
    """Remove surplus checkpoints after `latest` was saved; log those that cannot be removed."""
    for checkpoint in find_surplus(list_complete(saving.directory), latest, saving):
        foreign = _find_foreign_file(checkpoint)
        if foreign:
            LOGGER.warning("keeping checkpoint %s: its training did not write %s", checkpoint.path, foreign)
            continue
        hidden = _set_aside(checkpoint.path)
        if hidden and remove([hidden]):
            LOGGER.info("removed checkpoint %s: save_top_k=%d keeps others", checkpoint.path, saving.keep)


def find_surplus(checkpoints: Iterable[Checkpoint], latest: Checkpoint, saving: Saving) -> list[Checkpoint]:
    """Return those of `latest`'s training that are not among the best ``saving.keep``.

    The newest is never surplus, nor is an earlier training's, nor one that was damaged after it was
    complete, which does not count as one of the best either. A checkpoint without the monitored
    value ranks behind those that have it; among equals the later step is better.
    """
    own = [checkpoint for checkpoint in checkpoints if checkpoint.marker.training == latest.marker.training]
    if saving.keep < 0 or len(own) <= saving.keep:
        return []
    sign = 1.0 if saving.mode == "min" else -1.0

    def rank(checkpoint: Checkpoint) -> tuple[bool, float, int, int]:
        value = checkpoint.marker.metrics.get(saving.monitor)
        return (value is None, sign * (value or 0.0), -checkpoint.marker.step, -checkpoint.marker.serial)

    whole = [checkpoint for checkpoint in sorted(own, key=rank) if _is_whole(checkpoint)]
    return [checkpoint for checkpoint in whole[saving.keep :] if checkpoint.path != latest.path]


def remove(hidden: Iterable[Path]) -> bool:
    """Remove hidden directories, log those that cannot be removed, and return whether all are gone."""
    gone = True
    for path in hidden:
        try:
            shutil.rmtree(path)
        except OSError as error:
            LOGGER.warning("cannot remove %s: %s", path, error.strerror or error)
            gone = False
    return gone


def _is_whole(checkpoint: Checkpoint) -> bool:
    try:
        wrong = find_damage(checkpoint)
    except OSError as error:
        wrong = str(error)
    if wrong:
        LOGGER.warning("not counting checkpoint %s: %s", checkpoint.path, wrong)
    return wrong is None


def _set_aside(path: Path) -> Path | None:
    # From here on nothing takes it for a checkpoint, however far the removal gets.
    hidden = path.with_name(f"{REMOVING}{path.name}-{make_suffix()}")
    try:
        path.rename(hidden)
        sync_path(path.parent)
    except OSError as error:
        LOGGER.warning("cannot remove %s: %s", path, error.strerror or error)
        return None
    return hidden


def _find_foreign_file(checkpoint: Checkpoint) -> str | None:
    """Return the name of a file in a checkpoint that its training did not write."""
    for directory, _, names in os.walk(checkpoint.path):
        for name in names:
            relative = str((Path(directory) / name).relative_to(checkpoint.path))
            if relative != MARKER and relative not in checkpoint.marker.files:
                return relative
    return None
