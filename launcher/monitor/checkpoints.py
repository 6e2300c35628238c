"""The checkpoints of a run, inspected without loading them: the newest complete one, and damaged ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import shortened
from launcher.jobs.launches import Launch
from launcher.runs.paths import LaunchPaths, short
from supervisor.checkpoints import LAST, MARKER, TRACKER, UNFINISHED, step_of
from supervisor.files import open_regular, read_json, read_text, unix_time, whole


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The checkpoints of a run: the step of the newest complete one, and what is wrong with others."""

    directory: str
    step: int | None = None
    name: str | None = None
    wrong: str | None = None


def find_saved(config: Mapping[str, Any], paths: LaunchPaths, engine: str) -> SavedCheckpoint | None:
    """Return the newest complete checkpoint of a run; ``None`` if its configuration writes none."""
    exp_manager = _node(config, "exp_manager")
    if not exp_manager.get("create_checkpoint_callback", True):
        return None
    directory = _directory(config, _node(exp_manager, "checkpoint_callback_params"), paths)
    find = {"megatron": _megatron, "nemo": _nemo, "megatron_lm": _megatron_lm}.get(engine)
    if find is None:
        return None
    try:
        return find(directory)
    except (OSError, ValueError) as error:
        return SavedCheckpoint(
            short(directory), wrong=(getattr(error, "strerror", None) or str(error)).lower()
        )


def _node(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    node = config.get(name)
    return node if isinstance(node, dict) else {}


def _directory(config: Mapping[str, Any], callback: Mapping[str, Any], paths: LaunchPaths) -> Path:
    """Return the directory of the checkpoints; the run's directory may have been moved since."""
    directory = Path(str(callback.get("dirpath") or paths.checkpoints))
    run_dir = Path(str(_node(config, "run").get("results_dir") or paths.run_dir))
    return paths.run_dir / directory.relative_to(run_dir) if directory.is_relative_to(run_dir) else directory


def _megatron(directory: Path) -> SavedCheckpoint:
    """Inspect our trainer's checkpoints: a marker names the files and their sizes, with a serial number."""
    marked: list[tuple[int, int, Path, dict[str, int]]] = []
    wrong: list[str] = []
    for path in directory.iterdir():
        marker = None if path.is_symlink() or path.name.startswith(".") else _marker(path)
        if marker is not None:
            serial, step = (whole(marker.get(key), 0) or 0 for key in ("serial", "step"))
            marked.append((serial, step, path, dict(_node(marker, "files"))))
    for _, step, path, files in sorted(marked, key=lambda item: item[:2], reverse=True):
        damaged = next((name for name, size in files.items() if _size(path / name) != size), None)
        if damaged is None:
            return SavedCheckpoint(short(directory), step, path.name, "; ".join(wrong) or None)
        wrong.append(f"{path.name}: {damaged} is missing or has another size than {MARKER} says")
    return SavedCheckpoint(short(directory), wrong="; ".join(wrong) or None)


def _marker(checkpoint: Path) -> dict[str, Any] | None:
    try:
        content = read_json(checkpoint / MARKER)
    except (OSError, ValueError):
        return None
    return content if whole(content.get("step"), 0) is not None else None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return None


def _nemo(directory: Path) -> SavedCheckpoint:
    """Inspect NeMo's checkpoints: it resumes from ``*-last``; a sibling ``-unfinished`` marks a torn one."""
    names = {path.name for path in directory.iterdir()}
    last = sorted(name for name in names if name.endswith(LAST) and step_of(name) >= 0)
    torn = [name for name in last if f"{name}{UNFINISHED}" in names]
    whole = [(step_of(name), name) for name in last if name not in torn]
    wrong = f"{torn[0]} is unfinished" if torn else None
    if not whole:
        return SavedCheckpoint(short(directory), wrong=wrong)
    step, name = max(whole)
    return SavedCheckpoint(short(directory), step, name, wrong)


def _megatron_lm(directory: Path) -> SavedCheckpoint:
    """Inspect Megatron-LM's checkpoints: a file names the newest complete iteration."""
    text = read_text(directory / TRACKER).strip()
    if not re.fullmatch(r"[0-9]{1,15}", text, re.ASCII):
        return SavedCheckpoint(short(directory), wrong=f"{TRACKER} says {shortened(repr(text))}")
    return SavedCheckpoint(short(directory), int(text), f"iter_{int(text):07d}")


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
        """Return a sentence for people: the damage, and what the trainer did about it."""
        action = f"set aside as {self.moved_to}" if self.moved_to else "skipped"
        return f"the checkpoint {self.name} was damaged ({self.reason}), and was {action}"

    def to_json(self) -> dict[str, Any]:
        return {"time": self.time, "path": self.path, "reason": self.reason, "moved_to": self.moved_to}


def damaged_checkpoints(launch: Launch) -> list[DamagedCheckpoint]:
    """Return the damaged checkpoints of a launch, oldest first; an empty list if none are on record."""
    try:
        with open_regular(launch.paths.results / FILE_NAME) as stream:
            content = stream.read(_MOST_BYTES)
    except OSError:
        return []
    parsed = map(_parse, content.splitlines())
    return [checkpoint for checkpoint in parsed if checkpoint is not None]


def summary(damaged: Sequence[DamagedCheckpoint]) -> str | None:
    """Return a phrase for a status line; ``None`` if no checkpoint was damaged."""
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
    is_valid = isinstance(path, str) and isinstance(reason, str) and isinstance(moved_to, str | None)
    return DamagedCheckpoint(time, path, reason, moved_to) if is_valid and time is not None else None
