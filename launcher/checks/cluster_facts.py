"""What a cluster says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_NOTHING: Mapping[str, int] = {}


class Partition(NamedTuple):
    """A partition; what is ``None`` is not limited.

    `accounts` and `qos` are those whose jobs it takes, and `own_qos` is the one whose limits they all have.
    `is_open` is false where it is hidden, or for some groups alone: it is suggested to nobody.
    """

    name: str
    is_default: bool = False
    state: str = "UP"
    total_nodes: int = 0
    max_seconds: int | None = None
    min_nodes: int = 0
    max_nodes: int | None = None
    accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()
    own_qos: str | None = None
    is_open: bool = True


class Node(NamedTuple):
    """A node: its state in Slurm's word, memory in MiB, and its GPUs by type, ``""`` where they have none."""

    name: str
    state: str
    is_usable: bool
    cpus: int
    memory: int
    gpus: tuple[tuple[str, int], ...] = ()
    features: frozenset[str] = frozenset()


class Limits(NamedTuple):
    """What jobs may have at most, and `least`; in Slurm's words for resources, such as ``gres/gpu``.

    `per_job` and `max_seconds` are of one job, `per_user` and `per_group` of all that run at a time.
    """

    max_seconds: int | None = None
    least: Mapping[str, int] = _NOTHING
    per_job: Mapping[str, int] = _NOTHING
    per_user: Mapping[str, int] = _NOTHING
    per_group: Mapping[str, int] = _NOTHING
    max_submitted: int | None = None


class Qos(NamedTuple):
    """A quality of service."""

    name: str
    limits: Limits = Limits()
    flags: frozenset[str] = frozenset()


class Association(NamedTuple):
    """An account that the user may charge, in all partitions or in one.

    `is_default` is ``None`` where it is not known whether it is the one that jobs are charged to without it.
    """

    account: str
    partition: str | None = None
    qos: tuple[str, ...] = ()
    default_qos: str | None = None
    is_default: bool | None = False
    limits: Limits = Limits()


class Settings(NamedTuple):
    """Of the whole cluster.

    `enforced` is Slurm's AccountingStorageEnforce, in lower case. With `has_filters` plugins of the site may
    change what a job asks for: its partition, account and QOS. `release` is Slurm's, such as (22, 5).
    """

    max_array: int | None = None
    max_jobs: int | None = None
    has_accounting: bool = False
    enforced: frozenset[str] = frozenset()
    has_filters: bool = False
    release: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Each part is ``None`` where it was not needed, or could not be had; then `missing` says why.

    Attributes
    ----------
    gpu_types
        The types of the GPUs of the job's partitions, in the site's words, such as ``a100``.
    partitions
        All that the user may see.
    nodes
        Those of the job's partitions, by partition.
    settings
        What holds in the whole cluster.
    associations
        The accounts of the user.
    qos
        All qualities of service.
    pyxis
        Whether srun knows Pyxis' options.
    missing
        Why a part could not be had, by its name.
    """

    gpu_types: tuple[str, ...] | None = None
    partitions: tuple[Partition, ...] | None = None
    nodes: Mapping[str, tuple[Node, ...]] | None = None
    settings: Settings | None = None
    associations: tuple[Association, ...] | None = None
    qos: tuple[Qos, ...] | None = None
    pyxis: bool | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
