"""Locks on images, and scratch directories with room that are removed however the work ends."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.filesize import decimal

from launcher.errors import UserError, escape, explain_os_error
from launcher.file_systems import is_shared, mount_of, room_at
from launcher.images.tools import proc_number
from launcher.runs.provenance import host, user

if TYPE_CHECKING:
    from filelock import BaseFileLock

# Errors of file systems without locks, such as Lustre mounted without `flock`.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)

SCRATCH_PREFIX = "slipway-image-"
_LOCK_NAME = "lock"

_MEMORY_KINDS = ("tmpfs", "ramfs")
# Half of the free memory: the rest of the machine needs some too.
_MEMORY_DIVISOR = 2


# --- locks

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ImageLock:
    """A lock that is held.

    Programs that must hold it too inherit `descriptors`: it lasts until the last of them has ended. It is not
    `certain` on a file system without locks: others may hold it too. `waited` if another held it first.
    """

    descriptors: tuple[int, ...]
    waited: bool

    @property
    def certain(self) -> bool:
        return bool(self.descriptors)


def lock_path(target: Path) -> Path:
    """Return the hidden file that an image's importers lock."""
    return target.with_name(f".{target.name}.lock")


def _flock(path: Path) -> tuple[BaseFileLock, list[int]]:
    """Return a lock (flock), and the list that gets its descriptor.

    On NFS and Lustre the kernel holds it for all hosts. Everybody may open the file, so that colleagues can
    lock an image in a directory that they share.
    """
    from filelock import FileLock  # late: most commands lock nothing

    descriptors: list[int] = []
    return FileLock(path, mode=0o666, fallback_to_soft=False, on_acquired=descriptors.append), descriptors


@contextmanager
def lock_image(target: Path, on_wait: Callable[[str], None]) -> Iterator[ImageLock]:
    """Lock an image to write it; `on_wait` is called with the holder before waiting."""
    path = lock_path(target)
    lock, descriptors = _flock(path)
    waited = False
    try:
        waited = _acquire(lock, path, on_wait)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise explain_os_error(error, path, "images_dir") from error
    try:
        if descriptors:
            text = json.dumps({"user": user(), "host": host(), "pid": os.getpid()})
            with contextlib.suppress(OSError):  # on a full disk only the holder's name is missing
                os.ftruncate(descriptors[0], 0)
                os.pwrite(descriptors[0], text.encode(), 0)
        yield ImageLock(tuple(descriptors), waited)
    finally:
        # Before the release: those who wait notice that the file is gone, and lock a new one.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def _acquire(lock: BaseFileLock, path: Path, on_wait: Callable[[str], None]) -> bool:
    """Acquire a lock; return True if another held it first."""
    waited = False
    while True:
        try:
            lock.acquire(blocking=waited, poll_interval=_POLL_SECONDS)
            return waited
        except TimeoutError:
            waited = True
            on_wait(_holder(path))
        except OSError as error:
            # A holder on another machine has removed the file, which NFS reports of an open one.
            if error.errno != errno.ESTALE:
                raise


def is_locked(target: Path) -> bool:
    """Return True if somebody may be writing an image."""
    path = lock_path(target)
    with _lock_if_free(path) if path.exists() else nullcontext(True) as is_free:
        return not is_free


@contextmanager
def _lock_if_free(path: Path) -> Iterator[bool]:
    lock, _ = _flock(path)
    try:
        lock.acquire(blocking=False)
    except OSError:  # another holds it, or may
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _holder(path: Path) -> str:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return escape(f"process {record['pid']} of {record['user']} on {record['host']}")
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"


# --- scratch directories


