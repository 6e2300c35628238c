"""Parse a Slurm cluster's resources and limits from the answers of its commands. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from launcher.slurm.notations import limit_seconds

# The fields of the answers, in this order; they do not contain bars.
NODE_FIELDS = ("partition", "name", "state", "cpus", "memory", "gres", "features")
ASSOCIATION_FIELDS = (
    "user",
    "defaultaccount",
    "cluster",
    "account",
    "partition",
    "qos",
    "defaultqos",
    "maxwall",
    "maxtres",
    "grptres",
    "maxsubmit",
)
QOS_FIELDS = ("name", "flags", "maxwall", "mintres", "maxtres", "maxtrespu", "grptres", "maxsubmitpu")

# States of `sinfo`, "Node State Codes", in which a node runs no new job until an administrator acts; a `*`
# behind any state is a node that does not answer.
_UNUSABLE = ("down", "drain", "drng", "fail", "error", "unknown", "inval", "future", "maint")
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
# Slurm's numbers have 64 bits.
_QUANTITY = re.compile(r"(\d{1,20})([KMGTP]?)")
# Types may begin with digits, such as 2080ti and MIG's 1g.5gb: a number is the count where it ends the entry.
_GRES = re.compile(
    r"(?:^|,)gpu(?::(?P<type>(?!no_consume)[^:,()\s]+))??(?::no_consume)?:(?P<count>\d{1,9})(?=[,(\s]|$)"
)

_NOTHING: Mapping[str, int] = {}
_NO_VALUES: Mapping[str, str] = {}


class Partition(NamedTuple):
    """A partition; ``None`` means unlimited.

    Jobs of `accounts` and `qos` may run there, and all have the limits of `own_qos`. A partition that is
    hidden, or only for some groups, is not `is_open`: it is never suggested.
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
    node_names: str | None = None

    def admits(self, account: str | None = None, qos: str | None = None) -> bool:
        """Return True if the partition's own lists admit an account and a QOS."""
        lists = ((account, self.accounts, self.denied_accounts), (qos, self.qos, self.denied_qos))
        return all(
            name is None
            or (name.lower() in map(str.lower, denied if taken is None else taken)) is (taken is not None)
            for name, taken, denied in lists
        )


class Node(NamedTuple):
    """A node: its state in Slurm's word, memory in MiB, and its GPUs by type (``""`` without a type)."""

    name: str
    state: str
    is_usable: bool
    cpus: int
    memory: int
    gpus: tuple[tuple[str, int], ...] = ()
    features: frozenset[str] = frozenset()


class Limits(NamedTuple):
    """The largest and the `least` resources of jobs, in Slurm's words for resources, such as ``gres/gpu``.

    `per_job` and `max_seconds` limit one job, `per_user` and `per_group` all that run at a time.
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

    Jobs that name no account are charged to the one that `is_default`.
    """

    account: str
    partition: str | None = None
    qos: tuple[str, ...] = ()
    default_qos: str | None = None
    is_default: bool = False
    limits: Limits = Limits()


class Settings(NamedTuple):
    """The settings of the whole cluster, of its `name`.

    `enforced` is Slurm's AccountingStorageEnforce, in lower case. With `has_filters` plugins of the site may
    change a job's request: its partition, account and QOS. `values` are all settings, in Slurm's words.
    """

    max_array: int | None = None
    max_jobs: int | None = None
    has_accounting: bool = False
    enforced: frozenset[str] = frozenset()
    has_filters: bool = False
    name: str | None = None
    values: Mapping[str, str] = _NO_VALUES


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A cluster as it is now: each part is ``None`` if it was not needed or not available (see `missing`).

    Nodes, and the types of their GPUs in the site's words, such as ``a100``, are those of the job's
    partitions; `pyxis` is True if srun knows Pyxis' options.
    """

    gpu_types: tuple[str, ...] | None = None
    partitions: tuple[Partition, ...] | None = None
    nodes: Mapping[str, tuple[Node, ...]] | None = None
    settings: Settings | None = None
    associations: tuple[Association, ...] | None = None
    qos: tuple[Qos, ...] | None = None
    pyxis: bool | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def why_silent(self) -> str | None:
        """The reason why Slurm does not answer."""
        return self.missing.get("settings")

    @property
    def node_names(self) -> frozenset[str] | None:
        """The names of the nodes; None where they are not known, or Slurm hides some of them."""
        nodes, partitions = self.nodes or {}, self.partitions or ()
        if not nodes or any(
            partition.total_nodes > len(nodes[partition.name])
            for partition in partitions
            if partition.name in nodes
        ):
            return None
        return frozenset(node.name for some in nodes.values() for node in some)


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Parse the answer of ``scontrol --oneliner show partition``."""
    lines = map(pairs, text.split("\n"))
    return tuple(_partition(values) for values in lines if values.get("PartitionName"))


def _partition(values: Mapping[str, str]) -> Partition:
    return Partition(
        name=values["PartitionName"],
        is_default=values.get("Default") == "YES",
        state=values.get("State", "UP"),
        total_nodes=_leading_int(values.get("TotalNodes")) or 0,
        max_seconds=limit_seconds(values.get("MaxTime")),
        min_nodes=_leading_int(values.get("MinNodes")) or 0,
        max_nodes=_leading_int(values.get("MaxNodes")),
        accounts=_parse_allowed(values.get("AllowAccounts")),
        denied_accounts=_parse_allowed(values.get("DenyAccounts")) or (),
        qos=_parse_allowed(values.get("AllowQos")),
        denied_qos=_parse_allowed(values.get("DenyQos")) or (),
        own_qos=_word(values.get("QoS")),
        node_names=_word(values.get("Nodes")),
        is_open=values.get("Hidden") != "YES" and values.get("AllowGroups", "ALL") == "ALL",
    )


