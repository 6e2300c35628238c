"""What is known of files and of the cluster when a plan is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from launcher.preflight.cluster_facts import ClusterFacts
from launcher.preflight.path_facts import PathFacts


class LostSecret(NamedTuple):
    """A file of a secret that the job may not be able to read.

    `key` is where the configuration names it; `certain` is whether this machine has its directory, so that
    what it lacks there the nodes lack too.
    """

    key: str
    path: str
    why: str
    certain: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """Gathered beforehand and read-only; ``None`` is unknown, and skips the checks that need it.

    Attributes
    ----------
    added_keys
        Keys of `trainer`, `exp_manager` and `model` that no shipped file shows and no check reads, such as
        ``model.micro_batchsize``.
    shipped_keys
        Those that the shipped files show or the checks read, to find the nearest.
    same_job_name
        Other run directories whose newest launch has the name of this plan's job.
    open_secrets
        Files of secrets that others may read, by the variable that is read from them.
    lost_secrets
        Files of secrets that are not there, or cannot be read.
    paths
        What this machine has of the files and directories that the job uses.
    cluster
        What the cluster says of itself; each of its parts may be missing.
    array_tasks
        How many tasks of job arrays are submitted with this plan's; ``None`` if it is a job of its own.
    node_gpus
        The GPUs of a node, where the cluster's configuration says it. Not known, it skips nothing.
    trainer_verdict
        What our trainer says of the configuration, as ``key=value: what is wrong``; empty if it is content,
        or if another program is going to train.
    """

    added_keys: tuple[str, ...] | None = None
    shipped_keys: frozenset[str] | None = None
    same_job_name: tuple[str, ...] | None = None
    open_secrets: Mapping[str, str] | None = None
    lost_secrets: tuple[LostSecret, ...] | None = None
    paths: PathFacts | None = None
    cluster: ClusterFacts | None = None
    array_tasks: int | None = None
    node_gpus: int | None = None
    trainer_verdict: str | None = None
