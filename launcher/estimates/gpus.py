"""Which GPU estimates count with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from arithmetic.gpus import ASSUMED, GPUS, Gpu, named
from launcher.plan import Resources

_NOBODY = "assumed: cluster.gpu is null"


class Counted(NamedTuple):
    """A GPU and who says that it is there; `is_assumed` if nobody does, or not clearly."""

    gpu: Gpu
    source: str
    is_assumed: bool = False

    @property
    def is_unclear(self) -> bool:
        """Whether a type is named that no GPU, or more than one, is known by."""
        return self.is_assumed and self.source != _NOBODY


def known_gpus(resources: Resources) -> Mapping[str, Gpu]:
    """Return the table of GPUs with what the site adds to it, or changes."""
    return {**GPUS, **resources.gpu_types} if resources.gpu_types else GPUS


def gpu_of(resources: Resources, cluster_types: Sequence[str] = ()) -> Counted:
    """Return `cluster.gpu`, else what `cluster.gres` or the cluster names, else an assumption.

    `cluster_types` are the types of GPU that the cluster has, as far as they are known.
    """
    table = known_gpus(resources)
    if resources.gpu is not None:
        return Counted(table[resources.gpu], "cluster.gpu")
    told = resources.gpu_type
    if told is not None:
        return _meant(told, f"cluster.gres=gpu:{told}", table)
    if len(cluster_types) == 1:
        return _meant(cluster_types[0], f"the cluster's {cluster_types[0]}", table)
    return Counted(table[ASSUMED.name], _NOBODY, is_assumed=True)


def _meant(told: str, source: str, table: Mapping[str, Gpu]) -> Counted:
    """Return the one GPU that a name means, or an assumption that says so."""
    meant = named(told, table)
    if len(meant) == 1:
        return Counted(meant[0], source)
    why = " or ".join(gpu.name for gpu in meant) if meant else "no GPU that is known here"
    # Of an A100 or a V100 of two sizes the larger one, as where nobody says anything.
    gpu = max(meant, key=lambda one: one.memory) if meant else table[ASSUMED.name]
    return Counted(gpu, f"assumed: {source} is {why}", is_assumed=True)
