"""The identity of the files that a training reads, as far as this machine sees them.

What an identity is, the trainer defines (`trainer/data/identity.py`); it is asked in a process of its own, as
the launcher imports nothing of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher.checks.gathering.data_sets import data_sets
from launcher.checks.gathering.path_resolver import Ground
from launcher.checks.gathering.tokenizers import tokenizer_files
from launcher.drafting import Draft

_HOME = Path(__file__).resolve().parents[2]
_PATIENCE_SECONDS = 120
_SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True, slots=True)
class DataAnswer:
    """What the trainer's program says.

    Attributes
    ----------
    identity
        The files, as JSON keeps them.
    changed
        Those that are not what an earlier identity says, each as old → new.
    accept
        The value of `training.resume.accept_data` that accepts them.
    """

    identity: list[dict[str, Any]]
    changed: tuple[str, ...]
    accept: str | None


_NOTHING = DataAnswer([], (), None)


def data_identity(made: Draft) -> list[dict[str, Any]]:
    """The identity of a training's data, for the record; empty where it is not known."""
    if made.plan.job.stage != "training":
        return []
    answer = ask_identity(made, [])
    return answer.identity if answer is not None else []


def ask_identity(made: Draft, earlier: Sequence[object]) -> DataAnswer | None:
    """Compare a training's data with an earlier identity; ``None`` if the program does not answer."""
    wanted = list(_wanted(Ground(made)))
    if not wanted:
        return _NOTHING
    state = tuple(_state(item["path"]) for item in wanted)
    return _ask(json.dumps({"wanted": wanted, "earlier": list(earlier)}), state)


# A launch asks twice, for the checks and for the record; the points of a sweep read the same files.
@lru_cache(maxsize=16)
def _ask(question: str, state: tuple[object, ...]) -> DataAnswer | None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainer.data.identity"],
            input=question,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            cwd=_HOME,
        )
        answer = json.loads(done.stdout)
        return DataAnswer(answer["identity"], tuple(answer["changed"]), answer["accept"])
    except (OSError, ValueError, TypeError, KeyError, subprocess.SubprocessError):
        return None


def _wanted(ground: Ground) -> Iterator[dict[str, str]]:
    """The files, less those that a stage before this one is going to write."""
    for key, given in data_sets(ground):
        prefix, path = Path(given.strip()), _here(ground, key, given.strip())
        for suffix in _SUFFIXES if path is not None else ():
            yield _file("data", "model.data.data_prefix", f"{prefix}{suffix}", f"{path}{suffix}")
    for key, given in tokenizer_files(ground):
        path = _here(ground, key, given)
        if path is not None:
            yield _file("tokenizer", key, str(Path(given)), str(path))


def _here(ground: Ground, key: str, given: str) -> Path | None:
    path = ground.input(key, given, "")
    return path if isinstance(path, Path) else None


def _file(kind: str, key: str, name: str, path: str) -> dict[str, str]:
    """A file as the program is asked for it; `name` is its path in the job, `path` that on this machine."""
    return {"kind": kind, "key": key, "name": name, "path": path}


def _state(path: str) -> tuple[int, ...] | None:
    """What tells that a file was not written to meanwhile."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
