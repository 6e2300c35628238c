"""Squashfs files: the compressors offered, the superblock, and reading a file without mounting it."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from launcher.errors import UserError, escape
from launcher.file_systems import is_shared
from launcher.images import tools
from launcher.images.progress import SILENT, ImageProgress

AUTO = "auto"

# Words of mksquashfs. Without the last one a file that cannot be read is left out with exit code 0.
SQUASH_OPTIONS = {
    "lz4": ("-comp", "lz4", "-exit-on-error"),
    "zstd": ("-comp", "zstd", "-Xcompression-level", "1", "-exit-on-error"),
    "gzip": ("-comp", "gzip", "-Xcompression-level", "1", "-exit-on-error"),
    # Enroot's own choice.
    "lzo": ("-comp", "lzo", "-noD", "-exit-on-error"),
    "none": ("-noI", "-noD", "-noF", "-noX", "-exit-on-error"),
}
COMPRESSIONS = (AUTO, *SQUASH_OPTIONS)
# Share of the uncompressed size, measured on a tree of Python and libraries (docs/benchmarks.md), rounded up.
COMPRESSED_FRACTION = {"lz4": 0.55, "zstd": 0.45, "gzip": 0.45, "lzo": 0.9, "none": 1.0}
# By default mksquashfs takes a quarter of the machine's memory, which a job may not have. More makes it no
# faster.
_MEMORY = "2G"

# The superblock of squashfs 4.0 (Linux, fs/squashfs/squashfs_fs.h): magic, inodes, time, block size,
# fragments, compressor, log2 of the block size, flags, ids, major and minor version, the root's inode, and
# how many bytes of the file are used; what follows is padding.
_SUPERBLOCK = struct.Struct("<4s4I6HQQ")
SUPERBLOCK_BYTES = _SUPERBLOCK.size
_MAGIC = b"hsqs"
_MAJOR = 4
# Flags (squashfs-tools, squashfs_fs.h): data blocks are stored as they are, and fragments too, which Enroot's
# own options compress alone.
_UNCOMPRESSED = 1 << 1 | 1 << 3
_COMPRESSORS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}

# A line of `unsquashfs -lln -d ''` about a regular file.
_REGULAR_FILE = re.compile(rb"-[-rwxsStT]{9} \d+/\d+ +(\d+) \d{4}-\d\d-\d\d \d\d:\d\d /")
_CHUNK_BYTES = 1 << 22
# unsquashfs exits with 2 if it could not set attributes of written files, such as owners.
_FATAL = 1
_QUOTED_LETTERS = 400


def default_compression(path: Path, shared: Callable[[Path], bool] = is_shared) -> str:
    """Return the compression that suits the file system of an image.

    On a network's file system every byte counts more than the time to decompress it; from a disk of this
    machine lz4 is read twice as fast as zstd (docs/benchmarks.md).
    """
    return "zstd" if shared(path) else "lz4"


def resource_limits(*, processors: bool = True) -> tuple[str, ...]:
    """Return the options that keep mksquashfs to this process's processors and to little memory."""
    count = ("-processors", str(len(os.sched_getaffinity(0)))) if processors else ()
    return (*count, "-mem", _MEMORY)


@dataclass(frozen=True, slots=True)
class Superblock:
    """The header of a squashfs.

    `compression` is that of the files' contents, such as ``zstd``, or ``none``; `used_bytes` is the least
    length of the file; `inodes` counts files, directories and all other entries.
    """

    compression: str
    block_size: int
    used_bytes: int
    inodes: int
    created: datetime


def read_superblock(path: Path) -> Superblock:
    """Read the header of a squashfs.

    Raise UserError if it is no complete squashfs: another kind of file, cut short, or of a version that Linux
    does not mount; OSError if it cannot be read.
    """
    with path.open("rb") as stream:
        head = stream.read(SUPERBLOCK_BYTES)
        fault = squashfs_fault(head, stream.seek(0, os.SEEK_END))
    if fault is not None:
        raise UserError(
            f"{escape(str(path))}: {fault}", hint="make it again: slipway image import ... --force"
        )
    _, inodes, created, block_size, _, compressor, _, flags, *_, used = _SUPERBLOCK.unpack(head)
    name = _COMPRESSORS.get(compressor, f"unknown ({compressor})")
    compression = "none" if flags & _UNCOMPRESSED == _UNCOMPRESSED else name
    return Superblock(compression, block_size, used, inodes, datetime.fromtimestamp(created, UTC))


