"""Rules about Slurm, Pyxis and Enroot: pure functions of what was gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.doctor.facts import Directory, Enroot, Image, Machine, Requirements, Slurm
from launcher.doctor.report import SLURM, Line, Status, gib, release_status
from launcher.images.tools import how_to_get
from launcher.slurm.commands import WITHOUT_SLURM

_GIB = 2**30
# An image is this much larger unpacked than compressed, as a rule.
_UNPACKED_FACTOR = 2.5
# The room for an image of unknown size: NVIDIA's frameworks take tens of gigabytes.
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
# Containers start with these calls; imports need all of them.
_STARTS = ("awk", "find", "flock", "grep", "sed")
_REQUIREMENTS = "see doc/requirements.md of Enroot"


def enroot_lines(
    machine: Machine, needs: Requirements, image: Image | None, *, is_node: bool
) -> Iterator[Line]:
    """Report Enroot on one machine; only nodes start containers with it.

    Parameters
    ----------
    is_node
        True for a machine that runs jobs; others may import images.
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
    text = f"{enroot.version or 'of unknown version'}, {enroot.conf or 'no enroot.conf'}"
    text += "".join(f"; {name}={value}" for name, value in enroot.settings.items())
    if enroot.trouble is not None:
        return Line("enroot", Status.WARNING, f"{text}: {enroot.trouble}", "bash -n shows the error", needed)
    missing = [name for name in _CALLS if name not in machine.tools]
    if "pigz" not in machine.tools and "gzip" not in machine.tools:
        missing.append("gzip")
    missing += [name for name in ("mksquashfs", "unsquashfs") if name not in machine.tools]
    missing_to_start = [name for name in missing if name in (*_STARTS, "unsquashfs")]
    if is_node and missing_to_start:
        fix = "install what is missing on the nodes"
        return Line(
            "enroot",
            Status.MISSING,
            f"{text}; without {_listed(missing_to_start)} it starts nothing",
            fix,
            needed,
        )
    if missing and not is_node:
        fix = f"install {' '.join(missing)}; or leave imports to skopeo and umoci"
        return Line(
            "enroot", Status.WARNING, f"{text}; without {_listed(missing)} it imports nothing", fix, needed
        )
    return Line("enroot", Status.OK, text, needed=needed)


# What may be wrong with a directory: if it is, how bad that is, and the words for it.
_Troubles = Sequence[tuple[bool, Status, str]]


def _directory(what: str, place: Directory, needed: bool, troubles: _Troubles, fix: str) -> Line:
    """Return the line of a directory, with the first trouble that it has."""
    for is_so, status, trouble in troubles:
        if is_so:
            return Line(what, status, f"{_described(place)}: {trouble}", fix, needed, place.free)
    return Line(what, Status.OK, _described(place), None, needed, place.free)


def _runtime(place: Directory, needed: bool) -> Line:
    setting = "ENROOT_RUNTIME_PATH in enroot.conf: a directory of this machine's own"
    is_full = place.writable and place.free is not None and place.free < 2**20
    troubles = (
        (not place.writable, Status.MISSING, f"{_no_write(place)}, and Enroot does not start"),
        (is_full, Status.MISSING, "full"),
        (not place.is_local, Status.WARNING, "shared; nodes get in each other's way"),
    )
    fix = f"make room there, or {setting}" if is_full else setting
    return _directory("enroot.runtime", place, needed, troubles, fix)


def _data(place: Directory, needed: bool, image: Image | None) -> Line:
    """Report the directory in which containers are unpacked."""
    size = image.size if image is not None else None
    unpacked = int(size * _UNPACKED_FACTOR) if size is not None else _USUAL_ROOM
    is_small = place.free is not None and place.free < unpacked
    whose = "the image" if size is not None else "an image of a framework"
    troubles = (
        (not place.writable, Status.MISSING, f"{_no_write(place)}, and no image can be unpacked"),
        (not place.is_local, Status.WARNING, "shared; every node unpacks the image there, and removes it"),
        (is_small, Status.WARNING, f"{whose} takes about {gib(unpacked)} unpacked"),
        (place.is_memory, Status.WARNING, "images take the machine's memory"),
    )
    fix = "ENROOT_DATA_PATH in enroot.conf: a local disk with room, such as /tmp/enroot-data-$(id -u)"
    return _directory("enroot.data", place, needed, troubles, fix)


