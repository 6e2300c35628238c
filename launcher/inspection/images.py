"""Files that hold an image: Enroot's are squashfs."""

from __future__ import annotations

import struct
from pathlib import Path

from launcher.errors import nearest_files
from launcher.inspection.ground import Ground, opened, tells_of, told
from launcher.preflight.path_facts import Lack

_SUFFIXES = (".sqsh", ".squashfs")
_REGISTRY = "an image of a registry is such as container=nvcr.io#nvidia/nemo:24.07"

# The superblock of squashfs 4.0 (Linux, fs/squashfs/squashfs_fs.h): magic, 24 bytes, major and minor version,
# the root's inode, and how many bytes of the file are used; what follows is padding.
_SUPERBLOCK = struct.Struct("<4s24xHHQQ")
_MAGIC = b"hsqs"
_MAJOR = 4


def lost_image(ground: Ground) -> tuple[Lack, ...] | None:
    """An image that is a file must be there, and be one; those of registries are left to Enroot."""
    container = ground.plan.job.container
    if container is None or not ground.in_container or not Path(container.image).is_absolute():
        return None
    path = Path(container.image)
    if not tells_of(path):
        return (Lack("container", container.image, "not on this machine; every node must have it", False),)
    try:
        with opened(path) as stream:
            why = why_not_squashfs(stream.read(_SUPERBLOCK.size), stream.seek(0, 2))
    except OSError as error:
        why = told(error)
    fix = f"{nearest_files(path, _SUFFIXES)}\n{_REGISTRY}"
    if why is None:
        return ()
    return (ground.lost("container", container.image, why, certain=ground.tells_of(path), fix=fix),)


def why_not_squashfs(head: bytes, size: int) -> str | None:
    """Why a file that begins so and has so many bytes is no whole squashfs; ``None`` if it is one."""
    if not size:
        return "an empty file"
    if not head.startswith(_MAGIC):
        return "not a squashfs image: it does not begin as one"
    if len(head) < _SUPERBLOCK.size:
        return f"cut short: {size} bytes are less than a squashfs begins with"
    _, major, minor, _, used = _SUPERBLOCK.unpack_from(head)
    if major != _MAJOR:
        return f"squashfs of version {major}.{minor}, and Linux mounts 4.0"
    if size < used:
        return f"cut short: {size:,} bytes of a squashfs of {used:,}"
    return None
