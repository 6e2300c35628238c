"""The newest complete checkpoint of a run, as its trainer marks it: looked at, not loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import shortened
from launcher.monitor.evidence import Saved
from launcher.runs.paths import LaunchPaths, short
from supervisor.checkpoints import LAST, MARKER, TRACKER, UNFINISHED, step_of
from supervisor.files import read_json, read_text, whole


def find_saved(config: Mapping[str, Any], paths: LaunchPaths, engine: str) -> Saved | None:
    """Look at a run's checkpoints; ``None`` where the configuration asks for none."""
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
        return Saved(short(directory), wrong=(getattr(error, "strerror", None) or str(error)).lower())


def _node(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    node = config.get(name)
    return node if isinstance(node, dict) else {}


def _directory(config: Mapping[str, Any], callback: Mapping[str, Any], paths: LaunchPaths) -> Path:
    """Where the trainer saved; the run, and what is below it, may have been moved since."""
    directory = Path(str(callback.get("dirpath") or paths.checkpoints))
    run_dir = Path(str(_node(config, "run").get("results_dir") or paths.run_dir))
    return paths.run_dir / directory.relative_to(run_dir) if directory.is_relative_to(run_dir) else directory


def _megatron(directory: Path) -> Saved:
    """Our trainer's: a marker names the files and their sizes; serials count over all launches."""
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
            return Saved(short(directory), step, path.name, "; ".join(wrong) or None)
        wrong.append(f"{path.name}: {damaged} is missing or has another size than {MARKER} says")
    return Saved(short(directory), wrong="; ".join(wrong) or None)


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


def _nemo(directory: Path) -> Saved:
    """NeMo's: it resumes from the one directory ``*-last``; a sibling ``-unfinished`` says it is torn."""
    names = {path.name for path in directory.iterdir()}
    last = sorted(name for name in names if name.endswith(LAST) and step_of(name) >= 0)
    torn = [name for name in last if f"{name}{UNFINISHED}" in names]
    whole = [(step_of(name), name) for name in last if name not in torn]
    wrong = f"{torn[0]} is unfinished" if torn else None
    if not whole:
        return Saved(short(directory), wrong=wrong)
    step, name = max(whole)
    return Saved(short(directory), step, name, wrong)


def _megatron_lm(directory: Path) -> Saved:
    """Megatron-LM's: a file names the newest iteration that was written completely."""
    text = read_text(directory / TRACKER).strip()
    if not re.fullmatch(r"[0-9]{1,15}", text, re.ASCII):
        return Saved(short(directory), wrong=f"{TRACKER} says {shortened(repr(text))}")
    return Saved(short(directory), int(text), f"iter_{int(text):07d}")
