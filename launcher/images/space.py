"""Where an image is unpacked: known to have room beforehand."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from launcher.errors import UserError, one_line
from launcher.file_systems import is_shared, mount_of, room_at
from launcher.images.progress import megabytes

_MEMORY = ("tmpfs", "ramfs")
_MEMINFO = Path("/proc/meminfo")
# Of the memory that is free: the rest of the machine needs some too.
_MEMORY_PART = 2


class Needs(NamedTuple):
    """Bytes that are written while an image is made, and those that stay; 0 where it cannot be told."""

    temporary: int
    final: int


class Place(NamedTuple):
    """A directory that may serve, and what is known of it."""

    path: Path
    free: int
    in_memory: bool
    shared: bool
    device: int


Look = Callable[[Path], Place | None]


def look(path: Path) -> Place | None:
    """What is known of a directory; ``None`` if nothing can be written there."""
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        return None
    room, mount = room_at(path), mount_of(path)
    if room is None:
        return None
    in_memory = mount is not None and mount.kind in _MEMORY
    free = min(room.free_bytes, _free_memory() // _MEMORY_PART) if in_memory else room.free_bytes
    return Place(path, free, in_memory, is_shared(path), path.stat().st_dev)


def place(
    needs: Needs,
    target: Path,
    chosen: Path | None = None,
    environment: Mapping[str, str] | None = None,
    look: Look = look,
) -> Path:
    """The directory to work in: a disk of this machine, the roomiest; then the network's; then memory.

    Parameters
    ----------
    target
        The image, in a directory that is there and must have room for what stays.
    chosen
        What the user wants it to be.

    Raises
    ------
    UserError
        If nothing has room, with the numbers.
    """
    environment = os.environ if environment is None else environment
    home = look(target.parent)
    if home is not None and home.free < needs.final:
        raise UserError(
            f"{one_line(str(target.parent))}: the image needs about {megabytes(needs.final)} there, and "
            f"{megabytes(home.free)} are free",
            hint="remove images that nobody uses, `slipway image prune`, or choose another place: "
            "images_dir=DIR",
        )
    places = _looked_at(chosen, target, environment, look)
    fitting = [one for one in places if one.free >= _needed_at(one, needs, home)]
    if not fitting:
        raise _no_room(needs, places, chosen)
    return min(fitting, key=lambda one: (one.in_memory, one.shared, -one.free)).path


def _looked_at(chosen: Path | None, target: Path, environment: Mapping[str, str], look: Look) -> list[Place]:
    if chosen is not None:
        mine = look(chosen)
        if mine is None:
            raise UserError(
                f"--temp-dir {one_line(str(chosen))}: no directory that can be written to",
                hint="make it, or choose another",
            )
        return [mine]
    named = [environment.get(name) for name in ("ENROOT_TEMP_PATH", "TMPDIR")]
    candidates = [*(Path(name) for name in named if name), Path("/tmp"), Path("/var/tmp"), target.parent]
    first: dict[int, Place] = {}
    for path in candidates:
        found = look(path.absolute())
        # Of those on one file system the first: what the user named goes before what there always is.
        if found is not None:
            first.setdefault(found.device, found)
    return list(first.values())


def _needed_at(one: Place, needs: Needs, home: Place | None) -> int:
    same = home is not None and one.device == home.device
    return needs.temporary + needs.final * same


def _no_room(needs: Needs, places: list[Place], chosen: Path | None) -> UserError:
    free = ", ".join(f"{megabytes(one.free)} in {one_line(str(one.path))}" for one in places)
    what = f"--temp-dir {one_line(str(chosen))} has too little room" if chosen else "no room to work in"
    return UserError(
        f"{what}: unpacking the image needs about {megabytes(needs.temporary)}"
        + (f", and there are {free}" if free else ""),
        hint="make room there, or name a directory that has it: --temp-dir DIR",
    )


def _free_memory() -> int:
    """What programs may still take, in bytes (proc_meminfo(5)); nothing where it cannot be told."""
    try:
        lines = _MEMINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