def is_squashfs(path: Path) -> bool:
    """Return True if the file exists, can be read and has a valid squashfs header."""
    try:
        read_superblock(path)
    except (OSError, UserError):
        return False
    return True


def squashfs_fault(head: bytes, size: int) -> str | None:
    """Return why a file of these first bytes and this size is no complete squashfs, or ``None``."""
    if not size:
        return "an empty file"
    if not head.startswith(_MAGIC):
        return "not a squashfs image"
    if len(head) < SUPERBLOCK_BYTES:
        return f"cut short: {size} bytes are less than the header of a squashfs"
    *_, major, minor, _, used = _SUPERBLOCK.unpack_from(head)
    if major != _MAJOR:
        return f"squashfs of version {major}.{minor}, and Linux mounts 4.0"
    if size < used:
        return f"cut short: {size:,} bytes of a squashfs of {used:,}"
    return None


def sha256_of(path: Path, progress: ImageProgress = SILENT) -> str:
    """Return the checksum of a file, in hexadecimal digits."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while data := stream.read(_CHUNK_BYTES):
            digest.update(data)
            done += len(data)
            progress.advance(done)
    return digest.hexdigest()


def read_texts(image: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the texts of some files in an image; names that are not in it are left out."""
    tools.require("unsquashfs", why="to look into a squashfs")
    with tempfile.TemporaryDirectory(prefix="slipway-look-") as folder:
        root = Path(folder) / "files"
        # Not `-cat`, which unsquashfs has since 4.5 only. Names that are not in the image are no error to it.
        options = ("-no-progress", "-no-xattrs", "-no-wildcards")
        argv: list[str | Path] = ["unsquashfs", *options, "-d", root, image, *names]
        tools.run(argv, doing=f"read {escape(str(image))}", on_line=lambda _: None)
        return {name: text for name in names if (text := _text(root, name)) is not None}


def _text(root: Path, name: str) -> str | None:
    path = root / name
    try:
        # An absolute link in the image leads out of it.
        if not path.resolve(strict=True).is_relative_to(root.resolve()) or not path.is_file():
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, RuntimeError):  # missing, unreadable, or a loop of links
        return None


def count_files(image: Path) -> tuple[int, int]:
    """Return the number of regular files in an image and their bytes, from its tables."""
    tools.require("unsquashfs", why="to look into a squashfs")
    command = ["unsquashfs", "-lln", "-d", "", str(image)]
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
    if result.returncode == _FATAL or not result.stdout:
        raise _explain_unreadable(image, "its tables", result.stderr)
    matches = (_REGULAR_FILE.match(line) for line in result.stdout.split(b"\n"))
    sizes = [int(match[1]) for match in matches if match]
    return len(sizes), sum(sizes)


def decompress_all(image: Path, progress: ImageProgress = SILENT) -> None:
    """Decompress all files of an image, and keep nothing; raise UserError if one cannot be read."""
    # A pseudo file has the contents of all files; as one stream, they need no room.
    command = ["unsquashfs", "-pf", "/dev/stdout", str(image)]
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process:
            assert process.stdout
            read = 0
            while data := process.stdout.read(_CHUNK_BYTES):
                read += len(data)
                progress.advance(read)
        errors.seek(0)
        message = errors.read().lstrip()
    if process.returncode == _FATAL:
        if b"SYNTAX" in message or b"invalid option" in message:
            raise UserError("this unsquashfs cannot read files without writing them: 4.5 is needed")
        raise _explain_unreadable(image, "a file in it", message)


def _explain_unreadable(image: Path, what: str, message: bytes) -> UserError:
    lines = message.decode(errors="replace").strip().splitlines() or ["unsquashfs does not say why"]
    reason = escape(lines[0])[:_QUOTED_LETTERS]
    return UserError(f"{escape(str(image))}: {what} cannot be read: {reason}")
