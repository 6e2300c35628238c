"""Files that are on disk when a function returns, and files that are opened without surprises."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

# What a file that is not there, or is none, says; anything else tells of a file system or of a node.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)


def is_absent(error: OSError) -> bool:
    """Return whether an error says that a path is no regular file, and not that it cannot be read now."""
    return error.errno in _ABSENT


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading, without a buffer.

    Raises
    ------
    OSError
        If it cannot be read; :func:`is_absent` for a directory, a FIFO or a device.
    """
    # A FIFO would wait for a writer.
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.ENXIO, "not a regular file", str(path))
    return file


def sync(path: Path) -> None:
    """Have a file's content, or a directory's entries, written to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str) -> None:
    """Write a file and have it on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