def parse_nodes(text: str, *, of_default: bool = False) -> dict[str, tuple[Node, ...]]:
    """Parse the answer of sinfo by partition, or only the default one, which has a ``*`` after its name."""
    by_partition: dict[str, list[Node]] = {}
    for row in rows(text, NODE_FIELDS):
        if of_default and not row["partition"].endswith("*"):
            continue
        by_partition.setdefault(row["partition"].removesuffix("*"), []).append(_node(row))
    return {partition: tuple(nodes) for partition, nodes in by_partition.items()}


def _node(row: Mapping[str, str]) -> Node:
    state = row["state"]
    return Node(
        name=row["name"],
        state=state,
        is_usable=not state.startswith(_UNUSABLE) and "*" not in state,
        cpus=_leading_int(row["cpus"]) or 0,
        memory=_leading_int(row["memory"]) or 0,
        gpus=gpus_in_gres(row["gres"]),
        features=frozenset(filter(None, (_word(name) for name in row["features"].split(",")))),
    )


def parse_settings(text: str) -> Settings:
    """Parse the answer of ``scontrol show config``: a name, blanks, a sign and a value in each line."""
    values = {
        name.strip(): value.strip() for name, _, value in (line.partition("=") for line in text.split("\n"))
    }
    enforced = values.get("AccountingStorageEnforce", "none").lower().split(",")
    return Settings(
        values=values,
        name=values.get("ClusterName") or None,
        max_array=_leading_int(values.get("MaxArraySize")),
        max_jobs=_leading_int(values.get("MaxJobCount")),
        has_accounting=values.get("AccountingStorageType", "").endswith("slurmdbd"),
        enforced=frozenset(enforced) - {"none", ""},
        has_filters=any(
            _word(values.get(f"{name}Plugins")) is not None for name in ("JobSubmit", "CliFilter")
        ),
    )


def parse_associations(text: str, cluster: str | None) -> tuple[Association, ...]:
    """Parse the answer of sacctmgr, which may be about several clusters."""
    return tuple(
        Association(
            account=row["account"],
            partition=_word(row["partition"]),
            qos=tuple(name for name in row["qos"].split(",") if name),
            default_qos=_word(row["defaultqos"]),
            is_default=row["account"] == row["defaultaccount"],
            limits=_limits(row, row["maxsubmit"]),
        )
        for row in rows(text, ASSOCIATION_FIELDS)
        if row["account"] and cluster in (None, row["cluster"])
    )


def parse_qos(text: str) -> tuple[Qos, ...]:
    """Parse the answer of ``sacctmgr show qos``."""
    return tuple(
        Qos(
            name=row["name"],
            flags=frozenset(flag for flag in row["flags"].lower().split(",") if flag),
            limits=_limits(row, row["maxsubmitpu"]),
        )
        for row in rows(text, QOS_FIELDS)
    )


def _limits(row: Mapping[str, str], max_submitted: str) -> Limits:
    return Limits(
        max_seconds=limit_seconds(row["maxwall"]),
        least=_resources(row.get("mintres", "")),
        per_job=_resources(row["maxtres"]),
        per_user=_resources(row.get("maxtrespu", "")),
        per_group=_resources(row["grptres"]),
        max_submitted=_leading_int(max_submitted),
    )


def _resources(text: str) -> dict[str, int]:
    """Parse ``cpu=64,gres/gpu=8,mem=1T``; memory in MiB, as Slurm counts it."""
    resources = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        number = _QUANTITY.fullmatch(value)
        if number:
            resources[name] = int(number[1]) * 1024 ** max(0, _UNITS[number[2]] - 2)
    return resources


def _leading_int(text: str | None) -> int | None:
    """Return the number that a text begins with: `sinfo` writes ``64+`` if nodes differ, `scontrol` units."""
    match = re.match(r"\d{1,20}(?!\d)", text or "")
    return int(match[0]) if match else None


def _parse_allowed(text: str | None) -> tuple[str, ...] | None:
    return tuple(text.split(",")) if text and text not in ("ALL", "N/A") and _word(text) else None


def _word(text: str | None) -> str | None:
    return text if text and text not in ("(null)", "N/A", "NONE") else None


def gpus_in_gres(gres: str) -> tuple[tuple[str, int], ...]:
    """Return the GPUs of ``gpu:a100:8(S:0-1),nvme:1``, by type (``""`` without a type)."""
    return tuple((match["type"] or "", int(match["count"])) for match in _GRES.finditer(gres))


def rows(text: str, fields: Sequence[str]) -> Iterable[dict[str, str]]:
    """Yield the fields of each line, which bars separate."""
    for line in text.split("\n"):
        values = line.split("|")
        if len(values) == len(fields):
            yield dict(zip(fields, values, strict=True))


def pairs(line: str) -> dict[str, str]:
    """Return the ``Name=value`` pairs of a line of scontrol."""
    return {name: value for name, sign, value in (word.partition("=") for word in line.split()) if sign}
