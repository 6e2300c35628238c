"""Facts for the rules of the doctor: a healthy machine, a healthy Slurm and an image."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.checks.findings import Finding
from launcher.doctor.facts import (
    Directory,
    Enroot,
    Gpus,
    Image,
    Machine,
    Plugstack,
    Requirements,
)
from launcher.slurm.cluster import ClusterFacts, Node, Settings

GIB = 2**30
_PROGRAMS = (
    *("awk", "bash", "buildah", "curl", "enroot", "find", "flock", "grep", "gzip", "jq", "mksquashfs"),
    *("parallel", "sed", "skopeo", "squashfuse", "tar", "umoci", "unsquashfs", "zstd"),
)

ON_PYXIS = Requirements(image=True)
BARE = Requirements(trainer=True)
NEMO = Image("nvcr.io#nvidia/nemo:24.07", registry="nvcr.io", cuda="12.5.0.023", compat_driver="555.42.02")
FILE = Image("/images/nemo.sqsh", path="/images/nemo.sqsh", size=10 * GIB)


def place(path: str = "/scratch/enroot", **other: Any) -> Directory:
    defaults = {"there": "/scratch", "kind": "xfs", "point": "/scratch", "source": "/dev/sda1"}
    return Directory(**{"path": path, **defaults, "free": 500 * GIB, "writable": True, **other})


def machine(without: Iterable[str] = (), places: dict[str, Directory] | None = None, **other: Any) -> Machine:
    tools = {name: "1.2" for name in _PROGRAMS if name not in set(without)}
    names = ("enroot runtime", "enroot data", "enroot cache", "enroot temp", "temporary")
    defaults = {
        "host": "n1",
        "uid": 1000,
        "python": "3.9.2",
        "tools": tools,
        "compressors": ("gzip", "lz4", "zstd"),
        "sysctls": {"max_user_namespaces": 9999, "unprivileged_userns_clone": 1},
        "file_systems": ("ext4", "squashfs", "overlay"),
        "fuse": True,
        "subordinate_ids": True,
        "mqueue": True,
        "places": {**{name: place() for name in names}, **(places or {})},
        "enroot": Enroot("3.5.0", "/etc/enroot/enroot.conf", hooks=("98-nvidia.sh",)),
    }
    return Machine(**{**defaults, **other})


UP = Node("n1", "idle", True, cpus=64, memory=512_000, gpus=(("a100", 8),))
DOWN = UP._replace(state="down", is_usable=False)


def slurm(**settings: str) -> ClusterFacts:
    defaults = {
        "SLURM_VERSION": "24.11.5",
        "ClusterName": "big",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CORE_MEMORY",
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/cgroup,task/affinity",
    }
    return ClusterFacts(
        settings=Settings(values={**defaults, **settings}), pyxis=True, nodes={"gpu": (UP, UP, UP, DOWN)}
    )


def gpus(driver: str = "550.54.15", cuda: str | None = "12.4", **other: Any) -> Gpus:
    return Gpus(driver, ("NVIDIA A100-SXM4-80GB",) * 8, cuda, **other)


def plugstack(**options: str) -> Plugstack:
    return Plugstack("/etc/slurm/plugstack.conf:3", "/usr/lib/slurm/spank_pyxis.so", True, options)


def line_about(lines: Iterable[Finding], what: str) -> Finding:
    """Return the only line about a thing."""
    (match,) = [line for line in lines if line.id == what]
    return match


def statuses_of(lines: Iterable[Finding]) -> dict[str, str]:
    """Return the status of each thing, with a ``!`` where the launch needs it."""
    return {line.id: f"{line.severity}{'!' if line.needed else ''}" for line in lines}
