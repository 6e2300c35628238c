"""Removal of a run's checkpoints, or of the run: what may go, and a removal that survives a crash."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.errors import UserError, escape
from launcher.jobs.locator import RunLocator
from launcher.jobs.lookup import RunRef
from launcher.jobs.status import current_statuses, poll
from launcher.runs.paths import CHECKPOINTS, display_path
from launcher.runs.trained import TRAINING, find_marked_checkpoints, newest_training
from launcher.runs.trust import is_own
from slipway.common.files import sync_path
from slipway.common.node.checkpoints import progress, step_of

# Our trainer ignores such names, and removes them.
_REMOVING = ".removing-"


class Checkpoint(NamedTuple):
    """A checkpoint, its size in bytes, and why it stays; ``None`` if it may go."""

    path: Path
    step: int
    size: int
    stays: str | None


def require_idle(run_dir: Path) -> None:
    """Raise UserError for another user's run, one behind a link, or one whose jobs may live."""
    name = escape(display_path(run_dir))
    if run_dir.is_symlink() or not is_own(run_dir):
        what = "a link to a run" if run_dir.is_symlink() else "another user's run"
        raise UserError(f"{name}: {what}, which is left alone")
    live = next((item for item in current_statuses([RunRef(run_dir)]) if item.may_live), None)
    if live is not None:
        hint = f"end it first: slipway cancel {name} --wait"
        raise UserError(f"{name}: job {live.job_id} is {live.state.value}", hint=hint)


def checkpoints(run_dir: Path, stays: Callable[[int, int], str | None]) -> list[Checkpoint]:
    """Return the checkpoints of a run's training, the newest first, each with the reason for which it stays.

    `stays` is asked with the step of each and its place among the undamaged ones. The newest stays, a damaged
    one, and one that a link, another training or a job under way names. Raise UserError for checkpoints
    outside of the run.
    """
    training = newest_training(run_dir)
    if training is None or not training.checkpoints.is_dir():
        return []
    directory, engine = training.checkpoints, training.manifest.engine
    if not directory.resolve().is_relative_to(run_dir.resolve()):
        raise UserError(escape(f"{directory}: it leads out of the run, and is left alone"))
    entries = [path for path in directory.iterdir() if not path.name.startswith(".")]
    used = {path.resolve().name: f"{path.name} leads to it" for path in entries if path.is_symlink()}
    for user, overrides in users_of(run_dir):
        names = re.findall(rf"{re.escape(directory.name)}/([^/'\",\]]+)", " ".join(overrides))
        names += re.findall(r"\d+", " ".join(text for text in overrides if ".step=" in text))
        used |= dict.fromkeys(names, f"{user} uses it")
    marked = {item.path: item.damage for item in find_marked_checkpoints(directory)}
    whole = [path for path in entries if not path.is_symlink() and (engine != "megatron" or path in marked)]
    newest, place, found = progress(str(directory), engine), 0, []
    for step, path in sorted(((_step(path), path) for path in whole), reverse=True):
        why = f"damaged: {marked[path]}" if marked.get(path) else None
        if why is None and step >= 0:
            is_newest = place == 0 or (newest is not None and step == newest.step)
            why = "the newest" if is_newest else used.get(path.name, used.get(str(step)))
            why = stays(step, place) if why is None else why
            place += 1
        if step >= 0:
            found.append(Checkpoint(path, step, size_of(path), why))
    return found


def _step(path: Path) -> int:
    iteration = re.fullmatch(r"iter_(\d{1,15})", path.name, re.ASCII)  # Megatron-LM's
    return int(iteration[1]) if iteration else step_of(str(path))


def users_of(run_dir: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the launches of other runs that name files of a run in their overrides, with these.

    Those are trainings, and other jobs that may live.
    """
    tree, name = re.escape(run_dir.parent.name), re.escape(run_dir.name)
    path = re.compile(rf"\b{tree}/{name}(?![\w.-])|(^|[/='\"\[,]){name}/{CHECKPOINTS}\b")
    for launch in RunLocator(run_dir.parent).launches():
        manifest = launch.manifest
        if launch.paths.run_dir == run_dir or not any(map(path.search, manifest.overrides)):
            continue
        if manifest.stage == TRAINING or poll([launch])[0].may_live:
            yield f"launch {launch.paths.number} of {manifest.run}", manifest.overrides


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory; links are not followed."""
    files = (f"{directory}/{name}" for directory, _, names in os.walk(path) for name in names)
    return path.lstat().st_size + sum(os.lstat(file).st_size for file in files)


def remove(path: Path) -> None:
    """Remove a checkpoint, or a run: renamed first, so that a partial one is never used.

    Remains of an interrupted removal go too.
    """
    grave = Path(tempfile.mkdtemp(prefix=_REMOVING, dir=path.parent))
    path.rename(grave / path.name)
    sync_path(path.parent)
    for left in filter(is_own, path.parent.glob(f"{_REMOVING}*")):
        shutil.rmtree(left)


def archive(run_dir: Path, directory: Path) -> Path:
    """Pack a run into ``RUN.tar`` of a directory, which holds it whole or not at all; return its path."""
    path = directory.absolute() / f"{run_dir.name}.tar"
    if path.exists() or path.resolve().is_relative_to(run_dir.resolve()):
        raise UserError(f"{escape(str(path))}: it exists, or lies in the run itself")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}-", dir=path.parent) as file:
        with tarfile.open(fileobj=file, mode="w") as packed:
            packed.add(run_dir, run_dir.name)
        file.flush()
        os.fsync(file.fileno())
        os.link(file.name, path)
    path.chmod(run_dir.stat().st_mode & 0o666)
    sync_path(path.parent)
    return path
