"""The directory of checkpoints: what is complete, what is not, which is the newest. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MARKER = "complete.json"
LATEST = "latest"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Marker:
    """What a complete checkpoint says of itself; `architecture` holds the sizes its weights have."""

    step: int
    consumed_samples: int
    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    architecture: dict[str, Any]


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    path: Path
    marker: Marker


def newest(directory: Path) -> tuple[Found | None, list[Path]]:
    """Return the complete checkpoint with the highest step, and the directories that are not complete."""
    best: Found | None = None
    torn: list[Path] = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.is_symlink() or not path.is_dir():
            continue
        marker = None if path.name.startswith(_UNFINISHED) else _read_marker(path)
        if marker is None:
            torn.append(path)
        elif best is None or marker.step >= best.marker.step:
            best = Found(path, marker)
    return best, torn


def begin(directory: Path, name: str) -> Path:
    """Create and return the hidden directory in which a checkpoint is written."""
    path = directory / f"{_UNFINISHED}{name}"
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def finish(unfinished: Path, marker: Marker) -> Path:
    """Mark a written checkpoint as complete, give it its name and point ``latest`` at it.

    The marker is on disk before the name is: whoever sees the name sees a complete checkpoint.
    """
    for part in unfinished.iterdir():
        _sync(part)
    _write_synced(unfinished / MARKER, json.dumps(asdict(marker), indent=1) + "\n")
    _sync(unfinished)
    path = _free_name(unfinished.parent / unfinished.name.removeprefix(_UNFINISHED))
    unfinished.rename(path)
    _point_latest(path)
    _sync(path.parent)
    return path


def _free_name(path: Path) -> Path:
    # Lightning's way out when a name is taken; evidence is never overwritten.
    candidate, version = path, 1
    while candidate.exists():
        candidate, version = path.with_name(f"{path.name}-v{version}"), version + 1
    return candidate


def _point_latest(path: Path) -> None:
    fresh = path.parent / f".{LATEST}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(path.name)
    fresh.replace(path.parent / LATEST)


def _read_marker(path: Path) -> Marker | None:
    try:
        return Marker(**json.loads((path / MARKER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
