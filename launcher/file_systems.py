"""File systems: which of them this machine has for itself, and how much may still be written there."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/proc/self/mountinfo")
# What this machine's own disks give to others: the head node of a small cluster often has /home itself.
EXPORTS = (Path("/etc/exports"), Path("/etc/exports.d"), Path("/var/lib/nfs/etab"))

# Those of one machine. All others are taken for shared: nfs, lustre, gpfs, beegfs, ceph, wekafs, fuse.* ...
_LOCAL = {
    *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3", "reiserfs", "vfat"),
    *("xfs", "zfs", "squashfs", "overlay", "devtmpfs", "ramfs", "rootfs", "tmpfs", "fuseblk", "iso9660"),
    # What the kernel tells of its own machine.
    *("cgroup", "cgroup2", "configfs", "debugfs", "devpts", "hugetlbfs", "mqueue", "proc", "securityfs"),
    *("sysfs", "tracefs"),
}
_OCTAL = re.compile(r"\\([0-7]{3})")
_OF_GROUP = re.compile(r"\(gid (\d{1,10})\)")
_QUOTA_PATIENCE_SECONDS = 5
_KIB = 1024


class Mount(NamedTuple):
    """A mounted file system: its type, where it is mounted, and what it is of."""

    kind: str
    point: Path
    source: str

    @property
    def is_local(self) -> bool:
        return self.kind in _LOCAL


class Room(NamedTuple):
    """How many bytes a user may still write, and what ends there: the ``file system``, or the ``quota``."""

    free_bytes: int
    by: str


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there, without links."""
    for candidate in (path, *path.parents):
        try:
            if candidate.exists():
                return candidate.resolve()
        except OSError:
            continue
    return Path("/")


def mount_of(path: Path) -> Mount | None:
    """The file system that a path is on, or would be."""
    place = existing(path)
    found = None
    for mount in _mounts():
        # Of two at the same point the later one covers the other.
        if place.is_relative_to(mount.point) and (
            found is None or len(mount.point.parts) >= len(found.point.parts)
        ):
            found = mount
    return found


def local_mount(path: Path) -> Mount | None:
    """The file system of a path, if this machine has it for itself."""
    mount = mount_of(path)
    if mount is None or not mount.is_local or _is_exported(existing(path)):
        return None
    return mount


def is_shared(path: Path) -> bool:
    """Whether a path is on a file system that other machines have too, as far as this one can tell."""
    return mount_of(path) is not None and local_mount(path) is None


def _mounts() -> Iterator[Mount]:
    """Of Linux, proc_pid_mountinfo(5): the fields after the lone dash are the type and the source."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) > 4 and len(kind) > 1:
            yield Mount(kind[0], Path(_unescaped(place[4])), _unescaped(kind[1]))


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _is_exported(place: Path) -> bool:
    """Whether other machines mount it from here, as exports(5) says."""
    return any(place.is_relative_to(directory) for directory in _exported())


def _exported() -> Iterator[Path]:
    for place in EXPORTS:
        files = sorted(place.glob("*.exports")) if place.is_dir() else [place]
        for file in files:
            try:
                lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
            except OSError:
                continue
            for line in lines:
                directory = line.split()[:1]
                if directory and directory[0].startswith("/"):
                    yield Path(_unescaped(directory[0]))


def room_at(path: Path) -> Room | None:
    """What the user may still write at a path; ``None`` if the file system does not say."""
    place = existing(path)
    try:
        found, group = os.statvfs(place), _group_of_new(place)
    except OSError:
        return None
    if not found.f_blocks:
        return None
    free = found.f_bavail * found.f_frsize
    mount = mount_of(path)
    left = _quota_left(mount, group) if mount is not None else None
    return Room(left, "quota") if left is not None and left < free else Room(free, "file system")


def _group_of_new(place: Path) -> int:
    """The group of what the user writes there."""
    found = place.stat()
    return found.st_gid if found.st_mode & stat.S_ISGID else os.getgid()


def _quota_left(mount: Mount, group: int) -> int | None:
    """What the quotas of the user and of a group leave, in bytes; ``None`` if there are none."""
    if mount.kind == "lustre":
        who = (("-u", os.getuid()), ("-g", group))
        answers = [
            _words(["lfs", "quota", "-q", flag, str(number), str(mount.point)]) for flag, number in who
        ]
        # In one line, or with the numbers in a second one after a long name.
        left = [_left(answer[1:4]) for answer in answers if answer]
    else:
        answer = _output(["quota", "-u", "-g", "-w", "-p"])
        left = [_left(row[1:4]) for row in _rows(answer, group) if row[:1] == [mount.source]]
    return min((bytes_left for bytes_left in left if bytes_left is not None), default=None)


def _rows(answer: str, group: int) -> Iterator[list[str]]:
    """The rows of the user and of a group: there are those of all groups that the user is in."""
    counts = True
    for line in answer.splitlines():
        heading = _OF_GROUP.search(line)
        if line.startswith("Disk quotas for"):
            counts = heading is None or int(heading[1]) == group
        elif counts:
            yield line.split()


def _left(numbers: Iterable[str]) -> int | None:
    """Of KiB used (with a star beyond the limit), the soft limit and the hard one; 0 is none."""
    values = [text.rstrip("*") for text in numbers]
    if len(values) != 3 or not all(value.isdecimal() for value in values):
        return None
    used, soft, hard = map(int, values)
    limit = hard or soft
    return max(limit - used, 0) * _KIB if limit else None


def _words(command: list[str]) -> list[str]:
    return _output(command).split()


def _output(command: list[str]) -> str:
    """What a command says; nothing if there is no such command, or it does not answer."""
    program = shutil.which(command[0])
    return _answer(program, *command[1:]) if program is not None else ""


@cache
def _answer(*command: str) -> str:
    """Asked once: the points of a sweep are written to the same disks, and it may take seconds."""
    try:
        # `quota` exits with 1 where a limit is passed.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_QUOTA_PATIENCE_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
