"""The account and the QOS of a job: partitions and limits with which Slurm accepts a job that only waits.

Slurm itself refuses unknown names: the check `scheduler` names their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.checks.findings import Finding, error, warning
from launcher.checks.rules.cluster import ACCOUNT, PARTITION, QOS, ClusterRequest, cluster_check
from launcher.checks.rules.runs import limit_key
from launcher.estimates.values import count
from launcher.slurm.cluster import Limits, Qos
from launcher.slurm.notations import format_time_limit


@cluster_check(
    ACCOUNT,
    "the partition takes the account, whose limits allow the job",
    *("settings", "associations", "qos", "partitions"),
)
def account_problems(request: ClusterRequest) -> Iterator[Finding]:
    """Find an account that the partition does not take, or that gives less than requested.

    Since Slurm 23.02 a partition also takes the accounts below those that it lists; sacctmgr does not show a
    user which these are.
    """
    mine, first = next(iter(request.associations), None), next(iter(request.partitions), None)
    if mine is None or not request.is_enforced("associations"):
        return
    if first is not None and not any(each.admits(account=mine.account) for each in request.partitions):
        text, report = f"partition {first.name} takes no jobs of account {mine.account}", error
        if first.accounts is not None:
            text, report = f"{text}, unless it is one below those that it takes", warning
        fix = f"its accounts: {', '.join(first.accounts)}" if first.accounts else None
        yield report(ACCOUNT, request.queue.account, text, fix, (PARTITION,))
    limits = _unset_limits(mine.limits, [qos.limits for qos in _applicable_qos(request)])
    yield from _exceeded_limits(request, f"account {mine.account}", limits, ACCOUNT)


@cluster_check(
    QOS,
    "the partition takes the QOS; its limits and those of the partition's own QOS allow the job",
    *("settings", "qos", "associations", "partitions"),
)
def qos_problems(request: ClusterRequest) -> Iterator[Finding]:
    mine, partitions = request.qos, request.partitions
    is_closed = mine is not None and not any(each.admits(qos=mine.name) for each in partitions)
    if mine is not None and partitions and is_closed and request.is_enforced("qos"):
        text = f"partition {partitions[0].name} takes no jobs of QOS {mine.name}"
        fix = f"it takes: {', '.join(partitions[0].qos)}" if partitions[0].qos else None
        yield error(QOS, request.queue.qos, text, fix, (PARTITION,))
    before: list[Limits] = []
    for qos in _applicable_qos(request):
        yield from _exceeded_limits(request, f"QOS {qos.name}", _unset_limits(qos.limits, before), QOS)
        before.append(qos.limits)


def _applicable_qos(request: ClusterRequest) -> list[Qos]:
    """Return the QOS with limits for the job, in order of precedence: its one partition's, and the job's.

    The order is that of Slurm's "Resource Limits" page: partition QOS, job QOS, association; a QOS with
    OverPartQOS comes first.
    """
    partitions, mine = request.partitions, request.qos
    of_partition = request.find_qos(partitions[0].own_qos) if len(partitions) == 1 else None
    both = [of_partition, mine if mine != of_partition else None]
    if request.overrules("overpartqos"):
        both.reverse()
    return [qos for qos in both if qos is not None]


def _unset_limits(limits: Limits, before: Sequence[Limits]) -> Limits:
    """Return the limits of resources that no earlier limits set."""
    left: dict[str, Any] = {}
    for field, value in limits._asdict().items():
        earlier = [getattr(each, field) for each in before]
        if isinstance(value, Mapping):
            left[field] = {name: value[name] for name in value if not any(name in each for each in earlier)}
        else:
            left[field] = value if all(each is None for each in earlier) else None
    return Limits(**left)


def _exceeded_limits(request: ClusterRequest, who: str, limits: Limits, key: str) -> Iterator[Finding]:
    if not request.is_enforced("limits", "safe"):
        return
    resources, seconds, limit = request.resources, request.seconds, limit_key(request.plan)
    if seconds is not None and limits.max_seconds is not None and seconds > limits.max_seconds:
        most = format_time_limit(limits.max_seconds)
        yield error(limit, resources.time_limit, f"{who} limits a job to {most}", f"{limit}={most}", (key,))
    if limits.max_submitted is not None and request.jobs > limits.max_submitted:
        message = f"{count(request.jobs, 'job')} at once, and {who} lets a user submit {limits.max_submitted}"
        yield error(key, request.queue.account if key == ACCOUNT else request.queue.qos, message)
    by_whom = (
        ("a job", limits.per_job),
        ("a user", limits.per_user),
        ("all of its jobs together", limits.per_group),
    )
    (nodes_key, value), per_node = request.nodes_key, request.per_node
    each = {"node": 1, "cpu": per_node.cpus, "gres/gpu": per_node.gpus or 0}
    if per_node.gpu_type:
        each[f"gres/gpu:{per_node.gpu_type}"] = per_node.gpus or 0
    each["mem"] = per_node.memory or 0
    for resource, number in ((name, resources.nodes * number) for name, number in each.items() if number):
        amount = f"{number}M of memory"
        if resource != "mem":
            amount = count(number, {"node": "node", "cpu": "CPU"}.get(resource, "GPU"))
        message = f"{amount} in all, but {who}"
        beyond = [
            (whom, allowed[resource]) for whom, allowed in by_whom if number > allowed.get(resource, number)
        ]
        for whom, most_of_it in beyond[:1]:
            yield error(nodes_key, value, f"{message} limits {whom} to {most_of_it}", None, (key,))
        least = limits.least.get(resource, number)
        if number < least:
            yield error(nodes_key, value, f"{message} requires at least {least}", None, (key,))


CHECKS = (account_problems, qos_problems)
