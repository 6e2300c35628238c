"""The checkpoint that a training is to go on from: looked for, and not loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launcher.checks.facts import Lack
from launcher.checks.gathering.path_resolver import Ground, is_there, opened
from launcher.errors import did_you_mean, nearest, nearest_files
from launcher.estimates.values import Values
from supervisor.checkpoints import MARKER, TRACKER
from supervisor.files import read_text

_NAMED = "resume.checkpoint"
_DIRECTORY = "exp_manager.checkpoint_callback_params.dirpath"
# NeMo's, of which each names one checkpoint; the two at the root are beside the nodes of its T5 files.
_OF_NEMO = (
    "model.resume_from_checkpoint",
    "model.restore_from_path",
    "exp_manager.resume_from_checkpoint",
    "restore_from_path",
)
# A checkpoint of NeMo's older format has a directory for each rank, which the key does not name.
_RANKS = ("mp_rank_00", "tp_rank_00_pp_rank_000")
# What a marker of our trainer is at most: one of thousands of ranks lists as many files.
_LARGEST_MARKER = 64 << 20
# How the trainer fills in what a marker of an earlier version does not tell.
_RESUME = {"checkpoint": None, "load_optimizer": True, "lr_scale": 1.0, "data_generation": 0}


class Marked(NamedTuple):
    """A complete checkpoint of our trainer's, and what its marker says."""

    path: Path
    content: dict[str, Any]


def checkpoint_directory(ground: Ground) -> Path | None:
    """Where a training saves, as this machine has it; ``None`` if that is in the container's image."""
    given = ground.plan.job.chain.checkpoints
    return ground.host(given) if given is not None else ground.plan.paths.checkpoints


