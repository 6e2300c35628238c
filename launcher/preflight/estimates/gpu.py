"""Which GPU estimates count with."""

from __future__ import annotations

import re
from typing import NamedTuple

from launcher.hardware import ASSUMED, GPUS, Gpu
from launcher.plan import Resources
from launcher.preflight.facts import Facts

_GRES_TYPE = re.compile(r"gpu:([\w.-]+):\d+")


class Counted(NamedTuple):
    """A GPU and who says that it is there; `is_assumed` if nobody does."""

    gpu: Gpu
    source: str
    is_assumed: bool = False


def gpu_of(resources: Resources, facts: Facts) -> Counted:
    """`cluster.gpu`, else what `cluster.gres` names, else what the cluster says, else what is assumed."""
    if resources.gpu is not None:
        return Counted(GPUS[resources.gpu], "cluster.gpu")
    named = _GRES_TYPE.fullmatch(resources.gres or "")
    if named and (found := _by_site_name(named[1])):
        return Counted(found, f"cluster.gres={resources.gres}")
    types = facts.cluster.gpu_types if facts.cluster is not None else None
    if types and len(types) == 1 and (found := _by_site_name(types[0])):
        return Counted(found, f"the cluster's {types[0]}")
    return Counted(ASSUMED, "assumed: cluster.gpu is null", is_assumed=True)


def _by_site_name(name: str) -> Gpu | None:
    """The GPU that a site means: ``h100``, ``nvidia_h100_80gb_hbm3``; ``None`` if it is one of several."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    found = [gpu for gpu in GPUS.values() if words >= set(gpu.name.split("-"))]
    if not found:
        found = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]
    return found[0] if len(found) == 1 else None
