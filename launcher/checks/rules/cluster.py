"""The partition that a job goes to, what is submitted at once, and Pyxis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity, error, warning
from launcher.checks.rules.resources import ELASTIC_NODES
from launcher.errors import did_you_mean
from launcher.estimates.parallelism import NODES
from launcher.estimates.values import count
from launcher.plan import Plan
from launcher.slurm.cluster import Association, Partition, Qos
from launcher.slurm.notations import format_time_limit, parse_time_limit

_TASKS = "data_preparation.tasks"
_PARTITION = "cluster.partition"
_FOREVER = float("inf")


def chosen(plan: Plan, facts: Facts) -> list[Partition]:
    """Return the partitions that the job may run in: those that it names, or the default one."""
    assert facts.cluster is not None
    there, named = facts.cluster.partitions or (), _named(plan)
    if not named:
        return [one for one in there if one.is_default]
    return [one for name in named for one in there if one.name == name]


def associations_of(plan: Plan, facts: Facts) -> list[Association]:
    """Return the associations that the job may be charged to, its own partition's first, as in Slurm."""
    assert facts.cluster is not None
    given, partitions = plan.job.queue.account, {one.name for one in chosen(plan, facts)}
    found = [
        one
        for one in facts.cluster.associations or ()
        if (one.account == given.lower() if given is not None else one.is_default)
        and (one.partition is None or one.partition in partitions)
    ]
    return sorted(found, key=lambda one: one.partition is None)


def qos_of(plan: Plan, facts: Facts) -> Qos | None:
    """Return the QOS that the job gets: the one it names, or that of its association."""
    assert facts.cluster is not None
    found = associations_of(plan, facts)
    name = plan.job.queue.qos or (found[0].default_qos if found else None)
    return next((one for one in facts.cluster.qos or () if name and one.name.lower() == name.lower()), None)


def overrules(plan: Plan, facts: Facts, flag: str) -> bool:
    """Return True if the job's QOS overrules a limit of its partition; `flag` is Slurm's name for that."""
    mine = qos_of(plan, facts)
    return mine is not None and flag in mine.flags


Find = Callable[[Plan, Facts], Iterable[Finding]]


def unless_changed(find: Find) -> Find:
    """Turn errors of a check into warnings where plugins of the site may change the job.

    Many sites pick the partition, and complete the account and the QOS, when a job is submitted.
    """

    def ask(plan: Plan, facts: Facts) -> Iterator[Finding]:
        assert facts.cluster is not None
        settings, is_open = facts.cluster.settings, plan.job.queue.partition is None
        has_filters = settings is not None and settings.has_filters
        for found in find(plan, facts):
            is_of_names = found.key == _PARTITION or found.id in ("cluster.account", "cluster.qos")
            if has_filters and found.severity is Severity.ERROR and (is_of_names or is_open):
                text = f"{found.message}; plugins of this Slurm may change what a job asks for"
                yield replace(found, severity=Severity.WARNING, message=text)
            else:
                yield found

    return ask


def node_key(plan: Plan) -> tuple[str, object]:
    """Return the key that says how many nodes the job asks for, with its value."""
    resources = plan.job.resources
    if resources.is_elastic:
        return ELASTIC_NODES, f"{resources.nodes}-{resources.max_nodes}"
    if plan.job.config is None:
        return _PARTITION, plan.job.queue.partition  # of a stage that always has one node
    return NODES, resources.nodes


def partitions_text(plan: Plan, facts: Facts) -> str:
    names = [one.name for one in chosen(plan, facts)]
    return f"partition{'s' if len(names) > 1 else ''} {', '.join(names)}"


