"""The cluster as one stage sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.config.schema import ClusterConfig, parse
from launcher.errors import UserError

# What the whole launch has; the root's keys of the same names were derived from them.
_OF_THE_LAUNCH = ("scheduler", "slurm_conf", "engine", "container")

_MAPPINGS = ("env_vars", "sbatch", "gpu_types")


def stage_cluster(cluster: ClusterConfig, stage: str, changes: Mapping[str, Any]) -> ClusterConfig:
    """Lay the changes of `stage_cluster` over the cluster; mappings are merged key by key.

    Raises
    ------
    UserError
        If a key is none of the cluster's, or not a stage's own.
    """
    if not changes:
        return cluster
    path = f"stage_cluster.{stage}"
    for key in _OF_THE_LAUNCH:
        if key in changes:
            other = f"cluster.{key}" if key in ("scheduler", "slurm_conf") else key
            raise UserError(
                f"{path}.{key}: not a stage's own, but the launch's", key=f"{path}.{key}", hint=f"{other}=..."
            )
    ours = cluster.model_dump()
    merged = {**ours, **changes}
    for key in _MAPPINGS:
        if isinstance(changes.get(key), Mapping):
            merged[key] = {**ours[key], **changes[key]}
    return parse(ClusterConfig, merged, path)
