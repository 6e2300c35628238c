"""Checksums of a checkpoint's files. Imports no torch.

CRC-32, because zlib computes it three times as fast as any of hashlib's digests
(``benchmarks/perf/checkpoints.py``): it finds what disks, networks and half-made copies change, not what
somebody changes on purpose.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoint.files import is_absent, open_regular

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
