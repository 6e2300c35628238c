"""Check a job's partition, the jobs submitted at once, and Pyxis."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from launcher.checks.findings import Check, Finding, Severity, check, error, warning
from launcher.checks.rules.resources import ELASTIC_NODES, SPARES
from launcher.checks.rules.runs import limit_key
from launcher.errors import did_you_mean
from launcher.estimates.parallelism import NODES
from launcher.estimates.values import count
from launcher.plan import Plan
from launcher.slurm.cluster import Association, ClusterFacts, Partition, Qos, gpus_in_gres
from launcher.slurm.notations import format_time_limit, parse_time_limit

_TASKS = "data_preparation.tasks"
PARTITION, ACCOUNT, QOS = "cluster.partition", "cluster.account", "cluster.qos"
MAY_CHANGE = "plugins of this Slurm may change the job's request"
_FOREVER = float("inf")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


class NodeResources(NamedTuple):
    """The resources that a job requests of each node; memory in MiB. ``None`` is no request."""

    gpus: int | None
    gpu_type: str | None
    cpus: int
    memory: int | None


class ClusterRequest:
    """The request of a job to a cluster, and the parts of the cluster that it concerns."""

    def __init__(self, plan: Plan, cluster: ClusterFacts, array_tasks: int | None = None) -> None:
        self.plan, self.cluster = plan, cluster
        self.job, self.queue, resources = plan.job, plan.job.queue, plan.job.resources
        # To Slurm, the spare nodes are as the others.
        self.resources = replace(resources, nodes=resources.nodes + resources.spares, spares=0)
        # Tasks of the plan's own array; 0 without one.
        array = self.queue.further.get("array")
        self.own_tasks = (
            int(str(array).partition("-")[2]) + 1 if self.job.payload.array_key is not None else 0
        )
        # Jobs that a launch puts into the queue: the tasks of arrays, or the links of a chain.
        links = 1 if self.job.chain.from_job else self.job.chain.links
        self.jobs = array_tasks or self.own_tasks or links

    @property
    def named(self) -> list[str]:
        return [name for name in (self.queue.partition or "").split(",") if name]

    @cached_property
    def partitions(self) -> list[Partition]:
        """The partitions that the job may run in: those that it names, or the default one."""
        there = self.cluster.partitions or ()
        if not self.named:
            return [partition for partition in there if partition.is_default]
        return [partition for name in self.named for partition in there if partition.name == name]

    @property
    def partitions_text(self) -> str:
        names = [partition.name for partition in self.partitions]
        return f"partition{'s' if len(names) > 1 else ''} {', '.join(names)}"

    @cached_property
    def associations(self) -> list[Association]:
        """The associations that the job may be charged to, its own partition's first, as in Slurm."""
        account, names = self.queue.account, {partition.name for partition in self.partitions}
        usable = [
            mine
            for mine in self.cluster.associations or ()
            if (mine.account == account.lower() if account is not None else mine.is_default)
            and (mine.partition is None or mine.partition in names)
        ]
        return sorted(usable, key=lambda mine: mine.partition is None)

    def is_enforced(self, *words: str) -> bool:
        """Return True if this Slurm enforces one of AccountingStorageEnforce's words."""
        return self.cluster.settings is not None and not self.cluster.settings.enforced.isdisjoint(words)

    @cached_property
    def qos(self) -> Qos | None:
        """The QOS that the job gets: the one it names, or that of its association."""
        default = self.associations[0].default_qos if self.associations else None
        return self.find_qos(self.queue.qos or default)

    def find_qos(self, name: str | None) -> Qos | None:
        known = self.cluster.qos or ()
        return next((qos for qos in known if name and qos.name.lower() == name.lower()), None)

    def overrules(self, flag: str) -> bool:
        """Return True if the job's QOS has Slurm's `flag` to overrule a limit of its partition."""
        return self.qos is not None and flag in self.qos.flags

    @cached_property
    def per_node(self) -> NodeResources:
        resources = self.resources
        gpus, gpu_type = resources.gpus_per_node, None
        if resources.gpus_per_task is not None:
            gpus = resources.gpus_per_task * resources.tasks_per_node
        elif gpus is None and (named := gpus_in_gres(resources.gres or "")):
            gpu_type, gpus = named[0][0] or None, named[0][1]
        number = _MEMORY.fullmatch(resources.memory or "")
        memory = int(int(number[1]) * _MIB[number[2].upper()]) if number else 0
        # Tasks that share processors are content with one.
        is_shared = self.queue.further.get("overcommit")
        cpus = 1 if is_shared else resources.tasks_per_node * (resources.cpus_per_task or 1)
        return NodeResources(gpus, gpu_type, cpus, memory or None)

    @property
    def nodes_key(self) -> tuple[str, object]:
        """The key that sets the job's number of nodes, with its value."""
        resources = self.resources
        if self.job.resources.spares:
            return SPARES, self.job.resources.spares
        if resources.is_elastic:
            return ELASTIC_NODES, f"{resources.nodes}-{resources.max_nodes}"
        if self.job.stage == "command":
            return "command.nodes", resources.nodes
        if not self.has_node_count:
            return PARTITION, self.queue.partition
        return NODES, resources.nodes

    @property
    def has_node_count(self) -> bool:
        """False for a stage that always has one node."""
        return self.job.config is not None or self.job.stage == "command"

    @property
    def seconds(self) -> float | None:
        """The job's time limit, which may be infinite; None for the cluster's default."""
        # The shortest time of a range decides: Slurm grants at least that.
        least = self.queue.further.get("time-min")
        text = str(least) if least is not None else self.resources.time_limit
        try:
            limit = parse_time_limit(text) if text is not None else None
        except ValueError:
            return None  # reported by time.limit
        return None if text is None else _FOREVER if limit is None else limit


