"""The GPU that estimates count with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from arithmetic.gpus import ASSUMED, GPUS, Gpu, named
from launcher.plan import Resources

_NOBODY = "assumed: cluster.gpu is null"


class CountedGpu(NamedTuple):
    """A GPU, and the `source` that names it; `is_assumed` if none does, or not clearly."""

    gpu: Gpu
    source: str
    is_assumed: bool = False

    @property
    def is_unclear(self) -> bool:
        """True if the named type fits no known GPU, or several."""
        return self.is_assumed and self.source != _NOBODY


def known_gpus(resources: Resources) -> Mapping[str, Gpu]:
    """Return the table of GPUs with what the site adds to it, or changes."""
    return {**GPUS, **resources.gpu_types} if resources.gpu_types else GPUS


def gpu_of(resources: Resources, cluster_types: Sequence[str] = ()) -> CountedGpu:
    """Return `cluster.gpu`, else what `cluster.gres` or the cluster names, else an assumption.

    `cluster_types` are the types of GPU that the cluster has, as far as they are known.
    """
    table = known_gpus(resources)
    if resources.gpu is not None:
        return CountedGpu(table[resources.gpu], "cluster.gpu")
    if resources.gpu_type is not None:
        return _meant(resources.gpu_type, f"cluster.gres=gpu:{resources.gpu_type}", table)
    if len(cluster_types) == 1:
        return _meant(cluster_types[0], f"the cluster's {cluster_types[0]}", table)
    return CountedGpu(table[ASSUMED.name], _NOBODY, is_assumed=True)


def _meant(name: str, source: str, table: Mapping[str, Gpu]) -> CountedGpu:
    """Return the GPU that a name means; for an unclear name an assumption that says so."""
    matches = named(name, table)
    if len(matches) == 1:
        return CountedGpu(matches[0], source)
    why = " or ".join(gpu.name for gpu in matches) if matches else "no GPU that is known here"
    # Of an A100 or a V100 of two sizes the larger one, as for a cluster without a type.
    gpu = max(matches, key=lambda match: match.memory) if matches else table[ASSUMED.name]
    return CountedGpu(gpu, f"assumed: {source} is {why}", is_assumed=True)
