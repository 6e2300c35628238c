"""File systems: local or shared with other machines, and the room that the user has on them."""

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
# The directories that this machine exports: the head node of a small cluster often has /home itself.
EXPORTS = (Path("/etc/exports"), Path("/etc/exports.d"), Path("/var/lib/nfs/etab"))

# The types of one machine. All others count as shared: nfs, lustre, gpfs, beegfs, ceph, wekafs, fuse.* ...
_LOCAL = {
    *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3", "reiserfs", "vfat"),
    *("xfs", "zfs", "squashfs", "overlay", "devtmpfs", "ramfs", "rootfs", "tmpfs", "fuseblk", "iso9660"),
    # The kernel's own.
    *("cgroup", "cgroup2", "configfs", "debugfs", "devpts", "hugetlbfs", "mqueue", "proc", "securityfs"),
    *("sysfs", "tracefs"),
}
_OCTAL = re.compile(r"\\([0-7]{3})")
_OF_GROUP = re.compile(r"\(gid (\d{1,10})\)")
_QUOTA_PATIENCE_SECONDS = 5
_KIB = 1024


class MountedFileSystem(NamedTuple):
    """A mounted file system: its type, mount point and source."""

    kind: str
    point: Path
    source: str

    @property
    def is_local(self) -> bool:
        return self.kind in _LOCAL


class Room(NamedTuple):
    """The bytes that a user may still write, and their limit: the ``file system``, or the ``quota``."""

    free_bytes: int
    by: str


def existing(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists, with links resolved."""
    for candidate in (path, *path.parents):
        try:
            if candidate.exists():
                return candidate.resolve()
        except OSError:
            continue
    return Path("/")


def mount_of(path: Path) -> MountedFileSystem | None:
    """Return the file system that a path is on, or would be."""
    place = existing(path)
    try:
        above = [mount for mount in mounts() if place.is_relative_to(mount.point)]
    except OSError:
        return None
    # The later of two mounts at the same point covers the other.
    return max(reversed(above), key=lambda mount: len(mount.point.parts), default=None)


def find_local_mount(path: Path) -> MountedFileSystem | None:
    mount = mount_of(path)
    if mount is None or not mount.is_local:
        return None
    place = existing(path)
    return None if any(place.is_relative_to(directory) for directory in _read_exports()) else mount


def is_shared(path: Path) -> bool:
    """Return True if a path is on a file system that other machines share, as far as this one knows."""
    return mount_of(path) is not None and find_local_mount(path) is None


def mounts() -> Iterator[MountedFileSystem]:
    """Yield Linux's mounts, proc_pid_mountinfo(5): type and source are the fields after the lone dash.

    Raise OSError if they cannot be read: no deletion may reach into an unseen mount.
    """
    for line in MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) > 4 and len(kind) > 1:
            yield MountedFileSystem(kind[0], Path(_unescape(place[4])), _unescape(kind[1]))


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _read_exports() -> Iterator[Path]:
    """Yield the directories that this machine exports to others, see exports(5)."""
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
                    yield Path(_unescape(directory[0]))


def room_at(path: Path) -> Room | None:
    """Return the room that the user has at a path; ``None`` if the file system does not report it."""
    place = existing(path)
    try:
        space, status = os.statvfs(place), place.stat()
    except OSError:
        return None
    if not space.f_blocks:
        return None
    free = space.f_bavail * space.f_frsize
    # The group of files that the user writes there.
    group = status.st_gid if status.st_mode & stat.S_ISGID else os.getgid()
    mount = mount_of(path)
    left = _quota_left(mount, group) if mount is not None else None
    return Room(left, "quota") if left is not None and left < free else Room(free, "file system")


def _quota_left(mount: MountedFileSystem, group: int) -> int | None:
    """Return the bytes that the quotas of the user and of a group leave; ``None`` without quotas."""
    if mount.kind == "lustre":
        who = (("-u", os.getuid()), ("-g", group))
        answers = [_output("lfs", "quota", "-q", flag, str(id), str(mount.point)).split() for flag, id in who]
        # In one line, or with the numbers in a second one after a long name.
        left = [_parse_left(answer[1:4]) for answer in answers if answer]
    else:
        answer = _output("quota", "-u", "-g", "-w", "-p")
        left = [_parse_left(row[1:4]) for row in _rows(answer, group) if row[:1] == [mount.source]]
    return min((bytes_left for bytes_left in left if bytes_left is not None), default=None)


def _rows(answer: str, group: int) -> Iterator[list[str]]:
    """Yield the rows of the user and of one group, among those of all groups of the user."""
    counts = True
    for line in answer.splitlines():
        heading = _OF_GROUP.search(line)
        if line.startswith("Disk quotas for"):
            counts = heading is None or int(heading[1]) == group
        elif counts:
            yield line.split()


def _parse_left(numbers: Iterable[str]) -> int | None:
    """Return the bytes left, from KiB used (starred beyond the limit), soft and hard limit; 0: no limit."""
    values = [text.rstrip("*") for text in numbers]
    if len(values) != 3 or not all(value.isdecimal() for value in values):
        return None
    used, soft, hard = map(int, values)
    limit = hard or soft
    return max(limit - used, 0) * _KIB if limit else None


def _output(*command: str) -> str:
    """Return the output of a command; an empty text if it does not exist or does not answer."""
    program = shutil.which(command[0])
    return _answer(program, *command[1:]) if program is not None else ""


@cache
def _answer(*command: str) -> str:
    """Return the output of a command, cached: it may take seconds, and a sweep's points share their disks."""
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
