"""Try partitions one by one: find others that would take a job, and lists that all refuse it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity, check, error
from launcher.checks.rules import accounts, cluster_nodes
from launcher.checks.rules.cluster import MAY_CHANGE, PARTITION, PARTITIONS, ClusterRequest
from launcher.plan import Plan
from launcher.slurm.cluster import ClusterFacts, Partition
from launcher.slurm.notations import expand_hostlist

_RULES = (*PARTITIONS, *cluster_nodes.CHECKS, *accounts.CHECKS)
_IDS = frozenset(rule.id for rule in _RULES)
_OF_NODES = ("cluster.gpus", "cluster.cpus", "cluster.memory")


def _choose_partition(plan: Plan, name: str) -> Plan:
    return replace(plan, job=replace(plan.job, queue=replace(plan.job.queue, partition=name)))


def _errors(plan: Plan, cluster: ClusterFacts, array_tasks: int | None) -> list[Finding]:
    """Return the errors for which the cluster refuses the job of a plan."""
    facts = Facts(cluster=cluster, array_tasks=array_tasks)
    found = (finding for rule in _RULES for finding in rule.find(plan, facts))
    return [finding for finding in found if finding.severity is Severity.ERROR]


@check(
    "cluster.partitions",
    "at least one of several partitions takes the job",
    *("cluster.partitions", "cluster.nodes"),
)
def partitions_problems(plan: Plan, cluster: ClusterFacts, array_tasks: int | None) -> Iterator[Finding]:
    named = ClusterRequest(plan, cluster).named
    reasons = [
        _errors(_choose_partition(plan, name), cluster, array_tasks) for name in named if len(named) > 1
    ]
    if not reasons or not all(reasons) or _errors(plan, cluster, array_tasks):
        return
    texts = [errors[0].message.partition(": ")[2] for errors in reasons]
    yield error(PARTITION, plan.job.queue.partition, f"all of them refuse the job: {'; '.join(texts)}")


def add_partitions(finding: Finding, plan: Plan, cluster: ClusterFacts, array_tasks: int | None) -> Finding:
    """Add the partitions that would take the job to a finding that another partition may resolve."""
    is_refusal = finding.severity is Severity.ERROR or finding.message.endswith(MAY_CHANGE)
    is_misspelt = (finding.fix or "").startswith("did you mean")
    if finding.id not in _IDS or not (is_refusal or finding.id == PARTITION) or is_misspelt:
        return finding
    needs_nodes = finding.id in _OF_NODES or finding.key in ("cluster.constraint", "cluster.nodelist")
    request = ClusterRequest(plan, cluster)
    there = {node.name: node for nodes in (cluster.nodes or {}).values() for node in nodes}
    sure = None if cluster.settings is None else cluster.settings._replace(has_filters=False)

    def takes(other: Partition) -> bool:
        # The known nodes of another partition are those that it shares with the job's.
        shared = sorted(there.keys() & (expand_hostlist(other.node_names or "") or ()))
        nodes = {other.name: tuple(there[name] for name in shared)}
        tried = replace(cluster, settings=sure, nodes=nodes)
        is_open = other.state == "UP" and other.is_open and other not in request.partitions
        is_known = len(shared) == other.total_nodes or not needs_nodes
        alone = _choose_partition(plan, other.name)
        mine = ClusterRequest(alone, tried)
        if cluster.associations and not mine.associations:
            return False
        is_admitted = all(other.admits(account=each.account) for each in mine.associations[:1])
        return is_open and is_admitted and is_known and not _errors(alone, tried, array_tasks)

    names = ", ".join(other.name for other in cluster.partitions or () if takes(other))
    ways = [finding.fix, f"partitions that would take the job: {names} ({PARTITION})" if names else None]
    return replace(finding, fix="\n".join(filter(None, ways)) or None)


CHECKS = (partitions_problems,)
