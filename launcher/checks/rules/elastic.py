"""A range of nodes: Slurm gives any number within it, and the layout and the batch have to fit each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from arithmetic.layout import ParallelConfig
from launcher.checks.findings import Finding, error
from launcher.checks.rules import batches
from launcher.checks.rules.layout import problems_at
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import read_parallel_config
from launcher.estimates.values import Values, count, full, listed
from launcher.plan import Plan, Resources

NODES = "resilience.nodes"

# A batch that is larger than this many of the given one is no way out.
_MOST_TIMES = 16


def is_elastic(resources: Resources) -> bool:
    """Whether the number of nodes is known in the job alone."""
    return len(resources.node_counts) > 1


def count_problems(plan: Plan) -> Iterator[Finding]:
    """The first number of nodes that does not fit, with those that do."""
    values, counts = Values(plan.job.config or {}), plan.job.resources.node_counts
    shape = read_parallel_config(values)
    if shape is None or not is_elastic(plan.job.resources):
        return
    wrong = {nodes: found for nodes in counts if (found := _problem(values, shape, nodes)) is not None}
    if not wrong:
        return
    nodes, first = next(iter(wrong.items()))
    told = f"with {count(nodes, 'node')}, which Slurm may give it, {first.message}"
    ways = _ways_out(values, shape, counts, [nodes for nodes in counts if nodes not in wrong])
    also = [key for key in (first.key, *first.also) if key not in (None, full(keys.NODES))]
    yield error(
        "elastic.counts", NODES, _range_of(counts), told, "\n".join(ways), [key for key in also if key]
    )


def request_problems(plan: Plan) -> Iterator[Finding]:
    """Slurm 22.05: "--gpus-per-task used without either --gpus or -n/--ntasks is not allowed"."""
    resources = plan.job.resources
    if is_elastic(resources) and resources.gpus_per_task is not None:
        told = f"sbatch takes it for a known number of tasks alone, and {NODES} makes it depend on the job"
        key, tasks = "cluster.gpus_per_task", resources.gpus_per_task * resources.tasks_per_node
        fix = f"cluster.gpus_per_task=null cluster.gpus_per_node={tasks}"
        yield error("elastic.gpus", key, resources.gpus_per_task, told, fix, (NODES,))


def _problem(values: Values, shape: ParallelConfig, nodes: int) -> Finding | None:
    """What keeps a job from running on so many nodes."""
    return next(chain(problems_at(shape, nodes), batches.rampup_problems(values, shape, nodes)), None)


def _ways_out(values: Values, shape: ParallelConfig, counts: range, good: list[int]) -> Iterator[str]:
    yield f"counts of {counts[0]}-{counts[-1]} that fit: {listed(good) if good else 'none'}"
    longest = _longest(good)
    if len(longest) > 1:
        yield f"'{NODES}={_shown(_range_of(longest))}'"  # a shell would take such braces apart
    elif good:
        yield f"{NODES}=null {full(keys.NODES)}={good[-1]}"
    batch = _batch_for_all(shape, counts)
    if batch is not None and not any(_problem(values, shape._replace(batch=batch), n) for n in counts):
        yield f"{full(keys.GLOBAL)}={batch}, which fits every count"


def _batch_for_all(shape: ParallelConfig, counts: range) -> int | None:
    """The least global batch from the given one on that can be divided at every count."""
    if any(nodes * shape.devices % shape.model for nodes in counts):
        return None
    group = shape.group if shape.virtual is not None and shape.pipeline > 1 else 1
    step = math.lcm(*(shape.micro * shape.data(nodes) * group for nodes in counts))
    batch = -(-shape.batch // step) * step
    return batch if batch <= _MOST_TIMES * shape.batch else None


def _longest(good: list[int]) -> range:
    """The longest range without a gap, of several the one with more nodes."""
    best, start = range(0), 0
    for index, nodes in enumerate(good):
        if index and nodes != good[index - 1] + 1:
            start = index
        if index - start + 1 >= len(best):
            best = range(good[start], nodes + 1)
    return best


def _range_of(counts: range) -> dict[str, int]:
    return {"min": counts[0], "max": counts[-1]}


def _shown(given: dict[str, int]) -> str:
    return "{" + ", ".join(f"{name}: {nodes}" for name, nodes in given.items()) + "}"
