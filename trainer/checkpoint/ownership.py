"""Whose checkpoints are loaded: the caller's, root's, and those of one owner that is trusted."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

from trainer.errors import UserError

_KEY = "training.resume.trust_owner"


def check(checkpoint: Path, directory: Path | None, trusted: str | None) -> None:
    """Hold the owners of a checkpoint's directory and files against those that are trusted.

    Parameters
    ----------
    checkpoint
        Its directory.
    directory
        Where this training writes; a file there shows as whose this process's files are, which on an NFS
        export that maps users is another number. None if it writes nowhere.
    trusted
        Name or number of one user more.

    Raises
    ------
    UserError
        If any of them is somebody else's.
    """
    own = {os.geteuid(), 0, *_shown_owner(directory)}
    for path in (checkpoint, *sorted(checkpoint.rglob("*"))):
        try:
            owner = path.stat().st_uid
        except FileNotFoundError:
            # A link that leads nowhere.
            continue
        if owner not in own and trusted not in (str(owner), _name(owner)):
            raise UserError(
                f"{path} belongs to {_name(owner)} (user {owner}), neither to you nor to root: a checkpoint "
                f"is loaded only if its owner is trusted. {_KEY}={_name(owner)} trusts that user"
            )


def _shown_owner(directory: Path | None) -> set[int]:
    if directory is None:
        return set()
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return {os.fstat(file.fileno()).st_uid}
    except OSError:
        return set()


def _name(owner: int) -> str:
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)
