"""How a squashfs begins: enough to tell a whole one from a torn one, and what it was packed with."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from launcher.errors import UserError, one_line

# The superblock of squashfs 4.0 (Linux, fs/squashfs/squashfs_fs.h): magic, inodes, time, block size,
# fragments, compressor, log2 of the block size, flags, ids, major and minor version, the root's inode, and
# how many bytes of the file are used; what follows is padding.
_SUPERBLOCK = struct.Struct("<4s4I6HQQ")
SUPERBLOCK_BYTES = _SUPERBLOCK.size
_MAGIC = b"hsqs"
_MAJOR = 4
# Of the flags (squashfs-tools, squashfs_fs.h): the contents are stored as they are, and the ends of files
# too, which Enroot's own options compress alone.
_PLAIN = 1 << 1 | 1 << 3

_COMPRESSORS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a squashfs tells of itself.

    Attributes
    ----------
    compression
        Of the files' contents, such as ``zstd``; ``none`` where they are stored as they are.
    block_size
        In bytes.
    used_bytes
        How long the file must be, at least.
    inodes
        Files, directories and all else that is in it.
    created
        When it was packed.
    """

    compression: str
    block_size: int
    used_bytes: int
    inodes: int
    created: datetime


def read_superblock(path: Path) -> Superblock:
    """Read how a file begins.

    Raises
    ------
    UserError
        If it is no whole squashfs: another kind of file, cut short, of a version that Linux does not mount.
    OSError
        If it cannot be read.
    """
    with path.open("rb") as stream:
        head = stream.read(SUPERBLOCK_BYTES)
        why = why_not_squashfs(head, stream.seek(0, 2))
    if why is not None:
        raise UserError(
            f"{one_line(str(path))}: {why}", hint="make it anew: slipway image import ... --force"
        )
    _, inodes, created, block_size, _, compressor, _, flags, *_, used = _SUPERBLOCK.unpack(head)
    name = _COMPRESSORS.get(compressor, f"unknown ({compressor})")
    moment = datetime.fromtimestamp(created, UTC)
    return Superblock("none" if flags & _PLAIN == _PLAIN else name, block_size, used, inodes, moment)


def is_squashfs(path: Path) -> bool:
    """Whether a file is there, can be read, and begins as a whole squashfs does."""
    try:
        read_superblock(path)
    except (OSError, UserError):
        return False
    return True


def why_not_squashfs(head: bytes, size: int) -> str | None:
    """Why a file that begins so and has so many bytes is no whole squashfs; ``None`` if it is one."""
    if not size:
        return "an empty file"
    if not head.startswith(_MAGIC):
        return "not a squashfs image: it does not begin as one"
    if len(head) < SUPERBLOCK_BYTES:
        return f"cut short: {size} bytes are less than a squashfs begins with"
    *_, major, minor, _, used = _SUPERBLOCK.unpack_from(head)
    if major != _MAJOR:
        return f"squashfs of version {major}.{minor}, and Linux mounts 4.0"
    if size < used:
        return f"cut short: {size:,} bytes of a squashfs of {used:,}"
    return None
