"""Slurm and Pyxis, judged: pure functions of what was gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.doctor.facts import Image, Machine, Needs, Slurm
from launcher.doctor.lines import Line, Status
from launcher.doctor.proven import SLURM, judge
from launcher.slurm.commands import WITHOUT_SLURM

_PYXIS = "Pyxis is at https://github.com/NVIDIA/pyxis#installation"
_ASK = "ask whoever runs the cluster for"


def slurm_lines(slurm: Slurm, needs: Needs) -> Iterator[Line]:
    """What Slurm says of itself."""
    needed = needs.scheduler != "local"
    if slurm.why is not None:
        yield Line("slurm", Status.MISSING, slurm.why, WITHOUT_SLURM, needed)
        return
    told = slurm.settings
    version = told.get("SLURM_VERSION", "of unknown version")
    cluster = told.get("ClusterName", "of no name")
    status, note = judge(version, SLURM)
    answers = f"{version}, cluster {cluster}: the controller answers"
    yield Line("slurm", status, f"{answers}; {note}" if note else answers, needed=needed)
    yield _accounting(told.get("AccountingStorageType", ""))
    yield _select(told.get("SelectType", ""), told.get("SelectTypeParameters", ""))
    yield _cgroups(told.get("ProctrackType", ""), told.get("TaskPlugin", ""))
    yield from _nodes(slurm, needed)


def _accounting(kind: str) -> Line:
    if kind.endswith("slurmdbd"):
        return Line("slurm.accounting", Status.OK, kind)
    return Line(
        "slurm.accounting",
        Status.WARNING,
        f"{_plain(kind)}: sacct tells nothing; how a job ended is known from what it left behind alone",
        f"{_ASK} AccountingStorageType=accounting_storage/slurmdbd",
    )


def _select(kind: str, parameters: str) -> Line:
    told = f"{_plain(kind)} {parameters}".strip()
    if kind.endswith("cons_tres"):
        return Line("slurm.select", Status.OK, told)
    why = (
        "jobs get whole nodes"
        if kind.endswith("linear")
        else "--gpus-per-node and --gpus-per-task are not taken"
    )
    return Line(
        "slurm.select",
        Status.WARNING,
        f"{told}: {why}",
        f"cluster.gpu_request=gres cluster.gres=gpu:8, or {_ASK} SelectType=select/cons_tres",
    )


def _cgroups(track: str, tasks: str) -> Line:
    told = f"{_plain(track)}, {_plain(tasks)}"
    if track.endswith("cgroup") and "task/cgroup" in tasks:
        return Line("slurm.cgroups", Status.OK, told)
    lost = []
    if not track.endswith("cgroup"):
        lost.append("a process that leaves its group outlives its job")
    if "task/cgroup" not in tasks:
        lost.append("a job sees the cores and GPUs of others")
    return Line(
        "slurm.cgroups",
        Status.WARNING,
        f"{told}: {'; '.join(lost)}",
        f"{_ASK} ProctrackType=proctrack/cgroup and TaskPlugin=task/cgroup,task/affinity",
    )


def _nodes(slurm: Slurm, needed: bool) -> Iterator[Line]:
    if not slurm.nodes:
        yield Line("slurm.nodes", Status.WARNING, "Slurm shows no nodes", "sinfo --all")
        return
    usable = sum(have for _, have in slurm.nodes.values())
    parts = [f"{name}: {have} of {total}" for name, (total, have) in slurm.nodes.items()]
    told = f"nodes that take jobs: {', '.join(parts)}"
    names = [name or "without a type" for name in slurm.gpus]
    told += f"; GPUs: {', '.join(names)}" if names else "; no GPUs"
    if usable:
        yield Line("slurm.nodes", Status.OK, told, needed=needed)
    else:
        yield Line("slurm.nodes", Status.MISSING, told, "why: sinfo --list-reasons", needed)


def pyxis_lines(slurm: Slurm, needs: Needs, login: Machine) -> Iterator[Line]:
    """Pyxis where jobs are submitted: what srun takes, and where it is configured."""
    at = login.plugstack
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
        told = f"srun does not take --container-image, although plugstack.conf has Pyxis{where}"
        gone = f"{at.plugin} is not there" if at.there is False else "`srun --help` says why it is not loaded"
        yield Line(
            "pyxis", Status.MISSING, told, f"{gone}: it is built for one release of Slurm", needs.enroot
        )
    else:
        fix = (
            f"{_PYXIS}; without it: container_options.runtime=apptainer, or container=null"
            if needs.enroot
            else _PYXIS
        )
        yield Line("pyxis", Status.MISSING, "srun does not take --container-image", fix, needs.enroot)


def pyxis_node_lines(node: Machine, needs: Needs, image: Image | None) -> Iterator[Line]:
    """Pyxis where tasks are started."""
    if not needs.enroot:
        return
    at = node.plugstack
    if at.there is False:
        told = f"{at.at}: {at.plugin} is not there"
        yield Line("pyxis.plugin", Status.MISSING, told, f"install it on this node: {_PYXIS}", True)
    elif at.at:
        yield Line("pyxis.plugin", Status.OK, f"{at.at}: {at.plugin}", needed=True)
    place = node.places.get("pyxis runtime")
    if place is None or image is None or image.registry is None:
        return
    told = f"{place.path} ({place.kind}): Pyxis writes a registry's image there, on each node"
    yield Line(
        "pyxis.runtime",
        Status.WARNING if place.is_memory else Status.OK,
        f"{told}, in memory" if place.is_memory else told,
        f"once for all: slipway image import '{image.name}'" if place.is_memory else None,
        free=place.free,
    )


def _options(options: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


def _plain(kind: str) -> str:
    return kind if kind and kind != "(null)" else "none"
