"""What is known of the files and directories that a job uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Lack(NamedTuple):
    """A file or directory that the job may not find, or not as it needs it.

    `key` is where the configuration names it, and `path` how. `certain` is whether this machine can tell: it
    has the directory, or the job runs on it.
    """

    key: str
    path: str
    why: str
    certain: bool
    fix: str | None = None


class LocalPath(NamedTuple):
    """A path on a file system of this machine's own, such as ``ext4`` mounted at ``/``."""

    key: str
    path: str
    kind: str
    mount: str


class LocalPaths(NamedTuple):
    """What lies on file systems of this machine alone: the directory of the run, and what the job reads."""

    results: tuple[LocalPath, ...]
    inputs: tuple[LocalPath, ...]


@dataclass(frozen=True, slots=True)
class PathFacts:
    """Read on this machine.

    A part is ``None`` where the job needs no such thing, and where it is not known: `missing` says why.

    Attributes
    ----------
    tokenizer, data, checkpoint, image, mounts, script
        What is not there, or not what it should be.
    fetched
        The image of a registry that many nodes would fetch at once.
    results
        Why nothing can be written into the directory of the run, if so.
    local
        What lies on file systems of this machine alone; empty where the nodes are this machine.
    free_bytes
        What the user may still write where the run's checkpoints go, by the file system and by the user's
        quota there.
    free_by
        Which of the two it is that ends there: ``file system`` or ``quota``.
    checkpoints_there
        How many checkpoints the run has already.
    missing
        By part, why it could not be found out.
    """

    tokenizer: tuple[Lack, ...] | None = None
    data: tuple[Lack, ...] | None = None
    checkpoint: tuple[Lack, ...] | None = None
    image: tuple[Lack, ...] | None = None
    fetched: tuple[Lack, ...] | None = None
    script: tuple[Lack, ...] | None = None
    mounts: tuple[Lack, ...] | None = None
    results: tuple[Lack, ...] | None = None
    local: LocalPaths | None = None
    free_bytes: int | None = None
    free_by: str = "file system"
    checkpoints_there: int | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
