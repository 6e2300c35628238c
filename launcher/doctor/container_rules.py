"""Rules about Slurm, Pyxis and Enroot: pure functions of the gathered facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.checks.findings import Finding, Severity
from launcher.doctor.facts import Directory, Enroot, Image, Machine, Requirements
from launcher.doctor.report import SLURM, missing, ok, release_status, thing, unknown, warning
from launcher.estimates.values import memory_text
from launcher.images.tools import explain_install
from launcher.slurm.cluster import ClusterFacts
from launcher.slurm.commands import WITHOUT_SLURM

_GIB = 2**30
# An image is this much larger unpacked than compressed, as a rule.
_UNPACKED_FACTOR = 2.5
# The room for an image of unknown size: NVIDIA's frameworks take tens of gigabytes.
_USUAL_ROOM = 60 * _GIB
_CACHE_ROOM = 20 * _GIB

# Enroot's conf/hooks/98-nvidia.sh: without it no container sees a GPU.
_NVIDIA_HOOK = "98-nvidia.sh"
_GPU_TOOLS = "install libnvidia-container-tools (NVIDIA Container Toolkit)"
WITHOUT_GPU_TOOLS = f"{_GPU_TOOLS}; on nodes without GPUs: env_vars.NVIDIA_VISIBLE_DEVICES=void"
_PYTORCH_HOOK = "50-slurm-pytorch.sh"
_CALLS = (
    *("awk", "curl", "find", "flock", "grep", "jq", "parallel", "sed", "tar", "zstd"),
    *("gzip", "mksquashfs", "unsquashfs"),
)
# Containers start with these calls; imports need all of them.
_STARTS = ("awk", "find", "flock", "grep", "sed", "unsquashfs")
_REQUIREMENTS = "see doc/requirements.md of Enroot"


def enroot_lines(
    machine: Machine, needs: Requirements, image: Image | None, *, is_node: bool
) -> Iterator[Finding]:
    """Report Enroot on one machine; only nodes start containers with it, others may import images."""
    needed, enroot = needs.enroot and is_node, machine.enroot
    if enroot is None:
        without = "containers start through it" if is_node else "images are imported through skopeo and umoci"
        yield missing("enroot", f"not on PATH: {without}", explain_install("enroot"), needed=needed)
        return
    yield _program(machine, enroot, needed, is_node)
    yield _runtime(machine.places["enroot runtime"], needed)
    yield _data(machine.places["enroot data"], needed, image)
    if not is_node or image is None or image.path is None:  # nodes do not import an image file
        yield _cache(machine.places["enroot cache"])
        yield _temp(machine.places["enroot temp"])
    yield _mqueue(machine, enroot, needed)
    yield _hooks(machine, enroot, image if is_node else None, needed)
    yield _namespaces(machine, needed)


def _program(machine: Machine, enroot: Enroot, needed: bool, is_node: bool) -> Finding:
    text = f"{enroot.version or 'of unknown version'}, {enroot.conf or 'no enroot.conf'}"
    text += "".join(f"; {name}={value}" for name, value in enroot.settings.items())
    if enroot.trouble is not None:
        return warning("enroot", f"{text}: {enroot.trouble}", "bash -n shows the error", needed=needed)
    tools = {*machine.tools, *(["gzip"] if "pigz" in machine.tools else [])}
    lacking = [name for name in _CALLS if name not in tools]
    lacking_to_start = [name for name in lacking if name in _STARTS]
    if is_node and lacking_to_start:
        text += f"; {_join_names(lacking_to_start)} missing: containers cannot be started"
        return missing("enroot", text, f"install {' '.join(lacking_to_start)} on the nodes", needed=needed)
    if lacking and not is_node:
        fix = f"install {' '.join(lacking)}; or leave imports to skopeo and umoci"
        return warning(
            "enroot", f"{text}; {_join_names(lacking)} missing: images cannot be imported", fix, needed=needed
        )
    return ok("enroot", text, needed=needed)


def _directory(
    what: str, place: Directory, needed: bool, troubles: Sequence[tuple[bool, Severity, str]], fix: str
) -> Finding:
    """Return the line of a directory, with the first of the `troubles` that holds."""
    mounted = "" if place.path == place.point else f", mounted at {place.point}"
    text = f"{place.path} ({place.kind}{mounted})"
    for is_so, severity, trouble in troubles:
        if is_so:
            return thing(what, f"{text}: {trouble}", fix, severity=severity, needed=needed, free=place.free)
    return ok(what, text, needed=needed, free=place.free)


def _is_small(place: Directory, room: int) -> bool:
    return place.free is not None and place.free < room


def _describe_no_write(place: Directory) -> str:
    return f"you may not write to {place.there}"


def _runtime(place: Directory, needed: bool) -> Finding:
    setting = "ENROOT_RUNTIME_PATH in enroot.conf: a local directory"
    is_full = place.writable and _is_small(place, 2**20)
    troubles = (
        (not place.writable, Severity.MISSING, f"{_describe_no_write(place)}, and Enroot does not start"),
        (is_full, Severity.MISSING, "full"),
        (not place.is_local, Severity.WARNING, "shared; nodes get in each other's way"),
    )
    fix = f"make room there, or {setting}" if is_full else setting
    return _directory("enroot.runtime", place, needed, troubles, fix)


def _data(place: Directory, needed: bool, image: Image | None) -> Finding:
    """Report the directory in which containers are unpacked."""
    size = image.size if image is not None else None
    unpacked = int(size * _UNPACKED_FACTOR) if size is not None else _USUAL_ROOM
    whose = "the image" if size is not None else "an image of a framework"
    room = f"{whose} takes about {memory_text(unpacked)} unpacked"
    troubles = (
        (not place.writable, Severity.MISSING, f"{_describe_no_write(place)}, and no image can be unpacked"),
        (not place.is_local, Severity.WARNING, "shared; every node unpacks the image there, and removes it"),
        (_is_small(place, unpacked), Severity.WARNING, room),
        (place.is_memory, Severity.WARNING, "images take the machine's memory"),
    )
    fix = "ENROOT_DATA_PATH in enroot.conf: a local disk with room, such as /tmp/enroot-data-$(id -u)"
    return _directory("enroot.data", place, needed, troubles, fix)


def _cache(place: Directory) -> Finding:
    is_small = place.is_memory or _is_small(place, _CACHE_ROOM)
    troubles = (
        (not place.writable, Severity.WARNING, _describe_no_write(place)),
        (is_small, Severity.WARNING, f"an image's layers take {memory_text(_CACHE_ROOM)} and more"),
    )
    fix = "ENROOT_CACHE_PATH: a directory with room; your home's quota is soon full"
    return _directory("enroot.cache", place, False, troubles, fix)


def _temp(place: Directory) -> Finding:
    """Report the directory in which an import puts layers together."""
    room = f"an import of a framework's image takes about {memory_text(_USUAL_ROOM)} there"
    troubles = (
        (not place.writable, Severity.WARNING, _describe_no_write(place)),
        (place.is_memory, Severity.WARNING, "imports take the machine's memory"),
        (_is_small(place, _USUAL_ROOM), Severity.WARNING, room),
        (not place.is_local, Severity.WARNING, "shared, and slow"),
    )
    fix = "TMPDIR or ENROOT_TEMP_PATH: a local disk with room; slipway image import --temp-dir=..."
    return _directory("enroot.temp", place, False, troubles, fix)


def stage_lines(node: Machine, image: Image | None) -> Iterator[Finding]:
    """Report the directory of the image's copy on each node; without room the tasks use the shared file."""
    place = node.places.get("stage")
    if place is None or image is None or image.path is None:
        return
    troubles = (
        (not place.writable, Severity.WARNING, _describe_no_write(place)),
        (not place.is_local, Severity.WARNING, "on a shared file system: no speed-up"),
        (
            image.size is not None and _is_small(place, image.size),
            Severity.WARNING,
            f"no room for the image's {memory_text(image.size or 0)}",
        ),
    )
    fix = "container_options.stage_to=... on a local disk, or null"
    yield _directory("image.stage", place, False, troubles, fix)


