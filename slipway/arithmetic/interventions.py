"""The changes that a training was continued with, as its checkpoints record them, compared with those of now.

The order of the samples is arithmetic on the changes of now: what they say of the samples that a checkpoint
was trained on has to be what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# What a training does without an intervention. Markers of earlier versions omit some.
DEFAULTS: Mapping[str, Any] = {
    "checkpoint": None,
    "load_optimizer": True,
    "lr_scale": 1.0,
    "lr_freeze_steps": 0,
    "data_generation": 0,
    "skip_samples": [],
    "data_weights": [],
}


def was_made(changes: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint was trained with these changes; `recorded` is its marker's ``resume``."""
    return {**DEFAULTS, **changes} == {**DEFAULTS, **recorded}


def find_rewritten(changes: Mapping[str, Any], recorded: Mapping[str, Any], consumed: int) -> str | None:
    """Return the first key that contradicts what a checkpoint was trained on; None if none does.

    Parameters
    ----------
    changes, recorded
        The node ``resume`` of now, and the one in the marker.
    consumed
        The samples of the run before the checkpoint.
    """
    before, now = {**DEFAULTS, **recorded}, {**DEFAULTS, **changes}
    return next(
        (key for key, cut in _PAST.items() if cut(before[key], consumed) != cut(now[key], consumed)), None
    )


def _cut_ranges(ranges: Any, consumed: int) -> list[Any]:
    return [[first, min(end, consumed)] for first, end in ranges if first < consumed]


def _cut_weights(changes: Any, consumed: int) -> list[Any]:
    """Return the changes before a sample; data sets that were added since had the weight 0."""
    return [
        [first, [weight for at, weight in enumerate(weights) if any(weights[at:])]]
        for first, weights in changes
        if first < consumed
    ]


_PAST: Mapping[str, Callable[[Any, int], list[Any]]] = {
    "skip_samples": _cut_ranges,
    "data_weights": _cut_weights,
}
