"""The account that a job is charged to and its quality of service, with what they allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launcher.checks.findings import Finding, error, warning
from launcher.checks.rules.cluster import ACCOUNT, PARTITION, QOS, ClusterRequest, cluster_check
from launcher.checks.rules.runs import limit_key
from launcher.errors import did_you_mean
from launcher.estimates.values import count
from launcher.slurm.cluster import Limits, Partition, Qos
from launcher.slurm.notations import format_time_limit

# Words of AccountingStorageEnforce with which Slurm refuses unknown accounts, and jobs beyond a limit.
_ASSOCIATIONS = frozenset(("associations", "limits", "qos", "safe"))
_LIMITS = frozenset(("limits", "safe"))
# Since this release the accounts below one that a partition takes are taken as well; which these are is not
# among what Slurm tells of a user.
_WITH_ACCOUNTS_BELOW = (23, 2)


@cluster_check(
    ACCOUNT,
    "the account is one of the user's, the partition takes it, and it gives what the job wants",
    *("settings", "associations", "partitions"),
)
def account_problems(request: ClusterRequest) -> Iterator[Finding]:
    settings, mine = request.cluster.settings, request.cluster.associations or ()
    value, names = request.queue.account, sorted({association.account for association in mine})
    if settings is None or not settings.has_accounting:
        return
    are_enforced, associations = bool(settings.enforced & _ASSOCIATIONS), request.associations
    yours = ", ".join(names)
    if value is not None and value.lower() not in names:
        # An account that is not enforced is bookkeeping alone.
        tell = error if are_enforced else warning
        message = "you have no such account" + (f"; yours: {yours}" if names else "")
        yield tell(ACCOUNT, value, message, did_you_mean(value, names))
        return
    if not are_enforced or (value is None and any(each.is_default is None for each in mine)):
        return  # in the second case there is a default, and nobody tells which
    if associations:
        yield from _closed_to_account(request, associations[0].account)
        if settings.enforced & _LIMITS:
            limits = _left_open(associations[0].limits, [qos.limits for qos in _holding(request)])
            yield from _beyond(request, f"account {associations[0].account}", limits, ACCOUNT)
    elif value is not None:
        partitions = {each.partition for each in mine if each.account == value.lower() and each.partition}
        message = f"you may use it only in other partitions: {', '.join(sorted(partitions))}"
        yield error(ACCOUNT, value, message)
    else:
        message = "you have no default account for this partition"
        fix = f"{ACCOUNT}={yours}" if len(names) == 1 else f"one of yours: {yours}"
        yield error(ACCOUNT, value, message, fix if names else None)


def _closed_to_account(request: ClusterRequest, account: str) -> Iterator[Finding]:
    first = _all_closed(request, account, lambda each: (each.accounts, each.denied_accounts))
    if first is None:
        return
    settings = request.cluster.settings
    release = settings.release if settings is not None else None
    is_sure = first.accounts is None or release is None or release < _WITH_ACCOUNTS_BELOW
    message = f"partition {first.name} takes no jobs of account {account}"
    if not is_sure:
        message += ", unless it is one below those that it takes"
    fix = f"its accounts: {', '.join(first.accounts)}" if first.accounts else None
    tell = error if is_sure else warning
    yield tell(ACCOUNT, request.queue.account, message, fix, (PARTITION,))


def _all_closed(
    request: ClusterRequest,
    name: str,
    lists: Callable[[Partition], tuple[Sequence[str] | None, Sequence[str]]],
) -> Partition | None:
    """Return the job's first partition if none takes a name, by their `lists` of those allowed or denied."""
    for partition in request.partitions:
        taken, denied = lists(partition)
        is_denied = name.lower() in map(str.lower, denied)
        is_taken = not is_denied if taken is None else name.lower() in map(str.lower, taken)
        if is_taken:
            return None
    return next(iter(request.partitions), None)


@cluster_check(
    QOS,
    "the QOS is there, the account may use it, and it gives what the job wants",
    *("settings", "qos", "associations", "partitions"),
)
def qos_problems(request: ClusterRequest) -> Iterator[Finding]:
    """Find a QOS that does not exist, that the account may not use, or that gives less than requested."""
    settings, mine, associations = request.cluster.settings, request.qos, request.associations
    value = request.queue.qos
    if settings is None or not settings.has_accounting:
        return
    are_enforced = "qos" in settings.enforced
    tell = error if are_enforced else warning
    if value is not None and mine is None:
        names = [qos.name for qos in request.cluster.qos or ()]
        yield tell(QOS, value, "this Slurm has no such QOS", did_you_mean(value, names))
        return
    usable = {name.lower() for association in associations for name in association.qos}
    if value is not None and associations and value.lower() not in usable:
        fix = f"it may use: {', '.join(associations[0].qos)}" if associations[0].qos else None
        yield tell(QOS, value, f"account {associations[0].account} may not use it", fix, (ACCOUNT,))
        return
    if mine is not None and are_enforced:
        first = _all_closed(request, mine.name, lambda each: (each.qos, each.denied_qos))
        if first is not None:
            message = f"partition {first.name} takes no jobs of QOS {mine.name}"
            fix = f"it takes: {', '.join(first.qos)}" if first.qos else None
            yield error(QOS, value, message, fix, also=(PARTITION,))
    if settings.enforced & _LIMITS:
        before: list[Limits] = []
        for qos in _holding(request):
            yield from _beyond(request, f"QOS {qos.name}", _left_open(qos.limits, before), QOS)
            before.append(qos.limits)


def _holding(request: ClusterRequest) -> list[Qos]:
    """Return the QOS whose limits hold, the first before the other: that of its one partition, and the job's.

    The order is that of Slurm's "Resource Limits" page: partition QOS, job QOS, association; a QOS with
    OverPartQOS comes first.
    """
    partitions, mine = request.partitions, request.qos
    of_partition = request.qos_named(partitions[0].own_qos) if len(partitions) == 1 else None
    both = [of_partition, mine if mine != of_partition else None]
    if request.overrules("overpartqos"):
        both.reverse()
    return [qos for qos in both if qos is not None]


def _left_open(limits: Limits, before: Sequence[Limits]) -> Limits:
    """Return the limits that no earlier ones set: the first that sets a resource decides."""
    left: dict[str, Any] = {}
    for field, value in limits._asdict().items():
        earlier = [getattr(each, field) for each in before]
        if isinstance(value, Mapping):
            left[field] = {name: value[name] for name in value if not any(name in each for each in earlier)}
        else:
            left[field] = value if all(each is None for each in earlier) else None
    return Limits(**left)


def _beyond(request: ClusterRequest, who: str, limits: Limits, key: str) -> Iterator[Finding]:
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