def _cache(place: Directory) -> Line:
    """Report the directory of downloaded layers."""
    is_small = place.is_memory or (place.free is not None and place.free < _CACHE_ROOM)
    troubles = (
        (not place.writable, Status.WARNING, _no_write(place)),
        (is_small, Status.WARNING, f"an image's layers take {gib(_CACHE_ROOM)} and more"),
    )
    fix = "ENROOT_CACHE_PATH: a directory with room; your home's quota is soon full"
    return _directory("enroot.cache", place, False, troubles, fix)


def _temp(place: Directory) -> Line:
    """Report the directory in which an import puts layers together."""
    is_small = place.free is not None and place.free < _USUAL_ROOM
    room = f"an import of a framework's image takes about {gib(_USUAL_ROOM)} there"
    troubles = (
        (not place.writable, Status.WARNING, _no_write(place)),
        (place.is_memory, Status.WARNING, "imports take the machine's memory"),
        (is_small, Status.WARNING, room),
        (not place.is_local, Status.WARNING, "shared, and slow"),
    )
    fix = "TMPDIR or ENROOT_TEMP_PATH: a local disk with room; slipway image import --temp-dir=..."
    return _directory("enroot.temp", place, False, troubles, fix)


def _no_write(place: Directory) -> str:
    return f"you may not write to {place.there}"


def _mqueue(machine: Machine, enroot: Enroot, needed: bool) -> Line:
    if machine.mqueue:
        return Line("enroot.mqueue", Status.OK, "/dev/mqueue is mounted")
    binds = enroot.binds_mqueue or "ENROOT_RESTRICT_DEV" in enroot.settings
    fix = "mount -t mqueue mqueue /dev/mqueue (root; systemd does it: dev-mqueue.mount)"
    if binds:
        text = "/dev/mqueue is not mounted, and Enroot is configured to bind it: containers do not start"
        return Line("enroot.mqueue", Status.MISSING, text, fix, needed)
    text = "/dev/mqueue is not mounted: containers start without it, and have no POSIX message queues"
    return Line("enroot.mqueue", Status.OK, text)


def _hooks(machine: Machine, enroot: Enroot, image: Image | None, needed: bool) -> Line:
    what = "enroot.hooks"
    has_gpus = machine.gpus is not None and bool(machine.gpus.names)
    if has_gpus and _NVIDIA_HOOK not in enroot.hooks:
        text = f"no {_NVIDIA_HOOK}: containers see none of the GPUs"
        return Line(what, Status.MISSING, text, "it is in Enroot's conf/hooks: put it into hooks.d", needed)
    if has_gpus and "nvidia-container-cli" not in machine.tools:
        text = f"{_NVIDIA_HOOK} calls nvidia-container-cli, which is not there: containers do not start"
        return Line(
            what, Status.MISSING, text, "install libnvidia-container-tools (NVIDIA Container Toolkit)", needed
        )
    if (
        image is not None
        and image.wants_gpus
        and _NVIDIA_HOOK in enroot.hooks
        and "nvidia-container-cli" not in machine.tools
    ):
        text = (
            f"the image has NVIDIA_VISIBLE_DEVICES={image.devices}, for which {_NVIDIA_HOOK} calls"
            " nvidia-container-cli, which is not there: the image does not start"
        )
        return Line(what, Status.MISSING, text, WITHOUT_GPU_TOOLS, needed)
    names = [name for name in (_NVIDIA_HOOK, _PYTORCH_HOOK) if name in enroot.hooks]
    text = f"{len(enroot.hooks)} hooks{', with ' + _listed(names) if names else ''}"
    if _PYTORCH_HOOK not in enroot.hooks:
        text += f"; no {_PYTORCH_HOOK}, which Slipway's jobs do not need"
    return Line(what, Status.OK, text)


