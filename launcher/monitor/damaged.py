"""The damaged checkpoints that a launch came across, as our trainer tells of them beside its metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.jobs.launches import Launch
from supervisor.files import open_regular, unix_time

FILE_NAME = "damaged_checkpoints.jsonl"
# Hundreds of them; more would tell nobody more.
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A checkpoint that is not what was written; `moved_to` is where it is now, if it could be moved."""

    time: float
    path: str
    reason: str
    moved_to: str | None

    @property
    def name(self) -> str:
        return Path(self.path).name

    def line(self) -> str:
        """What became of it, for people."""
        where = f"set aside as {self.moved_to}" if self.moved_to else "passed over"
        return f"the checkpoint {self.name} was damaged ({self.reason}), and was {where}"

    def to_json(self) -> dict[str, Any]:
        return {"time": self.time, "path": self.path, "reason": self.reason, "moved_to": self.moved_to}


def damaged_checkpoints(launch: Launch) -> list[DamagedCheckpoint]:
    """Return those of a launch, oldest first; none where nothing can be read."""
    try:
        with open_regular(launch.paths.results / FILE_NAME) as stream:
            content = stream.read(_MOST_BYTES)
    except OSError:
        return []
    return [found for line in content.splitlines() if (found := _parse(line)) is not None]


def summary(damaged: Sequence[DamagedCheckpoint]) -> str | None:
    """Return what a status line has room for; None if there are none."""
    if not damaged:
        return None
    if len(damaged) == 1:
        return f"the checkpoint {damaged[0].name} was damaged"
    return f"{len(damaged)} checkpoints were damaged, {damaged[-1].name} the last"


def _parse(line: bytes) -> DamagedCheckpoint | None:
    try:
        content = json.loads(line)
        path, reason, moved_to = (content[name] for name in ("path", "reason", "moved_to"))
        time = unix_time(content["time"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_told = isinstance(path, str) and isinstance(reason, str) and isinstance(moved_to, str | None)
    return DamagedCheckpoint(time, path, reason, moved_to) if is_told and time is not None else None