def _mqueue(machine: Machine, enroot: Enroot, needed: bool) -> Finding:
    what, text = "enroot.mqueue", "/dev/mqueue is not mounted"
    if machine.mqueue:
        return ok(what, "/dev/mqueue is mounted")
    if enroot.binds_mqueue or "ENROOT_RESTRICT_DEV" in enroot.settings:
        fix = "mount -t mqueue mqueue /dev/mqueue (root; systemd does it: dev-mqueue.mount)"
        text += ", and Enroot is configured to bind it: containers do not start"
        return missing(what, text, fix, needed=needed)
    return ok(what, f"{text}: containers start without it, and have no POSIX message queues")


def _hooks(machine: Machine, enroot: Enroot, image: Image | None, needed: bool) -> Finding:
    what, has_gpus = "enroot.hooks", machine.gpus is not None and bool(machine.gpus.names)
    if has_gpus and _NVIDIA_HOOK not in enroot.hooks:
        text, fix = f"no {_NVIDIA_HOOK}: containers do not see the GPUs", "put it into hooks.d"
        return missing(what, text, f"it is in Enroot's conf/hooks: {fix}", needed=needed)
    if _NVIDIA_HOOK in enroot.hooks and "nvidia-container-cli" not in machine.tools:
        fault = "calls nvidia-container-cli, which is missing"
        if has_gpus:
            text = f"{_NVIDIA_HOOK} {fault}: containers do not start"
            return missing(what, text, _GPU_TOOLS, needed=needed)
        if image is not None and image.wants_gpus:
            text = f"the image has NVIDIA_VISIBLE_DEVICES={image.devices}, for which {_NVIDIA_HOOK} {fault}"
            return missing(what, f"{text}: the image does not start", WITHOUT_GPU_TOOLS, needed=needed)
    names = [name for name in (_NVIDIA_HOOK, _PYTORCH_HOOK) if name in enroot.hooks]
    text = f"{len(enroot.hooks)} hooks{', with ' + _join_names(names) if names else ''}"
    if _PYTORCH_HOOK not in enroot.hooks:
        text += f"; no {_PYTORCH_HOOK}, which Slipway's jobs do not need"
    return ok(what, text)