def _namespaces(machine: Machine, needed: bool) -> Iterator[Line]:
    """Report users' own namespaces: Enroot's doc/requirements.md, "Kernel settings"."""
    what, sysctls = "user namespaces", machine.sysctls
    troubles = [
        (f"kernel.{name}={sysctls[name]}", f"sysctl -w kernel.{name}={1 - sysctls[name]}")
        for name, bad in (("unprivileged_userns_clone", 0), ("apparmor_restrict_unprivileged_userns", 1))
        if sysctls.get(name) == bad
    ]
    troubles += [
        (f"user.{name}={sysctls[name]}", f"sysctl -w user.{name}=65536")
        for name in ("max_user_namespaces", "max_mnt_namespaces")
        if sysctls.get(name, 2) <= 1
    ]
    if machine.no_namespaces is not None and not troubles:
        fix = f"root, or a security module, forbids it ({_REQUIREMENTS})"
        yield Line(what, Status.MISSING, f"not allowed: {machine.no_namespaces}", fix, needed)
        return
    if not troubles or machine.uid == 0:
        text = f"root may; others may not: {', '.join(why for why, _ in troubles)}" if troubles else "allowed"
        yield Line(what, Status.OK, text)
        return
    text = f"not allowed: {', '.join(why for why, _ in troubles)}"
    fix = f"as root: {'; '.join(step for _, step in troubles)}"
    if "apparmor_restrict_unprivileged_userns=1" in text:
        fix += "; or Enroot's AppArmor profile, which may be there already"
        # A profile of Enroot's cannot be told from here: it is for the program, not for us.
        yield Line(what, Status.WARNING, text, fix, needed)
    else:
        yield Line(what, Status.MISSING, text, f"{fix} ({_REQUIREMENTS})", needed)


def _described(place: Directory) -> str:
    if place.path == place.point:
        return f"{place.path} ({place.kind})"
    return f"{place.path} ({place.kind}, mounted at {place.point})"


