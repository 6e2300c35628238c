"""Where the caches of a user lie: on this machine's own disk, in a directory that nobody else can write.

``$SLIPWAY_CACHE_DIR``, else ``/var/tmp/slipway-<uid>``. Not the home: that is often on the network, where a
database's locks are slow or do not work.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

VARIABLE = "SLIPWAY_CACHE_DIR"
_SHARED = Path("/var/tmp")


class NotTrusted(Exception):
    """The place of the cache is somebody else's, or open to others; the message says what to do."""


def cache_directory() -> Path:
    """The directory, made where it is missing.

    Raises
    ------
    NotTrusted
        If it is not ours alone: what lies there may have been put there by others.
    OSError
        If it cannot be made.
    """
    given = os.environ.get(VARIABLE)
    if given:
        # The user's own choice, so links in it are followed.
        directory = Path(given).expanduser().absolute()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = directory.resolve()
    else:
        directory = _SHARED / f"slipway-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    _check(directory)
    return directory


def _check(directory: Path) -> None:
    """Look without following a link: everybody may put one into /var/tmp."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotTrusted(_told(directory, "is not a directory"))
    if found.st_uid != os.geteuid():
        raise NotTrusted(_told(directory, "belongs to somebody else"))
    if found.st_mode & 0o022:
        raise NotTrusted(_told(directory, "can be written by others"))


def _told(directory: Path, what: str) -> str:
    return f"{directory} {what}, so runs are not remembered there: {VARIABLE} names another directory"
