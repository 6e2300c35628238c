"""Directories to work in: locked while in use; what a killed process left, the next one removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError, explain_os_error
from launcher.images.locking import NO_LOCKS, is_same

PREFIX = "slipway-image-"
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Work:
    """A directory to work in, and the descriptor that keeps it: programs that write there hold it too."""

    path: Path
    descriptor: int


@contextmanager
def working_in(parent: Path) -> Iterator[Work]:
    """A directory to work in, which goes however the work ends.

    Raises
    ------
    UserError
        If it cannot be made.
    """
    sweep(parent)
    work = _made(parent)
    try:
        yield work
    finally:
        remove_tree(work.path)
        os.close(work.descriptor)


def _made(parent: Path) -> Work:
    while True:
        path = parent / f"{PREFIX}{os.urandom(6).hex()}"
        try:
            path.mkdir(mode=0o700)
            handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise _refused(error, path) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(handle)
                shutil.rmtree(path, ignore_errors=True)
                raise _refused(error, path) from error
            # Where there are no locks nobody sweeps.
        # One that sweeps may have been quicker.
        if is_same(handle, path / _LOCK):
            return Work(path, handle)
        os.close(handle)


def _refused(error: OSError, path: Path) -> UserError:
    told = explain_os_error(error, path, "--temp-dir", verb="work in")
    return UserError(told.message, hint=(told.hint or "").replace("--temp-dir=...", "--temp-dir DIR"))


def sweep(parent: Path) -> None:
    """Remove what killed processes of this user left in a directory."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # someone else's, or gone meanwhile
            if path.lstat().st_uid == os.getuid():
                _sweep_one(path)


def _sweep_one(path: Path) -> None:
    handle = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_tree(path)
    finally:
        os.close(handle)


def remove_tree(path: Path) -> None:
    """Remove a directory, whatever rights an image gives to the directories in it."""
    for root, names, _ in os.walk(path):
        for name in names:
            inner = Path(root, name)
            # A link to a directory is listed too, and that may lie anywhere.
            if not inner.is_symlink():
                with contextlib.suppress(OSError):
                    inner.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)