def _namespaces(machine: Machine, needed: bool) -> Finding:
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
    reasons, steps = ", ".join(why for why, _ in troubles), "; ".join(step for _, step in troubles)
    if not troubles and machine.no_namespaces is not None:
        fix = f"root, or a security module, forbids it ({_REQUIREMENTS})"
        return missing(what, f"not allowed: {machine.no_namespaces}", fix, needed=needed)
    if not troubles or machine.uid == 0:
        return ok(what, f"root may; others may not: {reasons}" if troubles else "allowed")
    if "apparmor_restrict_unprivileged_userns=1" in reasons:
        # Whether Enroot has an AppArmor profile cannot be detected here.
        fix = f"as root: {steps}; or Enroot's AppArmor profile, which may be there already"
        return warning(what, f"not allowed: {reasons}", fix, needed=needed)
    return missing(what, f"not allowed: {reasons}", f"as root: {steps} ({_REQUIREMENTS})", needed=needed)


def _join_names(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


_PYXIS = "Pyxis is at https://github.com/NVIDIA/pyxis#installation"
_ASK = "ask whoever runs the cluster for"


def slurm_lines(slurm: ClusterFacts, needs: Requirements) -> Iterator[Finding]:
    """Report Slurm's configuration and its nodes."""
    needed = needs.scheduler != "local"
    if slurm.settings is None:
        yield missing("slurm", slurm.why_silent or "", WITHOUT_SLURM, needed=needed)
        return
    settings = slurm.settings.values
    version = settings.get("SLURM_VERSION", "of unknown version")
    severity, note = release_status(version, SLURM)
    answers = f"{version}, cluster {settings.get('ClusterName', 'of no name')}: the controller answers"
    yield thing("slurm", f"{answers}; {note}" if note else answers, severity=severity, needed=needed)
    yield _accounting(settings.get("AccountingStorageType", ""))
    yield _select(settings.get("SelectType", ""), settings.get("SelectTypeParameters", ""))
    yield _cgroups(settings.get("ProctrackType", ""), settings.get("TaskPlugin", ""))
    yield _nodes(slurm, needed)


def _accounting(kind: str) -> Finding:
    what = "slurm.accounting"
    if kind.endswith("slurmdbd"):
        return ok(what, kind)
    text = "sacct has no records; how a job ended is known only from the files that it left"
    fix = f"{_ASK} AccountingStorageType=accounting_storage/slurmdbd"
    return warning(what, f"{_format_kind(kind)}: {text}", fix)


def _select(kind: str, parameters: str) -> Finding:
    what, text = "slurm.select", f"{_format_kind(kind)} {parameters}".strip()
    if kind.endswith("cons_tres"):
        return ok(what, text)
    flags = "--gpus-per-node and --gpus-per-task are not taken"
    text += f": {'jobs get whole nodes' if kind.endswith('linear') else flags}"
    fix = f"cluster.gpu_request=gres cluster.gres=gpu:8, or {_ASK} SelectType=select/cons_tres"
    return warning(what, text, fix)


def _cgroups(track: str, tasks: str) -> Finding:
    what, text, effects = "slurm.cgroups", f"{_format_kind(track)}, {_format_kind(tasks)}", []
    if not track.endswith("cgroup"):
        effects.append("a process that leaves its group outlives its job")
    if "task/cgroup" not in tasks:
        effects.append("a job sees the cores and GPUs of others")
    if not effects:
        return ok(what, text)
    fix = f"{_ASK} ProctrackType=proctrack/cgroup and TaskPlugin=task/cgroup,task/affinity"
    return warning(what, f"{text}: {'; '.join(effects)}", fix)


def _nodes(slurm: ClusterFacts, needed: bool) -> Finding:
    what = "slurm.nodes"
    if not slurm.nodes:
        return warning(what, "Slurm shows no nodes", "sinfo --all")
    usable = {name: sum(node.is_usable for node in nodes) for name, nodes in slurm.nodes.items()}
    parts = [f"{name}: {usable[name]} of {len(nodes)}" for name, nodes in slurm.nodes.items()]
    types = {name for nodes in slurm.nodes.values() for node in nodes for name, _ in node.gpus}
    names = [name or "without a type" for name in sorted(types)]
    gpus = f"GPUs: {', '.join(names)}" if names else "no GPUs"
    text = f"nodes that take jobs: {', '.join(parts)}; {gpus}"
    if any(usable.values()):
        return ok(what, text, needed=needed)
    return missing(what, text, "why: sinfo --list-reasons", needed=needed)


def pyxis_line(slurm: ClusterFacts, needs: Requirements, this_machine: Machine) -> Finding:
    """Report Pyxis on this machine: the options of srun, and its line in plugstack.conf."""
    what, at, needed = "pyxis", this_machine.plugstack, needs.enroot
    options = [f"{name}={value}" for name, value in at.options.items()]
    line = f"; {at.at}: {' '.join([at.plugin or '', *options])}" if at.at else ""
    if slurm.pyxis:
        return ok(what, f"srun takes --container-image{line}", needed=needed)
    if slurm.pyxis is None:
        text = "srun does not say whether it takes --container-image"
        return unknown(what, text, needed=needed)
    if at.at:
        text = f"srun does not take --container-image, although plugstack.conf has Pyxis{line}"
        gone = f"{at.plugin} is missing" if at.there is False else "`srun --help` says why it is not loaded"
        return missing(what, text, f"{gone}: it is built for one release of Slurm", needed=needed)
    fix = (
        f"{_PYXIS}; without it: container_options.runtime=apptainer, or container=null" if needed else _PYXIS
    )
    return missing(what, "srun does not take --container-image", fix, needed=needed)


def pyxis_node_lines(node: Machine, needs: Requirements, image: Image | None) -> Iterator[Finding]:
    if not needs.enroot:
        return
    at, place = node.plugstack, node.places.get("pyxis runtime")
    if at.there is False:
        text = f"{at.at}: {at.plugin} is missing"
        yield missing("pyxis.plugin", text, f"install it on this node: {_PYXIS}", needed=True)
    elif at.at:
        yield ok("pyxis.plugin", f"{at.at}: {at.plugin}", needed=True)
    if place is None or image is None or image.registry is None:
        return
    text = f"{place.path} ({place.kind}): Pyxis writes a registry's image there, on each node"
    if place.is_memory:
        fix = f"once for all: slipway image import '{image.name}'"
        yield warning("pyxis.runtime", f"{text}, in memory", fix, free=place.free)
    else:
        yield ok("pyxis.runtime", text, free=place.free)


def _format_kind(kind: str) -> str:
    return kind if kind and kind != "(null)" else "none"
