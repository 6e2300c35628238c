"""The directories with runs (trees) that this user has seen: a cache for look-ups by name or by a job's id.

Nothing that happens to the cache is an error: it may be deleted, broken, or on a full disk. It lies on this
machine's own disk, in a directory that only the user can write: ``$SLIPWAY_CACHE_DIR``, else
``/var/tmp/slipway-<uid>``. The home is often on the network, and slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from slipway.common.files import write_atomic

CACHE_VARIABLE = "SLIPWAY_CACHE_DIR"
# Each line is a path as JSON, the tree that was seen first in the first one.
FILE_NAME = "trees"
_SHARED = Path("/var/tmp")


class NotTrusted(Exception):
    """The cache's directory belongs to somebody else, or is open to others; the message says what to do."""


def cache_directory() -> Path:
    """Return the directory of the cache; create it if it is missing.

    Raise `NotTrusted` if others can write it, as they may have put anything there; OSError if it cannot be
    created.
    """
    path = os.environ.get(CACHE_VARIABLE)
    if path:
        # The user's own choice, so links in it are followed.
        directory = Path(path).expanduser().absolute()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = directory.resolve()
    else:
        directory = _SHARED / f"slipway-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    status = directory.lstat()  # no link is followed, which others may have made
    for is_wrong, why in (
        (not stat.S_ISDIR(status.st_mode), "is not a directory"),
        (status.st_uid != os.geteuid(), "belongs to somebody else"),
        (status.st_mode & 0o022, "can be written by others"),
    ):
        if is_wrong:
            hint = f"{CACHE_VARIABLE} names another directory"
            raise NotTrusted(f"{directory} {why}, so runs are not remembered there: {hint}")
    return directory


def why_not_remembered() -> str | None:
    """Return why the cache is not used, if the user should know."""
    try:
        with contextlib.suppress(OSError):
            cache_directory()
    except NotTrusted as error:
        return str(error)
    return None


def remembered_trees() -> list[Path]:
    """Return the trees that were seen, the first one first."""
    trees: list[Path] = []
    with contextlib.suppress(OSError, NotTrusted):
        for line in (cache_directory() / FILE_NAME).read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # a broken line
                trees.append(Path(json.loads(line)))
    return [tree for tree in dict.fromkeys(trees) if tree.is_absolute()]


def remember_trees(trees: Iterable[Path]) -> None:
    """Add trees that were seen just now."""
    news = {*trees}.difference(remembered_trees())
    if news:
        # Appended at once: processes that write at the same time need no lock. The first line break ends what
        # a full disk cut off.
        lines = "".join(f"\n{json.dumps(str(tree))}" for tree in sorted(news)).encode()
        with contextlib.suppress(OSError, NotTrusted), (cache_directory() / FILE_NAME).open("ab", 0) as file:
            file.write(lines)


def forget_trees(trees: Iterable[Path]) -> None:
    """Drop trees that are gone; what another process adds at the same time may be lost too."""
    remembered, gone = remembered_trees(), {*trees}
    if not gone.isdisjoint(remembered):
        lines = "".join(f"\n{json.dumps(str(tree))}" for tree in remembered if tree not in gone)
        with contextlib.suppress(OSError, NotTrusted):
            write_atomic(cache_directory() / FILE_NAME, lines, sync=False)