Rule = Callable[[ClusterRequest], Iterable[Finding]]


def cluster_check(check_id: str, topic: str, *parts: str) -> Callable[[Rule], Check[...]]:
    """Make a rule about parts of the cluster a check.

    Its errors become warnings where plugins of the site may change the job: many sites pick the partition,
    and complete the account and the QOS, when a job is submitted.
    """

    def check_of(rule: Rule) -> Check[...]:
        def find(plan: Plan, cluster: ClusterFacts, array_tasks: int | None) -> Iterator[Finding]:
            has_filters = cluster.settings is not None and cluster.settings.has_filters
            for finding in rule(ClusterRequest(plan, cluster, array_tasks)):
                is_of_names = check_id in (PARTITION, ACCOUNT, QOS)
                may_change = has_filters and (is_of_names or plan.job.queue.partition is None)
                if may_change and finding.severity is Severity.ERROR:
                    text = f"{finding.message}; {MAY_CHANGE}"
                    yield replace(finding, severity=Severity.WARNING, message=text)
                else:
                    yield finding

        return Check(check_id, topic, find, *(f"cluster.{part}" for part in parts))

    return check_of


@cluster_check("cluster.partition", "the partition exists, and takes jobs", "partitions")
def partition_problems(request: ClusterRequest) -> Iterator[Finding]:
    there, chosen, partitions = request.cluster.partitions or (), request.queue.partition, request.partitions
    visible = [partition.name for partition in there if partition.is_open]
    for name in request.named:
        if name not in {partition.name for partition in there}:
            text = f"this Slurm has no partition {name}, or hides it from you"
            yield error(PARTITION, chosen, text, did_you_mean(name, visible))
    if chosen is None and not partitions:
        yield error(PARTITION, chosen, "this Slurm has no default partition", f"one of: {', '.join(visible)}")
    if not partitions or any(partition.state == "UP" for partition in partitions):
        return
    first = min(partitions, key=lambda partition: partition.state != "DOWN")
    if first.state == "DOWN":
        text = f"partition {first.name} is down: it queues jobs, but does not start them"
        yield warning(PARTITION, chosen, text)
    else:
        text = f"partition {first.name} takes no new jobs: its state is {first.state}"
        yield error(PARTITION, chosen, text)


@cluster_check("cluster.time_limit", "the time limit is not longer than the partition's", "partitions")
def time_problems(request: ClusterRequest) -> Iterator[Finding]:
    partitions, seconds = request.partitions, request.seconds
    if not partitions or seconds is None or request.overrules("partitiontimelimit"):
        return
    longest = max(partitions, key=_seconds_of)
    if longest.max_seconds is None or seconds <= longest.max_seconds:
        return
    most, key = format_time_limit(longest.max_seconds), limit_key(request.plan)
    text = f"partition {longest.name} limits a job to {most}"
    yield error(key, request.resources.time_limit, text, f"{key}={most}", also=(PARTITION,))


def _seconds_of(partition: Partition) -> float:
    return _FOREVER if partition.max_seconds is None else partition.max_seconds


@check("cluster.array", "the cluster takes as many jobs as are submitted at once", "cluster.settings")
def array_problems(plan: Plan, cluster: ClusterFacts, array_tasks: int | None) -> Iterator[Finding]:
    assert cluster.settings is not None
    request = ClusterRequest(plan, cluster, array_tasks)
    tasks, room, array = request.own_tasks, cluster.settings.max_jobs, cluster.settings.max_array
    most = min((limit for limit in (room, array) if limit is not None), default=None)
    if tasks:
        if most is not None and tasks > most:
            text = f"an array of this Slurm has {count(most, 'task')} at most (MaxArraySize, MaxJobCount)"
            yield error(_TASKS, tasks, text, f"{_TASKS}={max(most, 1)}: the result is the same")
        return
    if array_tasks and array == 0:
        text = "this Slurm takes no job arrays: its MaxArraySize is 0"
        yield Finding(Severity.ERROR, None, text)
    if room is not None and request.jobs > room:
        text = f"{count(request.jobs, 'job')} at once, and this Slurm has room for {room} (MaxJobCount)"
        if array_tasks:
            yield Finding(Severity.ERROR, None, text, "fewer points at a time")
        else:
            fix = f"resilience.links={room} at most, or resilience.submit=job"
            yield error("resilience.links", plan.job.chain.links, text, fix)


@check("cluster.pyxis", "srun has Pyxis' options where there is a container", "cluster.pyxis")
def pyxis_problems(plan: Plan, cluster: ClusterFacts) -> Iterator[Finding]:
    container = plan.job.container
    if container is not None and container.options.runtime == "pyxis" and not cluster.pyxis:
        text = "srun on this machine knows no --container-image: NVIDIA's Pyxis plugin seems to be missing"
        fix = "container_options.runtime=apptainer, if the nodes have that; container=null runs on bare metal"
        yield warning("container", container.image, text, fix)


PARTITIONS = (partition_problems, time_problems)
CHECKS = (array_problems, pyxis_problems)
