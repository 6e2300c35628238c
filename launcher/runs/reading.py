"""Reading what lies in a run directory: the data of whoever wrote it, opened without surprises.

Only regular files of a sensible size are opened, so that nobody waits for a FIFO or reads a device for ever.
`UnfitFile` is a `FileNotFoundError`: what is no such file is treated like a file that is missing.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

# What the launcher and a job write whole: manifests, marks, scripts and configurations.
TEXT_LIMIT = 4 << 20
# A YAML parser takes a second for that much.
YAML_LIMIT = 1 << 19
_YAML_DEPTH = 64
# How a path that is not UTF-8 is written: libyaml does not read that, and the parser in Python is slow.
_ODD_ESCAPE = re.compile(r"\\uD[89A-F]", re.IGNORECASE)
_SLOW_YAML_LIMIT = 1 << 17
# Of a log or of metrics, a longer line is read in pieces.
LONGEST_LINE = 1 << 20

# A file of this size or more with less than a thousandth of it on disk is a hole, and no log.
_SPARSE_BYTES = 1 << 30
_SPARSE_FACTOR = 1000
_BLOCK_BYTES = 512  # the unit of st_blocks

# Slurm's ids are of 32 bits, its largest array has 4,000,001 tasks; a process id is smaller.
_JOB_ID = re.compile(r"([1-9][0-9]{0,9})(?:_(0|[1-9][0-9]{0,6}))?", re.ASCII)
_LARGEST_JOB, _LARGEST_TASK = 0xFFFF_FFFD, 4_000_000

# The year 5138, in Unix seconds: every library can format what is before.
_LATEST = 1e11
_LARGEST = (1 << 63) - 1  # of 64 bits


# What a path, or a lease that somebody holds on the file, can do so that there is nothing to read.
_LEAD_NOWHERE = (errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO, errno.EAGAIN)


class UnfitFile(FileNotFoundError):
    """What lies there is no regular file, or too large to be what it is named."""


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file to read its bytes; an empty one without what reading it might wait for.

    Raises
    ------
    UnfitFile
        If it is a directory, a FIFO, a device or a socket, or nearly all of it is a hole.
    OSError
        If it cannot be opened.
    """
    try:
        # Before it is opened, because opening some devices has effects; after it, as names can be exchanged.
        _require_regular(path, path.stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a null character
        raise UnfitFile(errno.ENOENT, "no file can have such a name", str(path)) from error
    except OSError as error:
        if error.errno in _LEAD_NOWHERE:
            raise UnfitFile(error.errno, error.strerror, str(path)) from error
        raise
    try:
        found = os.fstat(descriptor)
        _require_regular(path, found.st_mode)
        if found.st_size >= _SPARSE_BYTES and found.st_blocks * _BLOCK_BYTES < found.st_size / _SPARSE_FACTOR:
            raise UnfitFile(errno.EFBIG, f"{found.st_size} bytes, of which nearly all are a hole", str(path))
        if found.st_size == 0:
            os.close(descriptor)
            return io.BytesIO()  # some files of /proc have no size, and block
        return open(descriptor, "rb", buffering=buffering)  # noqa: PTH123  # a descriptor, not a path
    except UnfitFile:
        os.close(descriptor)
        raise


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise UnfitFile(errno.ENOENT, "not a regular file", str(path))


def read_bytes(path: Path, limit: int = TEXT_LIMIT) -> bytes:
    """Read a whole file.

    Raises
    ------
    UnfitFile
        If it is no regular file, or larger than the limit, in bytes.
    """
    with open_regular(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise UnfitFile(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


def read_text(path: Path, limit: int = TEXT_LIMIT, errors: str = "strict") -> str:
    """Read a whole file of UTF-8, with its ends of lines as they are in Python."""
    text = read_bytes(path, limit).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, limit: int = TEXT_LIMIT) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises
    ------
    ValueError
        If it holds anything else.
    """
    try:
        content = json.loads(read_text(path, limit))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    return content


def read_yaml(path: Path) -> Any:
    """Read a configuration that the launcher wrote; see `parse_yaml`."""
    return parse_yaml(read_text(path, YAML_LIMIT))


def parse_yaml(text: str) -> Any:
    """Parse YAML that the launcher wrote, which has no aliases: these can blow up what is read.

    Raises
    ------
    ValueError
        If it is no YAML, or not such.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if len(text) <= _SLOW_YAML_LIMIT and _ODD_ESCAPE.search(text):
        loader = yaml.SafeLoader
    try:
        depth = 0
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _YAML_DEPTH:
                raise ValueError("it has aliases, or is nested too deeply")
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def is_job_id(text: str) -> bool:
    """Return True for the id of a job, ``17``, or of a task of an array, ``17_2``."""
    found = _JOB_ID.fullmatch(text)
    return found is not None and int(found[1]) <= _LARGEST_JOB and int(found[2] or 0) <= _LARGEST_TASK


def whole(value: Any, least: int = -_LARGEST, most: int = _LARGEST) -> int | None:
    """Return a number of JSON as an integer, ``None`` if it is none or out of range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A number that is none compares as False, and one of a thousand digits cannot become a float.
    return int(value) if least <= value <= most else None


def unix_time(value: Any) -> float | None:
    """Return a number of JSON as a time in Unix seconds, ``None`` if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LATEST:
        return None
    return float(value)
