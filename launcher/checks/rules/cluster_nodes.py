"""The nodes that a job asks for, against those that its partition has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, error, warning
from launcher.checks.rules.cluster import chosen, node_key, overrules, partitions_text
from launcher.errors import did_you_mean
from launcher.estimates.parallelism import DEVICES, gpu_of
from launcher.estimates.values import count, full
from launcher.plan import Job, Plan, Resources
from launcher.slurm.cluster import Node, Partition, gpus_in_gres
from launcher.slurm.notations import expand_hostlist, feature_names, has_features, is_plain

_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


class Wanted(NamedTuple):
    """The resources that a job asks of each node; memory in MiB, ``None`` where it asks for none."""

    gpus: int | None
    gpu_type: str | None
    cpus: int
    memory: int | None


def wanted_of(job: Job) -> Wanted:
    """Return what a job asks of each of its nodes."""
    resources = job.resources
    gpus, gpu_type = resources.gpus_per_node, None
    if resources.gpus_per_task is not None:
        gpus = resources.gpus_per_task * resources.tasks_per_node
    elif gpus is None and (named := gpus_in_gres(resources.gres or "")):
        gpu_type, gpus = named[0][0] or None, named[0][1]
    number = _MEMORY.fullmatch(resources.memory or "")
    memory = int(int(number[1]) * _MIB[number[2].upper()]) if number else 0
    # Tasks that share processors are content with one.
    cpus = (
        1
        if job.queue.further.get("overcommit")
        else resources.tasks_per_node * (resources.cpus_per_task or 1)
    )
    return Wanted(gpus, gpu_type, cpus, memory or None)


def has_gpus(node: Node, wanted: Wanted) -> bool:
    if wanted.gpus is None:
        return True
    asked = wanted.gpu_type.lower() if wanted.gpu_type is not None else None
    found = [number for type_, number in node.gpus if asked in (None, type_.lower())]
    return sum(found) >= wanted.gpus


def node_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find fewer nodes than the job asks for, or fewer that can be used now."""
    unknown = list(_names(plan, facts))
    yield from unknown
    partitions, resources = chosen(plan, facts), plan.job.resources
    nodes, (key, value) = resources.nodes, node_key(plan)
    if unknown or not partitions:
        return
    largest = max(partitions, key=lambda one: _or_more(one.max_nodes))
    if nodes > _or_more(largest.max_nodes) and not overrules(plan, facts, "partitionmaxnodes"):
        message = f"partition {largest.name} gives a job {count(largest.max_nodes or 0, 'node')} at most"
        yield error("cluster.nodes", key, value, message, _fewer(plan, facts, largest.max_nodes or 0))
        return
    smallest = min(partitions, key=lambda one: one.min_nodes)
    too_few = (resources.max_nodes or nodes) < smallest.min_nodes
    if too_few and not overrules(plan, facts, "partitionminnodes"):
        message = f"partition {smallest.name} gives a job {count(smallest.min_nodes, 'node')} at least"
        yield error("cluster.nodes", key, value, message, f"{_count_key(plan)}={smallest.min_nodes}")
        return
    yield from _counts(plan, facts, partitions)


def _counts(plan: Plan, facts: Facts, partitions: Sequence[Partition]) -> Iterator[Finding]:
    nodes, wanted, (key, value) = plan.job.resources.nodes, wanted_of(plan.job), node_key(plan)

    def most(one: Partition) -> int:
        return len(_candidates(plan, facts, one)) + unseen(one, facts)

    best = max(partitions, key=most)
    there, more = _candidates(plan, facts, best), unseen(best, facts)
    among = f"partition {best.name} has {count(most(best), 'node')}" + _that_are(plan)
    if most(best) < nodes:
        also = ["cluster.partition", *_restricting(plan)]
        yield error("cluster.nodes", key, value, among, _fewer(plan, facts, most(best)), also)
        return
    if more:
        return  # nobody can tell what they have, nor their states
    suited = [node for node in there if all(test(node, wanted) for test in _TESTS)]
    if len(suited) < nodes:
        if all(sum(test(node, wanted) for node in there) >= nodes for test in _TESTS):
            message = f"{among}, and {len(suited)} of them with all that the job asks for"
            yield error("cluster.nodes", key, value, message, _fewer(plan, facts, len(suited)))
        return  # one of the other checks tells what they lack
    usable = [node for node in suited if node.is_usable]
    if len(usable) < nodes and plan.job.queue.reservation is None:
        states = sorted({node.state for node in suited if not node.is_usable})
        message = (
            f"{among}, of which {len(suited) - len(usable)} cannot be used now ({', '.join(states)}):"
            " the job would wait for them"
        )
        yield warning("cluster.nodes", key, value, message, _fewer(plan, facts, len(usable), "start now"))


