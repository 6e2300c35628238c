"""The cluster that a job goes to, as it is now: asked where Slurm is the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from launcher.checks.cluster_facts import ClusterFacts, Node
from launcher.checks.facts import Facts
from launcher.checks.gathering import cluster_answers as read
from launcher.checks.rules.cluster import chosen
from launcher.plan import Plan
from launcher.runs.provenance import user
from launcher.schedulers.cluster import Reply, ask_at_once, questions

ClusterOf = Callable[[Plan], ClusterFacts | None]

_ACCOUNTING = ("associations", "qos")


def cluster_facts(plan: Plan) -> ClusterFacts | None:
    """Ask the cluster what it has and what it allows; ``None`` where the job does not go to a Slurm."""
    if plan.scheduler != "slurm":
        return None
    asked = questions(plan.job.queue.partition, user())
    if plan.job.container is None:
        del asked["pyxis"]
    found = facts_of(ask_at_once(asked, plan.slurm_conf), of_default=plan.job.queue.partition is None)
    return _without_hidden_nodes(plan, found)


def _without_hidden_nodes(plan: Plan, found: ClusterFacts) -> ClusterFacts:
    """That nodes are shown to nobody, as with ``PrivateData=nodes``, says nothing of how many there are."""
    mine = chosen(plan, Facts(cluster=found))
    hidden = [one for one in mine if one.total_nodes and not (found.nodes or {}).get(one.name)]
    if found.nodes is None or not mine or len(hidden) < len(mine):
        return found
    missing = {**found.missing, "nodes": "Slurm does not show the nodes of the partition"}
    return replace(found, nodes=None, gpu_types=None, missing=missing)


def remembered(ask: ClusterOf = cluster_facts) -> ClusterOf:
    """The same, asked once for all plans that ask for the same: the points of a sweep."""
    known: dict[tuple[object, ...], ClusterFacts | None] = {}

    def cluster_of(plan: Plan) -> ClusterFacts | None:
        key = (plan.scheduler, plan.slurm_conf, plan.job.queue.partition, plan.job.container is None)
        if key not in known:
            known[key] = ask(plan)
        return known[key]

    return cluster_of


def facts_of(replies: Mapping[str, Reply], *, of_default: bool = False) -> ClusterFacts:
    """What the answers tell.

    Parameters
    ----------
    of_default
        The nodes of the default partition are meant, and those of all were asked for.
    """
    missing = {name: reply.why for name, reply in replies.items() if reply.why is not None}
    answers = {name: reply.text for name, reply in replies.items() if name not in missing}
    parts: dict[str, Any] = {name: _READERS[name](text) for name, text in answers.items() if name in _READERS}
    if parts.get("partitions") == ():
        del parts["partitions"]
        missing["partitions"] = "Slurm shows no partitions"
    settings = parts.get("settings")
    if "nodes" in answers:
        parts["nodes"] = read.nodes(answers["nodes"], of_default=of_default)
    if "associations" in answers:
        name = read.cluster_name(answers.get("settings", ""))
        parts["associations"] = read.associations(answers["associations"], name)
    if settings is not None and not settings.has_accounting:
        # There are no accounts, which is known, and not a fact that could not be had.
        parts |= dict.fromkeys(_ACCOUNTING, ())
        missing = {name: why for name, why in missing.items() if name not in _ACCOUNTING}
    return ClusterFacts(gpu_types=_gpu_types(parts.get("nodes")), missing=missing, **parts)


_READERS: Mapping[str, Callable[[str], Any]] = {
    "partitions": read.partitions,
    "settings": read.settings,
    "qos": read.qos,
    "pyxis": lambda text: "--container-image" in text,
}


def _gpu_types(nodes: Mapping[str, tuple[Node, ...]] | None) -> tuple[str, ...] | None:
    if nodes is None:
        return None
    types = {type_ for each in nodes.values() for node in each for type_, _ in node.gpus}
    return tuple(sorted(types)) if types and "" not in types else None
