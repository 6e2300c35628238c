"""Compare the nodes that a job requests with those of its partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, check, error, skip_check, warning
from launcher.checks.rules.cluster import PARTITION, ClusterRequest, NodeResources, cluster_check
from launcher.checks.rules.resources import ELASTIC_NODES
from launcher.errors import did_you_mean
from launcher.estimates.parallelism import DEVICES, gpu_of
from launcher.estimates.values import Values, count, full
from launcher.plan import Plan, Resources
from launcher.slurm.cluster import ClusterFacts, Node, Partition
from launcher.slurm.notations import expand_hostlist, feature_names, has_features, is_plain

# The most kinds and names of nodes in a message.
_KINDS = 6
_CPUS, _WORKERS = "cluster.cpus_per_task", "model.data.num_workers"
_WORKERS_FIT = "a node has a processor for each worker that reads data"


def _has_gpus(node: Node, per_node: NodeResources) -> bool:
    if per_node.gpus is None:
        return True
    gpu_type = per_node.gpu_type.lower() if per_node.gpu_type is not None else None
    return sum(number for type_, number in node.gpus if gpu_type in (None, type_.lower())) >= per_node.gpus


def _has_cpus(node: Node, per_node: NodeResources) -> bool:
    return node.cpus >= per_node.cpus


def _has_memory(node: Node, per_node: NodeResources) -> bool:
    # Slurm shows 1 for a node without configured memory.
    return per_node.memory is None or node.memory <= 1 or node.memory >= per_node.memory


_TESTS: tuple[Callable[[Node, NodeResources], bool], ...] = (_has_gpus, _has_cpus, _has_memory)


class _Offer(NamedTuple):
    """The nodes of a partition that the job's constraints leave, and the number of nodes that Slurm hides.

    With ``PrivateData=cloud`` it hides nodes that a cloud has powered down, with ``PrivateData=nodes`` all.
    Nodes that failed under earlier jobs count: the job takes them if too few others are left.
    """

    partition: Partition
    nodes: list[Node]
    hidden: int

    @property
    def most(self) -> int:
        return len(self.nodes) + self.hidden


def _offers(request: ClusterRequest) -> list[_Offer]:
    queue, known = request.queue, request.cluster.nodes or {}
    excluded = expand_hostlist(queue.exclude or "") or frozenset()
    constraint = queue.constraint if queue.constraint and is_plain(queue.constraint) else None
    offers = []
    for partition in request.partitions:
        nodes = known.get(partition.name, ())
        left = [
            node
            for node in nodes
            if node.name not in excluded and (constraint is None or has_features(constraint, node.features))
        ]
        offers.append(_Offer(partition, left, max(0, partition.total_nodes - len(nodes))))
    return offers


@cluster_check(
    "cluster.nodes",
    "the partition has as many nodes, and enough of them can be used now",
    *("partitions", "nodes"),
)
def node_problems(request: ClusterRequest) -> Iterator[Finding]:
    unknown = list(_find_unknown_names(request))
    yield from unknown
    partitions, resources = request.partitions, request.resources
    nodes, (key, value) = resources.nodes, request.nodes_key
    if unknown or not partitions:
        return
    largest = max(partitions, key=_most_nodes)
    smallest = min(partitions, key=lambda partition: partition.min_nodes)
    too_few = (resources.max_nodes or nodes) < smallest.min_nodes
    if nodes > _most_nodes(largest) and not request.overrules("partitionmaxnodes"):
        most = largest.max_nodes or 0
        message = f"partition {largest.name} limits a job to {count(most, 'node')}"
        yield error(key, value, message, _suggest_fewer_nodes(request, most))
    elif too_few and not request.overrules("partitionminnodes"):
        message = f"partition {smallest.name} requires at least {count(smallest.min_nodes, 'node')} per job"
        fix = f"{_count_key(request)}={smallest.min_nodes}" if request.has_node_count else None
        yield error(key, value, message, fix)
    else:
        yield from _node_count_problems(request)


def _node_count_problems(request: ClusterRequest) -> Iterator[Finding]:
    nodes, per_node, (key, value) = request.resources.nodes, request.per_node, request.nodes_key
    best = max(_offers(request), key=lambda offer: offer.most)
    among = f"partition {best.partition.name} has {count(best.most, 'node')}{_node_description(request)}"
    if best.most < nodes:
        limits = [f"cluster.{name}" for name in ("constraint", "exclude") if getattr(request.queue, name)]
        yield error(key, value, among, _suggest_fewer_nodes(request, best.most), [PARTITION, *limits])
        return
    limit = best.most if request.overrules("partitionmaxnodes") else _most_nodes(best.partition)
    most = int(min(best.most, limit))
    if (request.resources.max_nodes or 0) > most:
        yield warning(key, value, f"{among}: it never gets more than {most}", f"{ELASTIC_NODES}.max={most}")
    if best.hidden:
        return  # resources and states of hidden nodes are unknown
    suited = [node for node in best.nodes if all(test(node, per_node) for test in _TESTS)]
    if len(suited) < nodes:
        if all(sum(test(node, per_node) for node in best.nodes) >= nodes for test in _TESTS):
            message = f"{among}; only {len(suited)} can run the job"
            yield error(key, value, message, _suggest_fewer_nodes(request, len(suited)))
        return  # another check reports the missing resource
    usable = sum(node.is_usable for node in suited)
    if usable < nodes and request.queue.reservation is None:
        states = ", ".join(sorted({node.state for node in suited if not node.is_usable}))
        lost = f"{len(suited) - usable} of them cannot be used now ({states}): the job would wait"
        yield warning(key, value, f"{among}; {lost}", _suggest_fewer_nodes(request, usable, "start now"))


def _find_unknown_names(request: ClusterRequest) -> Iterator[Finding]:
    there = [node for nodes in (request.cluster.nodes or {}).values() for node in nodes]
    if not there or any(offer.hidden for offer in _offers(request)):
        return
    constraint, nodelist = request.queue.constraint, request.queue.nodelist
    features = {feature for node in there for feature in node.features}
    for name in feature_names(constraint or ""):
        if name not in features:
            message = f"no node of {request.partitions_text} has the feature {name}"
            fix = did_you_mean(name, features) or "cluster.constraint=null: its nodes have no features"
            yield error("cluster.constraint", constraint, message, fix)
    names = [node.name for node in there]
    unknown = sorted((expand_hostlist(nodelist or "") or frozenset()).difference(names))
    if unknown:
        message = f"{request.partitions_text} has no node {unknown[0]}"
        fix = "its nodes: " + (", ".join(names) if len(names) <= _KINDS else f"{names[0]} ... {names[-1]}")
        yield error("cluster.nodelist", nodelist, message, fix)


@cluster_check("cluster.gpus", "the nodes have the requested GPUs", "partitions", "nodes")
def gpu_problems(request: ClusterRequest) -> Iterator[Finding]:
    resources, per_node = request.resources, request.per_node
    yield from _find_other_gpu(request)
    if not per_node.gpus:
        return
    key = next(
        (name for name in ("gpus_per_task", "gpus_per_node") if getattr(resources, name) is not None), "gres"
    )
    what = f"{per_node.gpus} × {per_node.gpu_type}" if per_node.gpu_type else count(per_node.gpus, "GPU")

    def has(node: Node) -> str:
        return " + ".join(f"{number} × {type_ or 'GPU'}" for type_, number in node.gpus) or "no GPU"

    also = (DEVICES,) if key == "gpus_per_task" else ()
    yield from _report_too_few(
        request, _has_gpus, has, what, (f"cluster.{key}", getattr(resources, key)), also
    )


@cluster_check("cluster.cpus", "the nodes have the processors that the tasks request", "partitions", "nodes")
def cpu_problems(request: ClusterRequest) -> Iterator[Finding]:
    resources = request.resources
    what = f"{request.per_node.cpus} CPUs for {count(resources.tasks_per_node, 'task')}"
    setting: tuple[str, object] = (_CPUS, resources.cpus_per_task)
    if resources.cpus_per_task is None:
        setting = (DEVICES, resources.tasks_per_node)
    yield from _report_too_few(request, _has_cpus, lambda node: f"{node.cpus} CPUs", what, setting)


@cluster_check("cluster.memory", "the nodes have the requested memory", "partitions", "nodes")
def memory_problems(request: ClusterRequest) -> Iterator[Finding]:
    what, setting = f"{request.per_node.memory}M of memory", ("cluster.mem", request.resources.memory)
    yield from _report_too_few(request, _has_memory, lambda node: f"{node.memory}M", what, setting)


@check("data.workers", _WORKERS_FIT)
def worker_problems(values: Values, plan: Plan, engine: str, facts: Facts) -> Iterator[Finding]:
    """Find more workers that read data than the tasks of a node have CPUs.

    NeMo (megatron_gpt_model.py, build_pretraining_data_loader): each task starts as many workers, which live
    as long as the training. torch/utils/data/dataloader.py, check_worker_number_rationality: more workers
    than CPUs may be slow, or freeze. Of several kinds of nodes the one with the most CPUs counts.
    """
    workers, cluster = values.whole(_WORKERS, 0, least=0), facts.cluster
    tasks, each = plan.job.resources.tasks_per_node, plan.job.resources.cpus_per_task
    if engine != "nemo" or not workers:
        return
    if each is None and cluster is not None:
        why = cluster.missing.get("partitions") or cluster.missing.get("nodes")
        if why is not None:
            yield skip_check(_WORKERS_FIT, why)
    most = _most_cpus(plan, cluster) if each is None else tasks * each
    if most is not None and tasks * workers > most:
        has = "a node has" if each is None else f"{_CPUS}={each} gives them"
        started = f"{count(tasks, 'task')} per node start {count(tasks * workers, 'worker')}"
        text = f"{started}; {has} {count(most, 'CPU')}"
        also = (DEVICES,) if each is None else (_CPUS, DEVICES)
        yield warning(_WORKERS, workers, text, f"{full(_WORKERS)}={most // tasks} at most", also)


def _most_cpus(plan: Plan, cluster: ClusterFacts | None) -> int | None:
    """Return the CPUs of the largest node that the job may get; None where not all of its nodes are known."""
    offers = _offers(ClusterRequest(plan, cluster)) if cluster is not None else []
    if any(offer.hidden for offer in offers):
        return None
    return max((node.cpus for offer in offers for node in offer.nodes), default=None)


def _report_too_few(
    request: ClusterRequest,
    test: Callable[[Node, NodeResources], bool],
    has: Callable[[Node], str],
    what: str,
    setting: tuple[str, object],
    also: tuple[str, ...] = (),
) -> Iterator[Finding]:
    """Report that fewer nodes than requested pass a test, with their resources.

    If the partition has too few nodes of any kind, cluster.nodes reports it.
    """
    nodes, per_node = request.resources.nodes, request.per_node
    good = [(offer, sum(test(node, per_node) for node in offer.nodes)) for offer in _offers(request)]
    best, suited = max(good, key=lambda pair: pair[1] + pair[0].hidden, default=(None, 0))
    if best is None or suited + best.hidden >= nodes or best.most < nodes:
        return
    kinds = sorted(Counter(map(has, best.nodes)).items())
    listed = ", ".join(f"{number} with {kind}" for kind, number in kinds[:_KINDS])
    number = f"only {suited} of the {len(best.nodes)} nodes" if suited else "no node"
    among = f"{number} of partition {best.partition.name}{_node_description(request)}"
    text = f"{among} can give {what}; the job needs {count(nodes, 'such node')}"
    yield error(*setting, text, f"available: {listed}", (PARTITION, *also))


def _find_other_gpu(request: ClusterRequest) -> Iterator[Finding]:
    """Find a GPU in the estimates that the nodes do not have."""
    resources = request.resources
    if resources.gpu is None:
        return
    only = Resources(resources.nodes, resources.tasks_per_node, gpu_types=resources.gpu_types)
    there = gpu_of(only, request.cluster.gpu_types or ())
    if not there.is_assumed and there.gpu.name != resources.gpu:
        text = f"the estimates assume it, but the GPUs of {request.partitions_text} are {there.gpu.name}"
        yield warning("cluster.gpu", resources.gpu, text, f"cluster.gpu={there.gpu.name}")


def _node_description(request: ClusterRequest) -> str:
    queue = request.queue
    limits = [f"with {queue.constraint}"] if queue.constraint else []
    limits += [f"without {queue.exclude}"] if queue.exclude else []
    return f" ({', '.join(limits)})" if limits else ""


def _suggest_fewer_nodes(request: ClusterRequest, most: int, can: str = "run") -> str | None:
    """Suggest the largest available number of nodes."""
    is_count = most > 0 and request.has_node_count
    return f"{_count_key(request)}={most} is the largest that could {can}" if is_count else None


def _count_key(request: ClusterRequest) -> str:
    key, _ = request.nodes_key
    return f"{key}.min" if request.resources.is_elastic else full(key)


def _most_nodes(partition: Partition) -> float:
    return float("inf") if partition.max_nodes is None else partition.max_nodes


CHECKS = (node_problems, gpu_problems, cpu_problems, memory_problems, worker_problems)