@contextmanager
def scratch_directory(parent: Path) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield a new directory, which is removed however the work ends; remove what killed processes left.

    With it come the descriptors that keep it: programs that write there inherit them.
    """
    for path in parent.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if path.lstat().st_uid == os.getuid() and (path / _LOCK_NAME).exists():
                with _lock_if_free(path / _LOCK_NAME) as is_free:
                    if is_free:
                        remove_tree(path)
    while True:
        path = parent / f"{SCRATCH_PREFIX}{os.urandom(6).hex()}"
        lock, descriptors = _flock(path / _LOCK_NAME)
        try:
            path.mkdir(mode=0o700)
            lock.acquire()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and parent.is_dir():
                continue  # another process swept it before it was locked
            if error.errno not in _NO_LOCKS:
                shutil.rmtree(path, ignore_errors=True)
                mistake = explain_os_error(error, path, "--temp-dir", verb="work in")
                hint = (mistake.hint or "").replace("--temp-dir=...", "--temp-dir DIR")
                raise UserError(mistake.message, hint=hint) from error
            # Without locks nothing is swept.
        break
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        stack.callback(remove_tree, path)
        yield path, tuple(descriptors)


def remove_tree(path: Path) -> None:
    """Remove a directory, even if permissions of directories in it forbid that."""
    for root, names, _ in os.walk(path):
        for inner in (Path(root, name) for name in names):
            # A link to a directory is listed too, and may lead anywhere.
            if not inner.is_symlink():
                with contextlib.suppress(OSError):
                    inner.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


# --- space


class SpaceNeeds(NamedTuple):
    """Bytes that are written while an image is made, and those that stay; 0 if unknown."""

    temporary: int
    final: int


class ScratchPlace(NamedTuple):
    """A directory that may be worked in, and its file system."""

    path: Path
    free: int
    in_memory: bool
    shared: bool
    device: int


def look_at_place(path: Path) -> ScratchPlace | None:
    """Return a directory's space and file system; ``None`` if nothing can be written there."""
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        return None
    room, mount = room_at(path), mount_of(path)
    if room is None:
        return None
    in_memory = mount is not None and mount.kind in _MEMORY_KINDS
    # Bytes that programs may still take (proc_meminfo(5)).
    memory = proc_number(Path("/proc/meminfo"), "MemAvailable") * 1024
    free = min(room.free_bytes, memory // _MEMORY_DIVISOR) if in_memory else room.free_bytes
    return ScratchPlace(path, free, in_memory, is_shared(path), path.stat().st_dev)


def choose_scratch(
    needs: SpaceNeeds,
    target: Path,
    temp_dir: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    look: Callable[[Path], ScratchPlace | None] = look_at_place,
) -> Path:
    """Return the directory to work in, with most room: on a local disk; else on the network; else in memory.

    The `target` is in a directory that exists and must have room for what stays. Raise UserError if nothing
    has room, with the numbers.
    """
    home = look(target.parent)
    if home is not None and home.free < needs.final:
        raise UserError(
            f"{escape(str(target.parent))}: the image needs about {decimal(needs.final)} there, and "
            f"{decimal(home.free)} are free",
            hint="remove unused images, `slipway image prune`, or choose another directory: images_dir=DIR",
        )
    named = [Path(environment[name]) for name in ("ENROOT_TEMP_PATH", "TMPDIR") if environment.get(name)]
    usual = [*named, Path("/tmp"), Path("/var/tmp"), target.parent]
    places: dict[int, ScratchPlace] = {}
    for path in [temp_dir] if temp_dir is not None else usual:
        # The first of each file system.
        if (place := look(path.absolute())) is not None:
            places.setdefault(place.device, place)
    if temp_dir is not None and not places:
        message = f"--temp-dir {escape(str(temp_dir))}: not a writable directory"
        raise UserError(message, hint="make it, or choose another")
    # Files that stay need room too where they lie on the same file system.
    fitting = [
        place
        for place in places.values()
        if place.free >= needs.temporary + needs.final * (home is not None and place.device == home.device)
    ]
    if fitting:
        return min(fitting, key=lambda place: (place.in_memory, place.shared, -place.free)).path
    free = ", ".join(f"{decimal(place.free)} in {escape(str(place.path))}" for place in places.values())
    what = f"--temp-dir {escape(str(temp_dir))} has too little room" if temp_dir else "no room to work in"
    raise UserError(
        f"{what}: unpacking the image needs about {decimal(needs.temporary)}"
        + (f", and there are {free}" if free else ""),
        hint="make room there, or name a directory that has it: --temp-dir DIR",
    )
