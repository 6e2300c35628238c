"""Files that others may have written, opened without surprises; and files that appear only complete.

Only regular files of a sensible size are opened: a FIFO would block, and a device may never end.
`UnfitFile` is a `FileNotFoundError`: any other file is treated like a missing one.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import stat
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Tuple, Union

AnyPath = Union[str, "os.PathLike[str]"]

# Most bytes of a file that the launcher and a job write whole: manifests, marks, scripts and configurations.
TEXT_LIMIT = 4 << 20

# Most bytes of a record that grows with the data sets of a blend or the points of a sweep.
RECORD_LIMIT = 16 << 20

# A file of this size or more with less than a thousandth of it on disk is a hole, and no log.
_SPARSE_BYTES = 1 << 30
_SPARSE_FACTOR = 1000
_BLOCK_BYTES = 512  # the unit of st_blocks

# Slurm's ids are of 32 bits, its largest array has 4,000,001 tasks; a process id is smaller.
_JOB_ID = r"([1-9][0-9]{0,9})(?:_(0|[1-9][0-9]{0,6}))?"
_LARGEST_JOB, _LARGEST_TASK = 0xFFFF_FFFD, 4_000_000

# The year 5138, in Unix seconds: every library can format earlier times.
_LATEST = 1e11
_LARGEST = (1 << 63) - 1  # of 64 bits


# Errors of a path, or of a lease that somebody holds on the file, that leave nothing to read.
_LEAD_NOWHERE = (errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO, errno.EAGAIN)


class UnfitFile(FileNotFoundError):
    """The path is not a regular file, or too large for its kind."""


def open_regular(path: AnyPath, *, buffering: int = -1, holes: bool = False) -> BinaryIO:
    """Open a regular file to read its bytes; an empty one without what reading it might wait for.

    With `holes` a file may be nearly all hole, as zeros are on a file system that compresses.

    Raises
    ------
    UnfitFile
        If it is a directory, a FIFO, a device or a socket, or nearly all of it is a hole.
    OSError
        If it cannot be opened.
    """
    try:
        # Before it is opened, because opening some devices has effects; after it, as names can be exchanged.
        _require_regular(path, os.stat(path).st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a null character
        raise UnfitFile(errno.ENOENT, "no file can have such a name", str(path)) from error
    except OSError as error:
        if error.errno in _LEAD_NOWHERE:
            raise UnfitFile(error.errno, error.strerror, str(path)) from error
        raise
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status.st_mode)
        size = status.st_size
        if not holes and size >= _SPARSE_BYTES and status.st_blocks * _BLOCK_BYTES < size / _SPARSE_FACTOR:
            raise UnfitFile(errno.EFBIG, f"{size} bytes, nearly all a hole", str(path))
        if size == 0:
            os.close(descriptor)
            return io.BytesIO()  # some files of /proc have no size, and block
        return open(descriptor, "rb", buffering=buffering)
    except UnfitFile:
        os.close(descriptor)
        raise


def _require_regular(path: AnyPath, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise UnfitFile(errno.ENOENT, "not a regular file", str(path))


def read_bytes(path: AnyPath, limit: int = TEXT_LIMIT) -> bytes:
    """Read a whole file.

    Raises
    ------
    UnfitFile
        If it is no regular file, or larger than the limit, in bytes.
    """
    with open_regular(path) as stream:
        first = min(limit, TEXT_LIMIT) + 1  # for which Python sets memory aside
        content = stream.read(first)
        if len(content) == first <= limit:
            content += stream.read(limit + 1 - first)
    if len(content) > limit:
        raise UnfitFile(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


def read_text(path: AnyPath, limit: int = TEXT_LIMIT, errors: str = "strict") -> str:
    """Read a whole file of UTF-8, with its ends of lines as they are in Python."""
    text = read_bytes(path, limit).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: AnyPath, limit: int = TEXT_LIMIT) -> Dict[str, Any]:
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


_CHUNK = 1 << 20


def sha256_of(path: AnyPath, advance: Callable[[int], None] = lambda size: None) -> str:
    """Return a file's SHA-256 in hexadecimal digits; `advance` is called with the size of each part read."""
    digest = hashlib.sha256()
    with open_regular(path, buffering=0, holes=True) as stream:
        for chunk in iter(lambda: stream.read(_CHUNK), b""):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def is_job_id(text: str) -> bool:
    """Return True for the id of a job, ``17``, or of a task of an array, ``17_2``."""
    match = re.fullmatch(_JOB_ID, text)
    return match is not None and int(match[1]) <= _LARGEST_JOB and int(match[2] or 0) <= _LARGEST_TASK


