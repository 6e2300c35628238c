"""Enroot and what it needs of a machine, judged: pure functions of what was gathered."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.doctor.facts import Enroot, Image, Machine, Needs, Place
from launcher.doctor.lines import Line, Status, gib
from launcher.images.tools import how_to_get

_GIB = 2**30
# An image is this much larger unpacked than compressed, as a rule.
_UNPACKED_FACTOR = 2.5
# Where an image's size is not known: those of NVIDIA's frameworks take tens of gigabytes.
_USUAL_ROOM = 60 * _GIB
_CACHE_ROOM = 20 * _GIB

# Enroot's conf/hooks/98-nvidia.sh: without it no container sees a GPU.
_NVIDIA_HOOK = "98-nvidia.sh"
WITHOUT_GPU_TOOLS = (
    "install libnvidia-container-tools (NVIDIA Container Toolkit); on nodes without GPUs:"
    " env_vars.NVIDIA_VISIBLE_DEVICES=void"
)
_PYTORCH_HOOK = "50-slurm-pytorch.sh"
_CALLS = ("awk", "curl", "find", "flock", "grep", "jq", "parallel", "sed", "tar", "zstd")
# What each part of it calls: containers are started with these, and all are needed for imports.
_STARTS = ("awk", "find", "flock", "grep", "sed")
_REQUIREMENTS = "see doc/requirements.md of Enroot"


def enroot_lines(machine: Machine, needs: Needs, image: Image | None, *, is_node: bool) -> Iterator[Line]:
    """Enroot on one machine; only nodes start containers with it.

    Parameters
    ----------
    is_node
        The machine runs jobs; else it may import images.
    """
    needed = needs.enroot and is_node
    enroot = machine.enroot
    if enroot is None:
        without = "containers start through it" if is_node else "images are imported through skopeo and umoci"
        yield Line("enroot", Status.MISSING, f"not on PATH: {without}", how_to_get("enroot"), needed)
        return
    yield _program(machine, enroot, needed, is_node)
    yield _runtime(machine.places["enroot runtime"], needed)
    yield _data(machine.places["enroot data"], needed, image)
    if not is_node or image is None or image.path is None:  # a node that is given a file imports nothing
        yield _cache(machine.places["enroot cache"])
        yield _temp(machine.places["enroot temp"])
    yield _mqueue(machine, enroot, needed)
    yield _hooks(machine, enroot, image if is_node else None, needed)
    yield from _namespaces(machine, needed)


def _program(machine: Machine, enroot: Enroot, needed: bool, is_node: bool) -> Line:
    told = f"{enroot.version or 'of unknown version'}, {enroot.conf or 'no enroot.conf'}"
    told += "".join(f"; {name}={value}" for name, value in enroot.settings.items())
    if enroot.trouble is not None:
        return Line(
            "enroot", Status.WARNING, f"{told}: {enroot.trouble}", "bash -n tells where it is wrong", needed
        )
    lacking = [name for name in _CALLS if name not in machine.tools]
    if "pigz" not in machine.tools and "gzip" not in machine.tools:
        lacking.append("gzip")
    lacking += [name for name in ("mksquashfs", "unsquashfs") if name not in machine.tools]
    stops = [name for name in lacking if name in (*_STARTS, "unsquashfs")]
    if is_node and stops:
        fix = "install what is missing on the nodes"
        return Line(
            "enroot", Status.MISSING, f"{told}; without {_listed(stops)} it starts nothing", fix, needed
        )
    if lacking and not is_node:
        fix = f"install {' '.join(lacking)}; or leave imports to skopeo and umoci"
        return Line(
            "enroot", Status.WARNING, f"{told}; without {_listed(lacking)} it imports nothing", fix, needed
        )
    return Line("enroot", Status.OK, told, needed=needed)


def _runtime(place: Place, needed: bool) -> Line:
    what, told = "enroot.runtime", _described(place)
    setting = "ENROOT_RUNTIME_PATH in enroot.conf: a directory of this machine's own"
    if not place.writable:
        told = f"{told}: you may not write to {place.there}, and Enroot does not start"
        return Line(what, Status.MISSING, told, setting, needed, place.free)
    if place.free is not None and place.free < 2**20:
        return Line(
            what, Status.MISSING, f"{told}: full", f"make room there, or {setting}", needed, place.free
        )
    if not place.is_local:
        return Line(
            what,
            Status.WARNING,
            f"{told}: shared; nodes get in each other's way",
            setting,
            needed,
            place.free,
        )
    return Line(what, Status.OK, told, None, needed, place.free)


def _data(place: Place, needed: bool, image: Image | None) -> Line:
    """Where containers are unpacked."""
    what, told = "enroot.data", _described(place)
    setting = "ENROOT_DATA_PATH in enroot.conf: a local disk with room, such as /tmp/enroot-data-$(id -u)"
    size = image.size if image is not None else None
    wanted = int(size * _UNPACKED_FACTOR) if size is not None else _USUAL_ROOM
    if not place.writable:
        told = f"{told}: you may not write to {place.there}, and no image can be unpacked"
        return Line(what, Status.MISSING, told, setting, needed, place.free)
    if not place.is_local:
        told = f"{told}: shared; every node unpacks the image there, and removes it"
        return Line(what, Status.WARNING, told, setting, needed, place.free)
    if place.free is not None and place.free < wanted:
        whose = "the image" if size is not None else "an image of a framework"
        told = f"{told}: {whose} takes about {gib(wanted)} unpacked"
        return Line(what, Status.WARNING, told, setting, needed, place.free)
    if place.is_memory:
        return Line(
            what, Status.WARNING, f"{told}: images take the machine's memory", setting, needed, place.free
        )
    return Line(what, Status.OK, told, None, needed, place.free)


def _cache(place: Place) -> Line:
    """Where layers are kept that were downloaded."""
    what, told = "enroot.cache", _described(place)
    setting = "ENROOT_CACHE_PATH: a directory with room; your home's quota is soon full"
    if not place.writable:
        return Line(
            what, Status.WARNING, f"{told}: you may not write to {place.there}", setting, free=place.free
        )
    if place.is_memory or (place.free is not None and place.free < _CACHE_ROOM):
        told = f"{told}: an image's layers take {gib(_CACHE_ROOM)} and more"
        return Line(what, Status.WARNING, told, setting, free=place.free)
    return Line(what, Status.OK, told, free=place.free)


def _temp(place: Place) -> Line:
    """Where layers are put together for an import."""
    what, told = "enroot.temp", _described(place)
    setting = "TMPDIR or ENROOT_TEMP_PATH: a local disk with room; slipway image import --temp-dir=..."
    if not place.writable:
        return Line(
            what, Status.WARNING, f"{told}: you may not write to {place.there}", setting, free=place.free
        )
    if place.is_memory:
        return Line(
            what, Status.WARNING, f"{told}: imports take the machine's memory", setting, free=place.free
        )
    if place.free is not None and place.free < _USUAL_ROOM:
        told = f"{told}: an import of a framework's image takes about {gib(_USUAL_ROOM)} there"
        return Line(what, Status.WARNING, told, setting, free=place.free)
    if not place.is_local:
        return Line(what, Status.WARNING, f"{told}: shared, and slow", setting, free=place.free)
    return Line(what, Status.OK, told, free=place.free)


def _mqueue(machine: Machine, enroot: Enroot, needed: bool) -> Line:
    if machine.mqueue:
        return Line("enroot.mqueue", Status.OK, "/dev/mqueue is mounted")
    binds = enroot.binds_mqueue or "ENROOT_RESTRICT_DEV" in enroot.settings
    fix = "mount -t mqueue mqueue /dev/mqueue (root; systemd does it: dev-mqueue.mount)"
    if binds:
        told = "/dev/mqueue is not mounted, and Enroot is configured to bind it: containers do not start"
        return Line("enroot.mqueue", Status.MISSING, told, fix, needed)
    told = "/dev/mqueue is not mounted: containers start without it; POSIX message queues are not to be had"
    return Line("enroot.mqueue", Status.OK, told)


def _hooks(machine: Machine, enroot: Enroot, image: Image | None, needed: bool) -> Line:
    what = "enroot.hooks"
    has_gpus = machine.gpus is not None and bool(machine.gpus.names)
    if has_gpus and _NVIDIA_HOOK not in enroot.hooks:
        told = f"no {_NVIDIA_HOOK}: containers see none of the GPUs"
        return Line(what, Status.MISSING, told, "it is in Enroot's conf/hooks: put it into hooks.d", needed)
    if has_gpus and "nvidia-container-cli" not in machine.tools:
        told = f"{_NVIDIA_HOOK} calls nvidia-container-cli, which is not there: containers do not start"
        return Line(
            what, Status.MISSING, told, "install libnvidia-container-tools (NVIDIA Container Toolkit)", needed
        )
    if (
        image is not None
        and image.wants_gpus
        and _NVIDIA_HOOK in enroot.hooks
        and "nvidia-container-cli" not in machine.tools
    ):
        told = (
            f"the image has NVIDIA_VISIBLE_DEVICES={image.devices}, for which {_NVIDIA_HOOK} calls"
            " nvidia-container-cli, which is not there: the image does not start"
        )
        return Line(what, Status.MISSING, told, WITHOUT_GPU_TOOLS, needed)
    names = [name for name in (_NVIDIA_HOOK, _PYTORCH_HOOK) if name in enroot.hooks]
    told = f"{len(enroot.hooks)} hooks{', with ' + _listed(names) if names else ''}"
    if _PYTORCH_HOOK not in enroot.hooks:
        told += f"; no {_PYTORCH_HOOK}, which Slipway's jobs do not need"
    return Line(what, Status.OK, told)


def _namespaces(machine: Machine, needed: bool) -> Iterator[Line]:
    """Users' own namespaces: Enroot's doc/requirements.md, "Kernel settings"."""
    what, found = "user namespaces", machine.sysctls
    troubles = [
        (f"kernel.{name}={found[name]}", f"sysctl -w kernel.{name}={1 - found[name]}")
        for name, bad in (("unprivileged_userns_clone", 0), ("apparmor_restrict_unprivileged_userns", 1))
        if found.get(name) == bad
    ]
    troubles += [
        (f"user.{name}={found[name]}", f"sysctl -w user.{name}=65536")
        for name in ("max_user_namespaces", "max_mnt_namespaces")
        if found.get(name, 2) <= 1
    ]
    if machine.no_namespaces is not None and not troubles:
        fix = f"root, or a security module, forbids it ({_REQUIREMENTS})"
        yield Line(what, Status.MISSING, f"not allowed: {machine.no_namespaces}", fix, needed)
        return
    if not troubles or machine.uid == 0:
        told = f"root may; others may not: {', '.join(why for why, _ in troubles)}" if troubles else "allowed"
        yield Line(what, Status.OK, told)
        return
    told = f"not allowed: {', '.join(why for why, _ in troubles)}"
    fix = f"as root: {'; '.join(step for _, step in troubles)}"
    if "apparmor_restrict_unprivileged_userns=1" in told:
        fix += "; or Enroot's AppArmor profile, which may be there already"
        # A profile of Enroot's cannot be told from here: it is for the program, not for us.
        yield Line(what, Status.WARNING, told, fix, needed)
    else:
        yield Line(what, Status.MISSING, told, f"{fix} ({_REQUIREMENTS})", needed)


def _described(place: Place) -> str:
    if place.path == place.point:
        return f"{place.path} ({place.kind})"
    return f"{place.path} ({place.kind}, mounted at {place.point})"


def _listed(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