def partition_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find a partition that does not exist, or takes no jobs."""
    assert facts.cluster is not None
    there, given = facts.cluster.partitions or (), plan.job.queue.partition
    names, shown = [one.name for one in there], [one.name for one in there if one.is_open]
    for name in _named(plan):
        if name not in names:
            text = f"this Slurm has no partition {name}, or none that you may see"
            yield error("cluster.partition", _PARTITION, given, text, did_you_mean(name, shown))
    partitions = chosen(plan, facts)
    if given is None and not partitions:
        text = "this Slurm has no default partition"
        yield error("cluster.partition", _PARTITION, given, text, f"one of: {', '.join(shown)}")
    if not partitions or any(one.state == "UP" for one in partitions):
        return
    first = min(partitions, key=lambda one: one.state != "DOWN")
    up = [one.name for one in there if one.state == "UP" and one.is_open]
    fix = f"partitions that are up: {', '.join(up)}" if up else None
    if first.state == "DOWN":
        text = f"partition {first.name} is down: it queues jobs, and starts none"
        yield warning("cluster.partition", _PARTITION, given, text, fix)
    else:
        text = f"partition {first.name} takes no new jobs: its state is {first.state}"
        yield error("cluster.partition", _PARTITION, given, text, fix)


def _named(plan: Plan) -> Sequence[str]:
    given = plan.job.queue.partition
    return [name for name in given.split(",") if name] if given else ()


def wanted_seconds(plan: Plan) -> float | None:
    """Return the job's time limit, infinite where it says so; None where the cluster's default holds."""
    # Of a range Slurm looks for as much as there is.
    least = plan.job.queue.further.get("time-min")
    given = str(least) if least is not None else plan.job.resources.time_limit
    try:
        limit = parse_time_limit(given) if given is not None else None
    except ValueError:
        return None  # time.limit tells
    return None if given is None else _FOREVER if limit is None else limit


def time_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find a time limit that is longer than the partition's."""
    assert facts.cluster is not None
    partitions, wanted = chosen(plan, facts), wanted_seconds(plan)
    if not partitions or wanted is None or overrules(plan, facts, "partitiontimelimit"):
        return
    longest = max(partitions, key=_seconds_of)
    if longest.max_seconds is None or wanted <= longest.max_seconds:
        return
    most, key = format_time_limit(longest.max_seconds), f"{plan.job.stage}.run.time_limit"
    text = f"partition {longest.name} gives a job {most} at most"
    others = [
        one.name
        for one in facts.cluster.partitions or ()
        if one.state == "UP" and one.is_open and _seconds_of(one) >= wanted
    ]
    fix = f"{key}={most}"
    if others:
        fix += f"\npartitions that give as much time: {', '.join(others)} (cluster.partition)"
    yield error("cluster.time_limit", key, plan.job.resources.time_limit, text, fix, also=(_PARTITION,))


def _seconds_of(partition: Partition) -> float:
    return _FOREVER if partition.max_seconds is None else partition.max_seconds


def submitted_at_once(plan: Plan, facts: Facts) -> int:
    """Return how many jobs a launch puts into the queue: the tasks of arrays, or the links of a chain."""
    chain = plan.job.chain
    return facts.array_tasks or own_tasks(plan) or (1 if chain.from_job else chain.links)


def own_tasks(plan: Plan) -> int:
    """Return the tasks of the array that a plan is by itself; 0 if it is none."""
    array = plan.job.queue.further.get("array")
    return int(str(array).partition("-")[2]) + 1 if plan.job.payload.array_key is not None else 0


def array_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find more jobs submitted at once than the cluster takes."""
    assert facts.cluster is not None
    settings, jobs = facts.cluster.settings, submitted_at_once(plan, facts)
    assert settings is not None
    tasks, most = own_tasks(plan), settings.max_array
    if settings.max_jobs is not None:
        most = min(settings.max_jobs, settings.max_jobs if most is None else most)
    if most is not None and tasks > most:
        text = f"an array of this Slurm has {count(most, 'task')} at most (MaxArraySize, MaxJobCount)"
        fix = f"{_TASKS}={max(most, 1)}: the result is the same"
        yield error("cluster.array", _TASKS, tasks, text, fix)
    if tasks:
        return
    if facts.array_tasks and settings.max_array == 0:
        text = "this Slurm takes no job arrays: its MaxArraySize is 0"
        yield Finding("cluster.array", Severity.ERROR, None, text)
    if settings.max_jobs is not None and jobs > settings.max_jobs:
        text = f"{count(jobs, 'job')} at once, and this Slurm has room for {settings.max_jobs} (MaxJobCount)"
        if facts.array_tasks:
            yield Finding("cluster.array", Severity.ERROR, None, text, "fewer points at a time")
        else:
            fix = f"resilience.links={settings.max_jobs} at most, or resilience.submit=job"
            yield error("cluster.array", "resilience.links", plan.job.chain.links, text, fix)


def pyxis_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find a container where srun has no options of Pyxis."""
    assert facts.cluster is not None
    container = plan.job.container
    if container is not None and container.options.runtime == "pyxis" and not facts.cluster.pyxis:
        text = "srun on this machine knows no --container-image: NVIDIA's Pyxis plugin seems to be missing"
        fix = "container_options.runtime=apptainer, if the nodes have that; container=null runs on bare metal"
        yield warning("cluster.pyxis", "container", container.image, text, fix)