def read_int(value: Any, least: int = -_LARGEST, most: int = _LARGEST) -> Optional[int]:
    """Return a number of JSON as an integer, ``None`` if it is not a number in range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # NaN compares as False, and an integer of a thousand digits cannot become a float.
    return int(value) if least <= value <= most else None


def unix_time(value: Any) -> Optional[float]:
    """Return a number of JSON as a time in Unix seconds, or ``None``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LATEST:
        return None
    return float(value)


def to_printable(text: str) -> str:
    """Return text fit for one line of a log or of a table, with what cannot be printed as ``?``."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def blocks_back(
    stream: BinaryIO, begin: int, end: int, size: int, *, growth: int = 1, overlap: int = 0
) -> Iterator[Tuple[int, bytes]]:
    """Yield the blocks of a file between two bytes, the last one first, each with the byte it begins at.

    Each is `growth` times as large as the one before, and has `overlap` bytes of that one at its end.
    """
    last = end
    while end > begin:
        start = max(end - size, begin)
        stream.seek(start)
        yield start, stream.read(min(end + overlap, last) - start)
        end, size = start, size * growth


def names_in(directory: AnyPath) -> List[str]:
    """Return the sorted names in a directory; none where it cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except (OSError, ValueError):
        return []


def write_atomic(path: AnyPath, text: Union[str, bytes], mode: int = 0o666, *, sync: bool = True) -> None:
    """Write a file so that a reader, or a crash, meets either the old content or the new.

    The user's umask decides, as ever, what of `mode` is given. A path in the text that is not UTF-8 is
    written as the bytes that it is. Without `sync` only readers are served: see `sync_file`.
    """
    directory, name = os.path.split(os.fspath(path))
    temporary = _write_temporary(directory, name, text, mode, sync)
    try:
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise
    if sync:
        sync_path(directory or ".")


def write_once(path: AnyPath, text: str) -> bool:
    """Write a file unless there is one; return True if this call wrote it.

    It is there with its whole content or not at all, where the file system has hard links.
    """
    directory, name = os.path.split(os.fspath(path))
    temporary = _write_temporary(directory, name, text, 0o666)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # no links on this file system
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        _write(descriptor, text, path)
    finally:
        _remove(temporary)
    return True


def append_line(path: AnyPath, line: str) -> None:
    """Append a line in one write, which other writers of the file do not part; a FIFO is not waited for."""
    content = (line + "\n").encode("utf-8", "surrogateescape")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def sync_file(path: AnyPath) -> None:
    """Make a file that `write_atomic` wrote without `sync` durable, and its name."""
    sync_path(path)
    sync_path(os.path.dirname(path) or ".")


def sync_path(path: AnyPath) -> None:
    """Make a file's content, or the names in a directory, durable, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # as some network file systems answer
            raise
    finally:
        os.close(descriptor)


def _write_temporary(directory: str, name: str, text: Union[str, bytes], mode: int, sync: bool = True) -> str:
    """Write a file of a hidden name that no other has, and with `sync` make its content durable."""
    temporary = os.path.join(directory, f".{name}.{os.urandom(4).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    _write(descriptor, text, temporary, sync)
    return temporary


def _write(descriptor: int, text: Union[str, bytes], path: AnyPath, sync: bool = True) -> None:
    """Write a new file and with `sync` make its content durable; remove it if that fails."""
    try:
        with open(descriptor, "wb") as stream:
            stream.write(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
    except BaseException:
        _remove(path)
        raise


def _remove(path: AnyPath) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
