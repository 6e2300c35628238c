"""Slurm's answers, read: pure functions from text to what is known of a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.checks.cluster_facts import Association, Limits, Node, Partition, Qos, Settings
from launcher.checks.rules.cluster_nodes import gpus_of
from launcher.schedulers.cluster import ASSOCIATION_FIELDS, NODE_FIELDS, QOS_FIELDS, pairs, rows
from launcher.times import parse_time_limit

# States of `sinfo`, "Node State Codes", in which a node runs no new job until somebody does something; a `*`
# behind any state is a node that does not answer.
_UNUSABLE = ("down", "drain", "drng", "fail", "error", "unknown", "inval", "future", "maint")
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
# Slurm's numbers have 64 bits.
_QUANTITY = re.compile(r"(\d{1,20})([KMGTP]?)")


def partitions(text: str) -> tuple[Partition, ...]:
    """The answer of ``scontrol --oneliner show partition``."""
    return tuple(_partition(told) for line in text.split("\n") if (told := pairs(line)).get("PartitionName"))


def _partition(told: Mapping[str, str]) -> Partition:
    return Partition(
        name=told["PartitionName"],
        is_default=told.get("Default") == "YES",
        state=told.get("State", "UP"),
        total_nodes=_whole(told.get("TotalNodes")) or 0,
        max_seconds=_seconds(told.get("MaxTime")),
        min_nodes=_whole(told.get("MinNodes")) or 0,
        max_nodes=_whole(told.get("MaxNodes")),
        accounts=_allowed(told.get("AllowAccounts")),
        denied_accounts=_allowed(told.get("DenyAccounts")) or (),
        qos=_allowed(told.get("AllowQos")),
        denied_qos=_allowed(told.get("DenyQos")) or (),
        own_qos=_word(told.get("QoS")),
        is_open=told.get("Hidden") != "YES" and told.get("AllowGroups", "ALL") == "ALL",
    )


def nodes(text: str, *, of_default: bool = False) -> dict[str, tuple[Node, ...]]:
    """The answer of sinfo, by partition; the default one has a ``*`` behind its name.

    Parameters
    ----------
    of_default
        Leave out all other partitions.
    """
    found: dict[str, list[Node]] = {}
    for told in rows(text, NODE_FIELDS):
        if of_default and not told["partition"].endswith("*"):
            continue
        found.setdefault(told["partition"].removesuffix("*"), []).append(_node(told))
    return {partition: tuple(each) for partition, each in found.items()}


def _node(told: Mapping[str, str]) -> Node:
    state = told["state"]
    return Node(
        name=told["name"],
        state=state,
        is_usable=not state.startswith(_UNUSABLE) and "*" not in state,
        cpus=_whole(told["cpus"]) or 0,
        memory=_whole(told["memory"]) or 0,
        gpus=gpus_of(told["gres"]),
        features=frozenset(filter(None, (_word(name) for name in told["features"].split(",")))),
    )


def settings(text: str) -> Settings:
    """The answer of ``scontrol show config``: a name, blanks, a sign and a value in each line."""
    told = {
        name.strip(): value.strip() for name, _, value in (line.partition("=") for line in text.split("\n"))
    }
    enforced = told.get("AccountingStorageEnforce", "none").lower().split(",")
    return Settings(
        max_array=_whole(told.get("MaxArraySize")),
        max_jobs=_whole(told.get("MaxJobCount")),
        has_accounting=told.get("AccountingStorageType", "").endswith("slurmdbd"),
        enforced=frozenset(enforced) - {"none", ""},
        has_filters=any(_word(told.get(f"{name}Plugins")) is not None for name in ("JobSubmit", "CliFilter")),
        release=_release(told.get("SLURM_VERSION")),
    )


def _release(text: str | None) -> tuple[int, int] | None:
    """Of ``22.05.8`` the first two numbers."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})\b", text or "")
    return (int(found[1]), int(found[2])) if found else None


def cluster_name(text: str) -> str | None:
    """The cluster's name in the answer of ``scontrol show config``."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else None


def associations(text: str, cluster: str | None) -> tuple[Association, ...]:
    """The answer of sacctmgr, which may be about several clusters."""
    told_of = list(rows(text, ASSOCIATION_FIELDS))
    mine = [told for told in told_of if told["account"] and cluster in (None, told["cluster"])]
    # With several clusters it may be another one's default that is told.
    is_told = len(mine) == len(told_of) or any(told["account"] == told["defaultaccount"] for told in mine)
    return tuple(
        Association(
            account=told["account"],
            partition=_word(told["partition"]),
            qos=tuple(name for name in told["qos"].split(",") if name),
            default_qos=_word(told["defaultqos"]),
            is_default=told["account"] == told["defaultaccount"] if is_told else None,
            limits=Limits(
                max_seconds=_seconds(told["maxwall"]),
                per_job=_resources(told["maxtres"]),
                per_group=_resources(told["grptres"]),
                max_submitted=_whole(told["maxsubmit"]),
            ),
        )
        for told in mine
    )


def qos(text: str) -> tuple[Qos, ...]:
    """The answer of ``sacctmgr show qos``."""
    return tuple(
        Qos(
            name=told["name"],
            flags=frozenset(flag for flag in told["flags"].lower().split(",") if flag),
            limits=Limits(
                max_seconds=_seconds(told["maxwall"]),
                least=_resources(told["mintres"]),
                per_job=_resources(told["maxtres"]),
                per_user=_resources(told["maxtrespu"]),
                per_group=_resources(told["grptres"]),
                max_submitted=_whole(told["maxsubmitpu"]),
            ),
        )
        for told in rows(text, QOS_FIELDS)
    )


def _resources(text: str) -> dict[str, int]:
    """``cpu=64,gres/gpu=8,mem=1T``; memory in MiB, as Slurm counts it."""
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        number = _QUANTITY.fullmatch(value)
        if number:
            found[name] = int(number[1]) * 1024 ** max(0, _UNITS[number[2]] - 2)
    return found


def _seconds(text: str | None) -> int | None:
    """A time limit; ``None`` if there is none, or if it is none of Slurm's forms."""
    try:
        return parse_time_limit(text) if text else None
    except ValueError:
        return None


def _whole(text: str | None) -> int | None:
    """The number at the beginning: `sinfo` writes ``64+`` of nodes that differ, `scontrol` has units."""
    found = re.match(r"\d{1,20}(?!\d)", text or "")
    return int(found[0]) if found else None


def _allowed(text: str | None) -> tuple[str, ...] | None:
    return tuple(text.split(",")) if text and text not in ("ALL", "N/A") and _word(text) else None


def _word(text: str | None) -> str | None:
    return text if text and text not in ("(null)", "N/A", "NONE") else None
