"""One importer for each image: the others wait for it, whichever machine they are on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import explain_os_error, one_line
from launcher.runs.provenance import host, user

# What file systems without locks say, such as Lustre mounted without `flock`; the last is what NFS says of a
# file that may only be read, such as a colleague's.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock that is held.

    Attributes
    ----------
    descriptors
        For programs that are to hold it too: it lasts until the last of them has ended.
    waited
        Whether another held it when it was asked for.
    certain
        False where the file system has no locks: others may be at it too.
    """

    descriptors: tuple[int, ...]
    waited: bool
    certain: bool


def lock_path(target: Path) -> Path:
    """The hidden file beside an image that its importers lock."""
    return target.with_name(f".{target.name}.lock")


@contextmanager
def locked(target: Path, on_wait: Callable[[str], None]) -> Iterator[Lock]:
    """Hold an image that is to be written; wait for whoever else does.

    Parameters
    ----------
    on_wait
        Told who that is, before waiting.
    """
    path = lock_path(target)
    handle, waited, certain = _taken(path, on_wait)
    try:
        _sign(handle)
        yield Lock((handle,) if certain else (), waited, certain)
    finally:
        # While it is held: who waits for it sees that the file is gone, and begins again with a new one.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)


def _taken(path: Path, on_wait: Callable[[str], None]) -> tuple[int, bool, bool]:
    waited = False
    while True:
        handle = _opened(path)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waited:
                    on_wait(_holder(path))
                waited = True
                fcntl.flock(handle, fcntl.LOCK_EX)
            if is_same(handle, path):
                return handle, waited, True
        except OSError as error:
            if error.errno in NO_LOCKS:
                return handle, waited, False
            os.close(handle)
            raise
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _opened(path: Path) -> int:
    try:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError as error:
            # A colleague's, whose umask keeps others from writing: a lock on it is as good.
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise error from None  # it may not be made here
    except OSError as error:
        raise explain_os_error(error, path, "images_dir") from error


def is_locked(target: Path) -> bool:
    """Whether somebody writes an image just now, or may do so; nothing is written to find out."""
    try:
        handle = os.open(lock_path(target), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def is_same(handle: int, path: Path) -> bool:
    """Whether a file that is open is the one of that name still."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _sign(handle: int) -> None:
    """Write down who holds it, for those that wait."""
    text = json.dumps({"user": user(), "host": host(), "pid": os.getpid()})
    with contextlib.suppress(OSError):  # another's file, or a full disk: only the words would be missing
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)


def _holder(path: Path) -> str:
    try:
        who = json.loads(path.read_text(encoding="utf-8"))
        return one_line(f"process {who['pid']} of {who['user']} on {who['host']}")
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
