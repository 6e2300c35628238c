"""The checkpoints of a run, inspected without loading them: the newest complete one, and damaged ones."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import shortened
from launcher.jobs.launches import Launch
from launcher.runs.paths import LaunchPaths, display_path
from launcher.runs.trained import checkpoints_of, find_marked_checkpoints, node
from slipway.common.files import open_regular, read_text, unix_time
from slipway.common.node.checkpoints import LAST, MARKER, TRACKER, UNFINISHED, step_of


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The checkpoints of a run: the step of the newest complete one, and the damage of others."""

    directory: str
    step: int | None = None
    name: str | None = None
    wrong: str | None = None


def find_saved(config: Mapping[str, Any], paths: LaunchPaths, engine: str) -> SavedCheckpoint | None:
    """Return the newest complete checkpoint of a run; ``None`` if its configuration writes none."""
    find = {"megatron": _megatron, "nemo": _nemo, "megatron_lm": _megatron_lm}.get(engine)
    if find is None or not node(config, "exp_manager").get("create_checkpoint_callback", True):
        return None
    directory = checkpoints_of(config, paths)
    try:
        return find(directory)
    except (OSError, ValueError) as error:
        wrong = (getattr(error, "strerror", None) or str(error)).lower()
        return SavedCheckpoint(display_path(directory), wrong=wrong)


def _megatron(directory: Path) -> SavedCheckpoint:
    """Inspect our trainer's checkpoints: a marker names the files and their sizes, with a serial number."""
    wrong: list[str] = []
    for saved in reversed(find_marked_checkpoints(directory)):
        name, damage = saved.path.name, saved.damage
        if damage is None:
            return SavedCheckpoint(display_path(directory), saved.step, name, "; ".join(wrong) or None)
        wrong.append(f"{name}: {damage}, by its {MARKER}")
    return SavedCheckpoint(display_path(directory), wrong="; ".join(wrong) or None)


def _nemo(directory: Path) -> SavedCheckpoint:
    """Inspect NeMo's checkpoints: it resumes from ``*-last``; a sibling ``-unfinished`` marks a torn one."""
    names = {path.name for path in directory.iterdir()}
    last = sorted(name for name in names if name.endswith(LAST) and step_of(name) >= 0)
    torn = [name for name in last if f"{name}{UNFINISHED}" in names]
    complete = [(step_of(name), name) for name in last if name not in torn]
    step, name = max(complete, default=(None, None))
    return SavedCheckpoint(display_path(directory), step, name, f"{torn[0]} is unfinished" if torn else None)


def _megatron_lm(directory: Path) -> SavedCheckpoint:
    """Inspect Megatron-LM's checkpoints: a file names the newest complete iteration."""
    text = read_text(directory / TRACKER).strip()
    if not re.fullmatch(r"[0-9]{1,15}", text, re.ASCII):
        return SavedCheckpoint(display_path(directory), wrong=f"{TRACKER} says {shortened(repr(text))}")
    return SavedCheckpoint(display_path(directory), int(text), f"iter_{int(text):07d}")


FILE_NAME = "damaged_checkpoints.jsonl"
# Enough for hundreds of them.
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A damaged checkpoint, as our trainer recorded it; `moved_to` is its new path, if it could be moved."""

    time: float
    path: str
    reason: str
    moved_to: str | None

    @property
    def name(self) -> str:
        return Path(self.path).name

    def line(self) -> str:
        """Return a sentence for people: the damage, and the trainer's response."""
        action = f"set aside as {self.moved_to}" if self.moved_to else "skipped"
        return f"the checkpoint {self.name} was damaged ({self.reason}), and was {action}"


def find_damaged_checkpoints(launch: Launch) -> list[DamagedCheckpoint]:
    """Return the damaged checkpoints of a launch, oldest first; an empty list if none are on record."""
    try:
        with open_regular(launch.paths.results / FILE_NAME) as stream:
            return list(filter(None, map(_parse, stream.read(_MOST_BYTES).splitlines())))
    except OSError:
        return []


def summary(damaged: Sequence[DamagedCheckpoint]) -> str | None:
    """Return a phrase for a status line; ``None`` if no checkpoint was damaged."""
    if not damaged:
        return None
    if len(damaged) == 1:
        return f"the checkpoint {damaged[0].name} was damaged"
    return f"{len(damaged)} checkpoints were damaged, {damaged[-1].name} the last"


def _parse(line: bytes) -> DamagedCheckpoint | None:
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        content = json.loads(line)
        path, reason, moved_to = (content[name] for name in ("path", "reason", "moved_to"))
        time, are_texts = unix_time(content["time"]), isinstance(path, str) and isinstance(reason, str)
        if time is not None and are_texts and isinstance(moved_to, str | None):
            return DamagedCheckpoint(time, path, reason, moved_to)
    return None
