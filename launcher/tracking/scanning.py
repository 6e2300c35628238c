"""Runs below directories, found by walking: bounded, and passing over what is not ours to read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from launcher.errors import UserError
from launcher.runs.index import Entry, entry_of
from launcher.runs.manifest import read_manifest
from launcher.runs.paths import LAUNCHES, launch_numbers
from supervisor.marks import job_of

_DEPTH = 4  # directories below a tree in which a run may lie
# More than that in one directory are data, and not runs.
_MOST_ENTRIES = 20_000
_MOST_DIRECTORIES = 20_000  # of one walk, so that a tree at the top of a file system does not take for ever

_Identity = tuple[int, int]


def is_run(directory: Path) -> bool:
    """Whether a directory is one of a run; also not if it may not be looked into."""
    try:
        return (directory / LAUNCHES).is_dir()
    except OSError:
        return False


def runs_below(trees: Iterable[Path]) -> Iterator[Path]:
    """The directories of the runs below some trees, each once, those nearer to the top coming first.

    A run's own directory is not walked, nor are hidden ones. Links are followed, not in circles: what is met
    by its own name first is not told again by a link to it.
    """
    seen: set[_Identity] = set()
    waiting = deque((tree, 0) for tree in trees)
    for _ in range(_MOST_DIRECTORIES):
        if not waiting:
            return
        directory, depth = waiting.popleft()
        identity = _identity(directory)
        if identity is None or identity in seen:
            continue
        seen.add(identity)
        if is_run(directory):
            yield directory
        elif depth < _DEPTH:
            waiting.extend((path, depth + 1) for path in _directories(directory))


def entries_of(run_dir: Path, newest: int | None = None) -> list[Entry]:
    """The launches of a run as their manifests tell them, oldest first; broken ones are left out.

    Parameters
    ----------
    newest
        Only so many of the newest.
    """
    try:
        numbers = launch_numbers(run_dir)
    except OSError:
        return []
    found = (_entry(run_dir, number) for number in (numbers if newest is None else numbers[-newest:]))
    return [entry for entry in found if entry is not None]


def _entry(run_dir: Path, number: int) -> Entry | None:
    directory = run_dir / LAUNCHES / str(number)
    try:
        manifest = read_manifest(directory)
    except UserError:
        return None
    job_id = manifest.job_id
    if job_id is None and (claimed := job_of(directory)):
        job_id = manifest.id_in(claimed)
    return entry_of(run_dir, number, manifest, job_id)


def _identity(path: Path) -> _Identity | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _directories(directory: Path) -> list[Path]:
    """What may be or hold runs, real directories before links to some."""
    found: list[tuple[bool, str]] = []
    try:
        with os.scandir(directory) as entries:
            for count, entry in enumerate(entries):
                if count >= _MOST_ENTRIES:
                    return []
                if not entry.name.startswith(".") and _is_directory(entry):
                    found.append((entry.is_symlink(), entry.name))
    except OSError:
        return []
    return [directory / name for _, name in sorted(found)]


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
