"""The newest complete checkpoint of a run, as its trainer marks it: looked at, not loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.monitor.evidence import Saved
from launcher.runs.paths import LaunchPaths, short

_MARKER = "complete.json"
_NEMO_LAST = "-last"
_NEMO_UNFINISHED = "-unfinished"
_STEP = re.compile(r"step=(\d+)")


def find_saved(config: Mapping[str, Any], paths: LaunchPaths, engine: str) -> Saved | None:
    """Look at a run's checkpoints; ``None`` where the configuration asks for none."""
    exp_manager = config.get("exp_manager") or {}
    if not exp_manager.get("create_checkpoint_callback", True):
        return None
    directory = _directory(config, exp_manager.get("checkpoint_callback_params") or {}, paths)
    find = {"megatron": _megatron, "nemo": _nemo, "megatron_lm": _megatron_lm}[engine]
    try:
        return find(directory)
    except OSError as error:
        return Saved(short(directory), wrong=(error.strerror or str(error)).lower())


def _directory(config: Mapping[str, Any], callback: Mapping[str, Any], paths: LaunchPaths) -> Path:
    """Where the trainer saved; the run, and what is below it, may have been moved since."""
    directory = Path(str(callback.get("dirpath") or paths.checkpoints))
    run_dir = Path(str((config.get("run") or {}).get("results_dir") or paths.run_dir))
    return paths.run_dir / directory.relative_to(run_dir) if directory.is_relative_to(run_dir) else directory


def _megatron(directory: Path) -> Saved:
    """Our trainer's: a marker names the files and their sizes; serials count over all launches."""
    marked: list[tuple[int, int, Path, dict[str, int]]] = []
    wrong: list[str] = []
    for path in directory.iterdir():
        marker = None if path.is_symlink() or path.name.startswith(".") else _marker(path)
        if marker is not None:
            marked.append((marker.get("serial", 0), marker["step"], path, marker.get("files", {})))
    for _, step, path, files in sorted(marked, key=lambda item: item[:2], reverse=True):
        damaged = next((name for name, size in files.items() if _size(path / name) != size), None)
        if damaged is None:
            return Saved(short(directory), step, path.name, "; ".join(wrong) or None)
        wrong.append(f"{path.name}: {damaged} is missing or has another size than {_MARKER} says")
    return Saved(short(directory), wrong="; ".join(wrong) or None)


def _marker(checkpoint: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((checkpoint / _MARKER).read_text(encoding="utf-8"))
        return content if isinstance(content["step"], int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _nemo(directory: Path) -> Saved:
    """NeMo's: it resumes from the one directory ``*-last``; a sibling ``-unfinished`` says it is torn."""
    names = {path.name for path in directory.iterdir()}
    last = sorted(name for name in names if name.endswith(_NEMO_LAST) and _STEP.search(name))
    torn = [name for name in last if f"{name}{_NEMO_UNFINISHED}" in names]
    whole = [(int(found[1]), name) for name in last if name not in torn and (found := _STEP.search(name))]
    wrong = f"{torn[0]} is unfinished" if torn else None
    if not whole:
        return Saved(short(directory), wrong=wrong)
    step, name = max(whole)
    return Saved(short(directory), step, name, wrong)


def _megatron_lm(directory: Path) -> Saved:
    """Megatron-LM's: a file names the newest iteration that was written completely."""
    text = (directory / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
    if not text.isdigit():
        return Saved(short(directory), wrong=f"latest_checkpointed_iteration.txt says {text!r}")
    return Saved(short(directory), int(text), f"iter_{int(text):07d}")
