"""Files of checkpoints: written to disk, opened without surprises, and their checksums. Imports no torch.

CRC-32, because zlib computes it three times as fast as any of hashlib's digests
(``benchmarks/perf/checkpoints.py``): it finds changes by disks, networks and interrupted copies, not those
that somebody makes on purpose.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import zlib
from collections.abc import Mapping
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


_BLOCK_BYTES = 1 << 22


def text_checksum(text: str) -> str:
    """Return the checksum of a text, eight hexadecimal digits."""
    return f"{zlib.crc32(text.encode()):08x}"


def file_checksum(path: Path) -> str:
    """Return the checksum of a regular file's content, eight hexadecimal digits.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    block, value = memoryview(bytearray(_BLOCK_BYTES)), 0
    with open_regular(path) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return f"{value:08x}"


def mismatch(directory: Path, name: str, expected: str) -> str | None:
    """Return what is wrong with the content of one file of a checkpoint, or None.

    Raises
    ------
    OSError
        If it cannot be told, as when a file system does not answer: that is no damage.
    """
    try:
        value = file_checksum(directory / name)
    except OSError as error:
        if is_absent(error):
            return f"{name} is missing"
        raise
    return None if value == expected else f"{name} has checksum {value}, not {expected}"


def share(sizes: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """Return the names of the files that a rank reads, so that all ranks read about as many bytes."""
    loads = [0] * ranks
    mine = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        reader = loads.index(min(loads))
        loads[reader] += sizes[name]
        if reader == rank:
            mine.append(name)
    return mine
