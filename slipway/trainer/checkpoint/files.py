"""Files of checkpoints: written to disk, opened without surprises, and their checksums. Imports no torch.

CRC-32, because zlib computes it three times as fast as any of hashlib's digests
(``benchmarks/perf/checkpoints.py``): it finds changes by disks, networks and interrupted copies, not those
that somebody makes on purpose.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError
from slipway.common.files import open_regular

# The errors of a path that is no regular file; any other error is a file system's or a node's.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG)


def is_absent(error: OSError) -> bool:
    """Return whether an error says that a path is no regular file, and not that it cannot be read now."""
    return error.errno in _ABSENT


# Larger than any tokenizer, index of safetensors files or description of a model.
LIMIT_BYTES = 256 << 20


def read_regular(path: Path, most: int = LIMIT_BYTES) -> bytes:
    """Return the first bytes of a regular file, `most` at most; raise OSError as :func:`open_regular`."""
    with open_regular(path, holes=True) as file:
        return file.read(most)


# Of a hub's cache: models--OWNER--NAME/snapshots/REVISION/name is a link into models--OWNER--NAME/blobs.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def resolve_inside(path: Path, root: Path | None = None) -> Path:
    """Return the file of a directory of somebody else's; a link must not lead out of it, or out of `root`.

    Raises
    ------
    UserError
        If it does, as to a file that is private, or if it is no regular file.
    """
    directory, target = (root or path.parent).resolve(), Path(os.path.realpath(path))
    caches = [up.parent / _BLOBS for up in list(directory.parents)[:2] if up.name == _SNAPSHOTS]
    if not any(map(target.is_relative_to, (directory, *caches))):
        raise UserError(f"{path} is a link to {target}, out of its directory; expected a copy of the file")
    if os.path.exists(target) and not target.is_file():  # noqa: PTH110 - any name may be asked for
        raise UserError(f"{path} cannot be read: it is not a regular file")
    return target


def read_inside(path: Path, limit: int = LIMIT_BYTES, root: Path | None = None) -> bytes:
    """Return the content of a file of somebody else's.

    Raises
    ------
    OSError
        If it cannot be read.
    UserError
        As :func:`resolve_inside`, or if it is larger than `limit`, in bytes.
    """
    content = read_regular(resolve_inside(path, root), limit + 1)
    if len(content) > limit:
        raise UserError(f"{path} is larger than {limit:,} bytes")
    return content


def read_mapping(path: Path, limit: int = LIMIT_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of somebody else's; raise UserError for anything else."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no number of JSON")

    try:
        value = json.loads(read_inside(path, limit), parse_constant=refuse)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{path} is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a mapping")
    return value


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
    value = 0
    with open_regular(path, buffering=0, holes=True) as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def mismatch(directory: Path, name: str, expected: str) -> str | None:
    """Return the defect in the content of one file of a checkpoint, or None.

    Raises
    ------
    OSError
        If the file cannot be examined, as when a file system does not answer: that is no damage.
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
