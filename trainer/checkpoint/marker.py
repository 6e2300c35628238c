"""``complete.json``: what a complete checkpoint says of itself. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainer.checkpoint.files import write_synced

MARKER = "complete.json"


@dataclass(frozen=True)
class Marker:
    """The marker of a checkpoint.

    Attributes
    ----------
    step, consumed_samples
        How far the training had come.
    world_size, tensor_model_parallel_size, pipeline_model_parallel_size
        The processes that wrote it, ...
    virtual_pipeline_model_parallel_size, context_parallel_size
        ... and the other ways in which they shared the model; 0 where the first version did not tell.
    architecture
        The sizes its weights have.
    metrics
        What was known of the training then, by the names that ``monitor`` may have.
    training
        Names the training over all of its launches; one that starts from step 0 in the same directory has
        another, and so has one that goes back to an earlier checkpoint.
    resume
        The ``resume`` node with which it was trained: the intervention that it comes after.
    serial
        Counts the checkpoints of a directory upwards.
    files
        Its other files, and their sizes in bytes.
    data
        The identity of the data that it was trained on (:mod:`trainer.data.identity`).
    """

    step: int
    consumed_samples: int
    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    architecture: dict[str, Any]
    virtual_pipeline_model_parallel_size: int = 0
    context_parallel_size: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    training: str = ""
    resume: dict[str, Any] = field(default_factory=dict)
    serial: int = 0
    files: dict[str, int] = field(default_factory=dict)
    data: list[dict[str, Any]] = field(default_factory=list)

    def write(self, checkpoint: Path) -> None:
        """Write the marker into a checkpoint's directory and have it on disk."""
        write_synced(checkpoint / MARKER, json.dumps(asdict(self), indent=1) + "\n")


def read_marker(checkpoint: Path) -> Marker | None:
    """Return the marker of a checkpoint's directory, or None if it is missing or unreadable."""
    try:
        content = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        # A later version's marker may say more.
        return Marker(**{name: content[name] for name in _NAMES if name in content})
    except (OSError, ValueError, TypeError):
        return None


_NAMES = tuple(item.name for item in fields(Marker))
