"""How a root filesystem becomes a squashfs: the compressors that are offered, and which suits where."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from launcher.file_systems import is_shared

AUTO = "auto"

# More makes it no faster.
_MEMORY = "2G"

# mksquashfs' words. Without the last one a file that cannot be read is left out with exit code 0.
SQUASH_OPTIONS = {
    "lz4": ("-comp", "lz4", "-exit-on-error"),
    "zstd": ("-comp", "zstd", "-Xcompression-level", "1", "-exit-on-error"),
    "gzip": ("-comp", "gzip", "-Xcompression-level", "1", "-exit-on-error"),
    # Enroot's own choice.
    "lzo": ("-comp", "lzo", "-noD", "-exit-on-error"),
    "none": ("-noI", "-noD", "-noF", "-noX", "-exit-on-error"),
}
COMPRESSIONS = (AUTO, *SQUASH_OPTIONS)

# Of the uncompressed size, measured on a tree of Python and libraries (docs/benchmarks.md), rounded up.
SIZE_PART = {"lz4": 0.55, "zstd": 0.45, "gzip": 0.45, "lzo": 0.9, "none": 1.0}


def compression_for(path: Path, shared: Callable[[Path], bool] = is_shared) -> str:
    """What suits the file system that an image will lie on.

    From a network's, every byte counts more than the time to decompress it; from a disk of this machine lz4
    is read twice as fast as zstd (docs/benchmarks.md).
    """
    return "zstd" if shared(path) else "lz4"


def limits(*, processors: bool = True) -> tuple[str, ...]:
    """What mksquashfs may take: the processors that this process may use, and a little memory.

    By itself it takes a quarter of the machine's memory, which a job may not have.
    """
    count = ("-processors", str(len(os.sched_getaffinity(0)))) if processors else ()
    return (*count, "-mem", _MEMORY)