def marked_checkpoints(directory: Path) -> list[Marked]:
    """The complete checkpoints of our trainer's in a directory, the newest last."""
    try:
        paths = [path for path in directory.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
    read = ((path, _marker(path)) for path in paths if not path.is_symlink())
    found = [Marked(path, content) for path, content in read if content is not None]
    whole = [one for one in found if _damage(one) is None]
    return sorted(whole, key=lambda one: (_whole(one.content, "serial"), _whole(one.content, "step")))


def chosen_checkpoint(ground: Ground) -> Marked | None:
    """The checkpoint that our trainer would go on from: the newest, or the one that is named until it was."""
    values, directory = Values(ground.plan.job.config or {}), checkpoint_directory(ground)
    known = marked_checkpoints(directory) if directory is not None else []
    newest, given = known[-1] if known else None, values.raw(_NAMED)
    if not isinstance(given, str) or (newest and _was_made(values.node("resume") or {}, newest.content)):
        return newest
    path = ground.host(given) if "/" in given else directory / given if directory is not None else None
    content = _marker(path) if path is not None else None
    return Marked(path, content) if path is not None and content is not None else None


def lost_checkpoint(ground: Ground) -> tuple[Lack, ...] | None:
    """What is wrong with the checkpoint that a training is to go on from; ``None`` if it is no training."""
    config = ground.plan.job.config
    if config is None or ground.plan.job.stage != "training":
        return None
    values = Values(config)
    looked = [*_named(ground, values), *_of_nemo(ground, values), *_newest(ground, values)]
    return tuple(lack for lack in looked if lack is not None)


def _named(ground: Ground, values: Values) -> Iterator[Lack | None]:
    """Our trainer's `resume.checkpoint`: a name in the run's directory of checkpoints, or a whole path."""
    given, directory = values.raw(_NAMED), checkpoint_directory(ground)
    if not isinstance(given, str) or ground.plan.job.engine != "megatron":
        return
    if "/" in given:
        path = ground.input(_NAMED, given, f"training.{_NAMED}={Path(given).absolute()}")
    else:
        path = directory / given if directory is not None else None
    if not isinstance(path, Path):
        yield path
        return
    known = marked_checkpoints(directory) if directory is not None else []
    if known and _was_made(values.node("resume") or {}, known[-1].content):
        return  # the newest checkpoint comes after it: the named one may be gone by now
    why = _why_lost(path)
    names = [one.path.name for one in reversed(known)]
    yield _lack(ground, _NAMED, given, path, why, _near(path, names, directory)) if why else None


def _was_made(resume: Mapping[str, Any], marker: Mapping[str, Any]) -> bool:
    recorded = marker.get("resume")
    given = {name: value for name, value in resume.items() if name in _RESUME}
    return isinstance(recorded, dict) and {**_RESUME, **given} == {**_RESUME, **recorded}


def _near(path: Path, names: list[str], directory: Path | None) -> str:
    if not names:
        return f"there is no complete checkpoint in {directory}; null goes on from the newest, or starts"
    listed = f"complete ones in {directory}, the newest first: {', '.join(names[:5])}"
    if len(names) > 5:
        listed += f" and {len(names) - 5} more"
    return f"{did_you_mean(path.name, names)}\n{listed}" if nearest(path.name, names) else listed


def _why_lost(path: Path) -> str | None:
    """Why there is no complete checkpoint of our trainer's at a path."""
    if not is_there(path):
        return "there is no such checkpoint"
    content = _marker(path)
    if content is None:
        return f"not a complete checkpoint: no {MARKER} in it that can be read"
    damaged = _damage(Marked(path, content))
    return f"not a complete checkpoint: {damaged}" if damaged is not None else None


def _of_nemo(ground: Ground, values: Values) -> Iterator[Lack | None]:
    if ground.plan.job.engine != "nemo":
        return
    for key in _OF_NEMO:
        given = values.raw(key)
        if not isinstance(given, str) or not given.strip() or "://" in given:
            continue
        path = ground.input(key, given, f"by its whole path: {Path(given).absolute()}")
        if not isinstance(path, Path):
            yield path
        elif any(map(is_there, (path, *(path.parent / rank / path.name for rank in _RANKS)))):
            yield None
        else:
            yield _lack(ground, key, given, path, "there is no such checkpoint", nearest_files(path))


def _newest(ground: Ground, values: Values) -> Iterator[Lack | None]:
    """The directory that has to hold a checkpoint, and the one that Megatron-LM's record names."""
    directory = checkpoint_directory(ground)
    if directory is None or not values.flag("exp_manager.resume_if_exists"):
        return
    given = str(values.raw(_DIRECTORY))
    if ground.plan.job.engine == "megatron_lm" and (why := _why_not_newest(directory)) is not None:
        yield _lack(ground, _DIRECTORY, given, directory, why, nearest_files(directory / "iter_", ""))
    elif values.raw("exp_manager.resume_ignore_no_checkpoint") is False:
        key = "training.exp_manager.resume_ignore_no_checkpoint"
        if _holds_any(directory, ground.plan.job.engine):
            return
        why = f"there is no complete checkpoint in it, and {key}=False asks for one"
        yield _lack(ground, _DIRECTORY, given, directory, why, f"{key}=True starts from step 0")


def _why_not_newest(directory: Path) -> str | None:
    """Why Megatron-LM would not find the iteration that its record names; no record is a fresh start."""
    try:
        text = read_text(directory / TRACKER, errors="replace").strip()
    except OSError:
        return None
    name = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 12 else text
    if name == "release" or (text.isdecimal() and is_there(directory / name)):
        return None
    return f"its {TRACKER} says {text[:40]!r}, and there is no {name[:40]}"


def _holds_any(directory: Path, engine: str) -> bool:
    if engine == "megatron":
        return bool(marked_checkpoints(directory))
    if engine == "megatron_lm":
        return is_there(directory / TRACKER)
    return has_entries(directory)


def has_entries(directory: Path) -> bool:
    """Whether something is saved in a directory; where it may not be looked into, that may be."""
    try:
        return any(not entry.name.startswith(".") for entry in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _lack(ground: Ground, key: str, given: str, path: Path, why: str, fix: str) -> Lack:
    # The launcher itself writes the run's directory: what is not in it now is nowhere.
    certain = path.is_relative_to(ground.plan.paths.run_dir) or ground.tells_of(path)
    return ground.lost(key, given, why, certain=certain, fix=fix)


def _marker(checkpoint: Path) -> dict[str, Any] | None:
    try:
        with opened(checkpoint / MARKER) as stream:
            content = json.loads(stream.read(_LARGEST_MARKER))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("step"), int) else None


def _damage(found: Marked) -> str | None:
    """What is wrong with the files that a marker lists by name and size."""
    files = found.content.get("files")
    for name, size in files.items() if isinstance(files, dict) else ():
        try:
            there = (found.path / name).stat().st_size
        except (OSError, ValueError):
            return f"{name} is missing"
        if isinstance(size, int) and there != size:
            return f"{name} has {there:,} bytes of {size:,}"
    return None


def _whole(content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    return value if isinstance(value, int) else 0