def _names(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find names of nodes and features that do not exist."""
    assert facts.cluster is not None
    each = [node for nodes in (facts.cluster.nodes or {}).values() for node in nodes]
    if any(unseen(one, facts) for one in chosen(plan, facts)):
        return
    constraint, nodelist = plan.job.queue.constraint, expand_hostlist(plan.job.queue.nodelist or "")
    features = sorted({feature for node in each for feature in node.features})
    for name in feature_names(constraint or ""):
        if each and name not in features:
            message = f"no node of {partitions_text(plan, facts)} has the feature {name}"
            fix = did_you_mean(name, features) or "cluster.constraint=null: its nodes have no features"
            yield error("cluster.nodes", "cluster.constraint", constraint, message, fix)
    unknown = sorted((nodelist or frozenset()) - {node.name for node in each})
    if each and unknown:
        message = f"{partitions_text(plan, facts)} has no node {unknown[0]}"
        names = [node.name for node in each]
        fix = "its nodes: " + (", ".join(names) if len(names) <= _KINDS else f"{names[0]} ... {names[-1]}")
        yield error("cluster.nodes", "cluster.nodelist", plan.job.queue.nodelist, message, fix)


def gpu_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find too few nodes with as many GPUs of the requested type."""
    resources, wanted = plan.job.resources, wanted_of(plan.job)
    yield from _other_gpu(plan, facts)
    if not wanted.gpus:
        return
    key, value = _gpu_request(resources)
    what = f"{wanted.gpus} × {wanted.gpu_type}" if wanted.gpu_type else count(wanted.gpus, "GPU")

    def has(node: Node) -> str:
        return " + ".join(f"{number} × {type_ or 'GPU'}" for type_, number in node.gpus) or "no GPU"

    also = [DEVICES] if resources.gpus_per_task is not None else []
    yield from _lacking("cluster.gpus", plan, facts, has_gpus, has, (key, value, what), also)


def cpu_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find too few nodes with the processors that the tasks ask for."""
    resources, cpus = plan.job.resources, wanted_of(plan.job).cpus
    key, value = ("cluster.cpus_per_task", resources.cpus_per_task)
    if value is None:
        key, value = DEVICES, resources.tasks_per_node
    what = f"{cpus} CPUs for {count(resources.tasks_per_node, 'task')}"
    message = (key, value, what)
    yield from _lacking("cluster.cpus", plan, facts, _has_cpus, lambda node: f"{node.cpus} CPUs", message)


def memory_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find too few nodes with the requested memory."""
    resources = plan.job.resources
    message = ("cluster.mem", resources.memory, f"{wanted_of(plan.job).memory}M of memory")

    def has(node: Node) -> str:
        return f"{node.memory}M"

    yield from _lacking("cluster.memory", plan, facts, _has_memory, has, message)


def _has_cpus(node: Node, wanted: Wanted) -> bool:
    return node.cpus >= wanted.cpus


def _has_memory(node: Node, wanted: Wanted) -> bool:
    # 1 is what Slurm has of a node whose memory nobody told it.
    return wanted.memory is None or node.memory <= 1 or node.memory >= wanted.memory


_TESTS: tuple[Callable[[Node, Wanted], bool], ...] = (has_gpus, _has_cpus, _has_memory)


def _lacking(
    check: str,
    plan: Plan,
    facts: Facts,
    test: Callable[[Node, Wanted], bool],
    has: Callable[[Node], str],
    message: tuple[str, object, str],
    also: Sequence[str] = (),
) -> Iterator[Finding]:
    """Report that fewer nodes than requested have something, with what they have."""
    nodes, wanted, (key, value, what) = plan.job.resources.nodes, wanted_of(plan.job), message
    partitions = chosen(plan, facts)
    if not partitions:
        return

    def good_of(partition: Partition) -> list[Node]:
        return [node for node in _candidates(plan, facts, partition) if test(node, wanted)]

    best = max(partitions, key=lambda one: len(good_of(one)) + unseen(one, facts))
    there, good, more = _candidates(plan, facts, best), good_of(best), unseen(best, facts)
    if (
        len(good) + more >= nodes or len(there) + more < nodes
    ):  # with too few nodes whatever they have, cluster.nodes tells
        return
    kinds: dict[str, int] = {}
    for node in there:
        kinds[has(node)] = kinds.get(has(node), 0) + 1
    listed = ", ".join(f"{number} with {kind}" for kind, number in sorted(kinds.items())[:_KINDS])
    number = f"{len(good)} of the {len(there)} nodes" if good else "no node"
    text = f"{number} of partition {best.name}{_that_are(plan)} can give {what}, and the job wants {nodes}"
    yield error(check, key, value, text, f"there: {listed}", ["cluster.partition", *also])


_KINDS = 6


def _other_gpu(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find a GPU in the estimates that is not the one of the nodes."""
    resources = plan.job.resources
    if resources.gpu is None:
        return
    only = Resources(resources.nodes, resources.tasks_per_node, gpu_types=resources.gpu_types)
    there = gpu_of(only, facts.gpu_types)
    if not there.is_assumed and there.gpu.name != resources.gpu:
        message = (
            f"estimates count with it, and the GPUs of {partitions_text(plan, facts)} are {there.gpu.name}"
        )
        yield warning("cluster.gpus", "cluster.gpu", resources.gpu, message, f"cluster.gpu={there.gpu.name}")


def _gpu_request(resources: Resources) -> tuple[str, object]:
    if resources.gpus_per_task is not None:
        return "cluster.gpus_per_task", resources.gpus_per_task
    if resources.gpus_per_node is not None:
        return "cluster.gpus_per_node", resources.gpus_per_node
    return "cluster.gres", resources.gres


def unseen(partition: Partition, facts: Facts) -> int:
    """Return how many nodes of a partition Slurm hides.

    With ``PrivateData=cloud`` those of a cloud that are powered down, with ``PrivateData=nodes`` all.
    """
    assert facts.cluster is not None
    return max(0, partition.total_nodes - len((facts.cluster.nodes or {}).get(partition.name, ())))


def _candidates(plan: Plan, facts: Facts, partition: Partition) -> list[Node]:
    """Return the nodes of a partition that the job's own constraints leave.

    Not left out are those that failed under earlier jobs: where there are too few others, they are taken.
    """
    assert facts.cluster is not None
    nodes, queue = (facts.cluster.nodes or {}).get(partition.name, ()), plan.job.queue
    excluded = expand_hostlist(queue.exclude or "") or frozenset()
    constraint = queue.constraint if queue.constraint and is_plain(queue.constraint) else None
    return [
        node
        for node in nodes
        if node.name not in excluded and (constraint is None or has_features(constraint, node.features))
    ]


def _that_are(plan: Plan) -> str:
    queue = plan.job.queue
    message = [f"with {queue.constraint}"] if queue.constraint else []
    message += [f"without {queue.exclude}"] if queue.exclude else []
    return f" ({', '.join(message)})" if message else ""


def _restricting(plan: Plan) -> list[str]:
    queue = plan.job.queue
    return [f"cluster.{name}" for name in ("constraint", "exclude") if getattr(queue, name)]


def _fewer(plan: Plan, facts: Facts, most: int, can: str = "run") -> str | None:
    """Suggest the largest number of nodes that is there, and partitions with as many as requested."""
    assert facts.cluster is not None
    key, nodes = _count_key(plan), plan.job.resources.nodes
    ways = [f"{key}={most} is the largest that could {can}"] if most else []
    mine = {partition.name for partition in chosen(plan, facts)}
    others = [
        one.name
        for one in facts.cluster.partitions or ()
        if one.name not in mine
        and one.state == "UP"
        and one.is_open
        and min(one.total_nodes, _or_more(one.max_nodes)) >= nodes
    ]
    if others and can == "run":
        ways.append(f"partitions with as many nodes: {', '.join(others)} (cluster.partition)")
    return "\n".join(ways) or None


def _count_key(plan: Plan) -> str:
    key, _ = node_key(plan)
    return f"{key}.min" if plan.job.resources.is_elastic else full(key)


def _or_more(limit: int | None) -> float:
    return float("inf") if limit is None else limit
