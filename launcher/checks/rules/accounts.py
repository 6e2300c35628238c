"""The account that a job is charged to and its quality of service, with what they allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, error, warning
from launcher.checks.rules.cluster import (
    associations_of,
    chosen,
    node_key,
    qos_of,
    submitted_at_once,
    wanted_seconds,
)
from launcher.checks.rules.cluster_nodes import wanted_of
from launcher.errors import did_you_mean
from launcher.estimates.values import count
from launcher.plan import Plan
from launcher.slurm.cluster import Association, Limits, Qos
from launcher.slurm.notations import format_time_limit

_ACCOUNT = "cluster.account"
_QOS = "cluster.qos"

# What Slurm's AccountingStorageEnforce has to say for each to be refused.
_ASSOCIATIONS = frozenset(("associations", "limits", "qos", "safe"))
_LIMITS = frozenset(("limits", "safe"))


class Asked(NamedTuple):
    """A total that a job asks for, in Slurm's words for resources, and the key that sets it."""

    resource: str
    number: int
    key: str
    value: object


def account_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find an account that the user does not have, or that its partition does not take."""
    assert facts.cluster is not None and facts.cluster.settings is not None
    settings, mine = facts.cluster.settings, facts.cluster.associations or ()
    given, names = plan.job.queue.account, sorted({one.account for one in mine})
    if not settings.has_accounting:
        return
    # What nobody enforces is bookkeeping alone.
    tell = error if settings.enforced & _ASSOCIATIONS else warning
    if given is not None and given.lower() not in names:
        message = "you have no such account" + (f"; yours: {', '.join(names)}" if names else "")
        yield tell("cluster.account", _ACCOUNT, given, message, did_you_mean(given, names))
        return
    found = associations_of(plan, facts)
    if not settings.enforced & _ASSOCIATIONS:
        return
    if given is None and any(one.is_default is None for one in mine):
        return  # there is a default, and nobody tells which
    if not found:
        message, fix = _without(mine, given), None
        if names and given is None:
            fix = f"{_ACCOUNT}={names[0]}" if len(names) == 1 else f"one of yours: {', '.join(names)}"
        yield error("cluster.account", _ACCOUNT, given, message, fix)
        return
    yield from _shut_out(plan, facts, found[0].account)
    if settings.enforced & _LIMITS:
        who = f"account {found[0].account}"
        limits = _left_open(found[0].limits, [one.limits for one in _holding(plan, facts)])
        yield from _beyond("cluster.account", plan, facts, who, limits, _ACCOUNT)


def _without(mine: Sequence[Association], given: str | None) -> str:
    if given is None:
        return "you have no account of your own that jobs are charged to without it"
    partitions = sorted({one.partition for one in mine if one.account == given.lower() and one.partition})
    return f"it is yours in other partitions alone: {', '.join(partitions)}"


# Since this release the accounts below one that a partition takes are taken as well; which these are is not
# among what Slurm tells of a user.
_WITH_ACCOUNTS_BELOW = (23, 2)


def _shut_out(plan: Plan, facts: Facts, account: str) -> Iterator[Finding]:
    """Partitions may be for some accounts alone."""
    partitions = chosen(plan, facts)
    closed = [one for one in partitions if _is_closed(account, one.accounts, one.denied_accounts)]
    if partitions and len(closed) == len(partitions):
        first = closed[0]
        message = f"partition {first.name} takes no jobs of account {account}"
        fix = f"its accounts: {', '.join(first.accounts)}" if first.accounts else None
        release = facts.cluster.settings.release if facts.cluster and facts.cluster.settings else None
        is_sure = first.accounts is None or release is None or release < _WITH_ACCOUNTS_BELOW
        if not is_sure:
            message += ", unless it is one below those that it takes"
        tell, also = error if is_sure else warning, ("cluster.partition",)
        yield tell("cluster.account", _ACCOUNT, plan.job.queue.account, message, fix, also)


def _is_closed(name: str, taken: Sequence[str] | None, denied: Sequence[str]) -> bool:
    """Return True if a partition with a list of those allowed, or denied, does not take this name."""
    if taken is not None:
        return name.lower() not in (one.lower() for one in taken)
    return name.lower() in (one.lower() for one in denied)


def qos_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find a QOS that does not exist, that the account may not use, or that gives less than requested."""
    assert facts.cluster is not None and facts.cluster.settings is not None
    settings, names = facts.cluster.settings, [one.name for one in facts.cluster.qos or ()]
    given, found = plan.job.queue.qos, associations_of(plan, facts)
    if not settings.has_accounting:
        return
    tell = error if "qos" in settings.enforced else warning
    mine = qos_of(plan, facts)
    if given is not None and mine is None:
        yield tell("cluster.qos", _QOS, given, "this Slurm has no such QOS", did_you_mean(given, names))
        return
    usable = {name.lower() for one in found for name in one.qos}
    if given is not None and found and given.lower() not in usable:
        message = f"account {found[0].account} may not use it"
        fix = f"it may use: {', '.join(found[0].qos)}" if found[0].qos else None
        yield tell("cluster.qos", _QOS, given, message, fix, (_ACCOUNT,))
        return
    if mine is not None and "qos" in settings.enforced:
        yield from _closed_to(plan, facts, mine.name)
    if settings.enforced & _LIMITS:
        before: list[Limits] = []
        for one in _holding(plan, facts):
            limits = _left_open(one.limits, before)
            yield from _beyond("cluster.qos", plan, facts, f"QOS {one.name}", limits, _QOS)
            before.append(one.limits)