def _listed(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


_PYXIS = "Pyxis is at https://github.com/NVIDIA/pyxis#installation"
_ASK = "ask whoever runs the cluster for"


def slurm_lines(slurm: Slurm, needs: Requirements) -> Iterator[Line]:
    """Report Slurm's configuration and its nodes."""
    needed = needs.scheduler != "local"
    if slurm.why is not None:
        yield Line("slurm", Status.MISSING, slurm.why, WITHOUT_SLURM, needed)
        return
    settings = slurm.settings
    version = settings.get("SLURM_VERSION", "of unknown version")
    cluster = settings.get("ClusterName", "of no name")
    status, note = release_status(version, SLURM)
    answers = f"{version}, cluster {cluster}: the controller answers"
    yield Line("slurm", status, f"{answers}; {note}" if note else answers, needed=needed)
    yield _accounting(settings.get("AccountingStorageType", ""))
    yield _select(settings.get("SelectType", ""), settings.get("SelectTypeParameters", ""))
    yield _cgroups(settings.get("ProctrackType", ""), settings.get("TaskPlugin", ""))
    yield from _nodes(slurm, needed)


def _accounting(kind: str) -> Line:
    if kind.endswith("slurmdbd"):
        return Line("slurm.accounting", Status.OK, kind)
    return Line(
        "slurm.accounting",
        Status.WARNING,
        f"{_plain(kind)}: sacct has no records; how a job ended is known only from the files that it left",
        f"{_ASK} AccountingStorageType=accounting_storage/slurmdbd",
    )


def _select(kind: str, parameters: str) -> Line:
    text = f"{_plain(kind)} {parameters}".strip()
    if kind.endswith("cons_tres"):
        return Line("slurm.select", Status.OK, text)
    why = (
        "jobs get whole nodes"
        if kind.endswith("linear")
        else "--gpus-per-node and --gpus-per-task are not taken"
    )
    return Line(
        "slurm.select",
        Status.WARNING,
        f"{text}: {why}",
        f"cluster.gpu_request=gres cluster.gres=gpu:8, or {_ASK} SelectType=select/cons_tres",
    )


def _cgroups(track: str, tasks: str) -> Line:
    text = f"{_plain(track)}, {_plain(tasks)}"
    if track.endswith("cgroup") and "task/cgroup" in tasks:
        return Line("slurm.cgroups", Status.OK, text)
    effects = []
    if not track.endswith("cgroup"):
        effects.append("a process that leaves its group outlives its job")
    if "task/cgroup" not in tasks:
        effects.append("a job sees the cores and GPUs of others")
    return Line(
        "slurm.cgroups",
        Status.WARNING,
        f"{text}: {'; '.join(effects)}",
        f"{_ASK} ProctrackType=proctrack/cgroup and TaskPlugin=task/cgroup,task/affinity",
    )


def _nodes(slurm: Slurm, needed: bool) -> Iterator[Line]:
    if not slurm.nodes:
        yield Line("slurm.nodes", Status.WARNING, "Slurm shows no nodes", "sinfo --all")
        return
    usable = sum(have for _, have in slurm.nodes.values())
    parts = [f"{name}: {have} of {total}" for name, (total, have) in slurm.nodes.items()]
    text = f"nodes that take jobs: {', '.join(parts)}"
    names = [name or "without a type" for name in slurm.gpus]
    text += f"; GPUs: {', '.join(names)}" if names else "; no GPUs"
    if usable:
        yield Line("slurm.nodes", Status.OK, text, needed=needed)
    else:
        yield Line("slurm.nodes", Status.MISSING, text, "why: sinfo --list-reasons", needed)


def pyxis_lines(slurm: Slurm, needs: Requirements, this_machine: Machine) -> Iterator[Line]:
    """Report Pyxis on this machine: the options of srun, and its line in plugstack.conf."""
    at = this_machine.plugstack
    where = f"; {at.at}: {' '.join([at.plugin or '', *_options(at.options)])}" if at.at else ""
    if slurm.pyxis:
        yield Line("pyxis", Status.OK, f"srun takes --container-image{where}", needed=needs.enroot)
    elif slurm.pyxis is None:
        yield Line(
            "pyxis",
            Status.UNKNOWN,
            "srun does not say whether it takes --container-image",
            None,
            needs.enroot,
        )
    elif at.at:
        text = f"srun does not take --container-image, although plugstack.conf has Pyxis{where}"
        gone = f"{at.plugin} is not there" if at.there is False else "`srun --help` says why it is not loaded"
        yield Line(
            "pyxis", Status.MISSING, text, f"{gone}: it is built for one release of Slurm", needs.enroot
        )
    else:
        fix = (
            f"{_PYXIS}; without it: container_options.runtime=apptainer, or container=null"
            if needs.enroot
            else _PYXIS
        )
        yield Line("pyxis", Status.MISSING, "srun does not take --container-image", fix, needs.enroot)


def pyxis_node_lines(node: Machine, needs: Requirements, image: Image | None) -> Iterator[Line]:
    """Report Pyxis on a node."""
    if not needs.enroot:
        return
    at = node.plugstack
    if at.there is False:
        text = f"{at.at}: {at.plugin} is not there"
        yield Line("pyxis.plugin", Status.MISSING, text, f"install it on this node: {_PYXIS}", True)
    elif at.at:
        yield Line("pyxis.plugin", Status.OK, f"{at.at}: {at.plugin}", needed=True)
    place = node.places.get("pyxis runtime")
    if place is None or image is None or image.registry is None:
        return
    text = f"{place.path} ({place.kind}): Pyxis writes a registry's image there, on each node"
    yield Line(
        "pyxis.runtime",
        Status.WARNING if place.is_memory else Status.OK,
        f"{text}, in memory" if place.is_memory else text,
        f"once for all: slipway image import '{image.name}'" if place.is_memory else None,
        free=place.free,
    )


def _options(options: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


def _plain(kind: str) -> str:
    return kind if kind and kind != "(null)" else "none"