def _holding(plan: Plan, facts: Facts) -> list[Qos]:
    """Return the QOS whose limits hold, the first before the other: that of its one partition, and the job's.

    The order is that of Slurm's "Resource Limits" page: partition QOS, job QOS, association; a QOS with
    OverPartQOS comes first.
    """
    assert facts.cluster is not None
    partitions, mine = chosen(plan, facts), qos_of(plan, facts)
    name = partitions[0].own_qos if len(partitions) == 1 else None
    of_partition = [one for one in facts.cluster.qos or () if name and one.name.lower() == name.lower()]
    of_job = [mine] if mine is not None and mine not in of_partition else []
    if mine is not None and "overpartqos" in mine.flags:
        return [*of_job, *of_partition]
    return [*of_partition, *of_job]


def _left_open(limits: Limits, before: Sequence[Limits]) -> Limits:
    """Return the limits that no earlier ones set: the first that sets a resource decides."""

    def left(name: str) -> dict[str, int]:
        message = {resource for one in before for resource in getattr(one, name)}
        return {
            resource: number for resource, number in getattr(limits, name).items() if resource not in message
        }

    return Limits(
        max_seconds=None if any(one.max_seconds is not None for one in before) else limits.max_seconds,
        max_submitted=None if any(one.max_submitted is not None for one in before) else limits.max_submitted,
        least=left("least"),
        per_job=left("per_job"),
        per_user=left("per_user"),
        per_group=left("per_group"),
    )


def _closed_to(plan: Plan, facts: Facts, name: str) -> Iterator[Finding]:
    partitions = chosen(plan, facts)
    closed = [one for one in partitions if _is_closed(name, one.qos, one.denied_qos)]
    if partitions and len(closed) == len(partitions):
        message = f"partition {closed[0].name} takes no jobs of QOS {name}"
        fix = f"it takes: {', '.join(closed[0].qos)}" if closed[0].qos else None
        yield error("cluster.qos", _QOS, plan.job.queue.qos, message, fix, also=("cluster.partition",))


def _beyond(check: str, plan: Plan, facts: Facts, who: str, limits: Limits, key: str) -> Iterator[Finding]:
    """Find each request of a job that is beyond its limits."""
    seconds, limit = wanted_seconds(plan), f"{plan.job.stage}.run.time_limit"
    if seconds is not None and limits.max_seconds is not None and seconds > limits.max_seconds:
        most = format_time_limit(limits.max_seconds)
        message = f"{who} gives a job {most} at most"
        yield error(check, limit, plan.job.resources.time_limit, message, f"{limit}={most}", (key,))
    jobs = submitted_at_once(plan, facts)
    if limits.max_submitted is not None and jobs > limits.max_submitted:
        message = f"{count(jobs, 'job')} at once, and {who} lets a user submit {limits.max_submitted}"
        yield error(check, key, (plan.job.queue.account if key == _ACCOUNT else plan.job.queue.qos), message)
    for asked in _asked(plan):
        message = f"{_amount(asked.resource, asked.number)} in all, and {who}"
        for whom, allowed in (
            ("a job", limits.per_job),
            ("a user", limits.per_user),
            ("all of its jobs together", limits.per_group),
        ):
            given = allowed.get(asked.resource)
            if given is not None and asked.number > given:
                text = f"{message} gives {whom} {given} at most"
                yield error(check, asked.key, asked.value, text, None, (key,))
                break
        least = limits.least.get(asked.resource)
        if least is not None and asked.number < least:
            text = f"{message} is for jobs with {least} at least"
            yield error(check, asked.key, asked.value, text, None, (key,))


def _asked(plan: Plan) -> Iterator[Asked]:
    resources, wanted = plan.job.resources, wanted_of(plan.job)
    key, value = node_key(plan)
    yield Asked("node", resources.nodes, key, value)
    yield Asked("cpu", resources.nodes * wanted.cpus, key, value)
    if wanted.gpus:
        yield Asked("gres/gpu", resources.nodes * wanted.gpus, key, value)
        if wanted.gpu_type:
            yield Asked(f"gres/gpu:{wanted.gpu_type}", resources.nodes * wanted.gpus, key, value)
    if wanted.memory:
        yield Asked("mem", resources.nodes * wanted.memory, key, value)


def _amount(resource: str, number: int) -> str:
    if resource == "mem":
        return f"{number}M of memory"
    return count(number, {"node": "node", "cpu": "CPU"}.get(resource, "GPU"))
