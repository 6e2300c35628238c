"""The resources of a job: its GPUs, a range of nodes, the ranks that are profiled."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import chain

from arithmetic.layout import ParallelConfig
from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, error, warning
from launcher.checks.rules.layout import problems_at
from launcher.checks.rules.training import rampup_problems_at
from launcher.estimates import parallelism as keys
from launcher.estimates.model import precision_of
from launcher.estimates.parallelism import DEVICES, NODES, CountedGpu, gpu_of, read_parallel_config
from launcher.estimates.values import Values, count, full, listed
from launcher.plan import Plan, Resources

CHECK = "layout.gpus"
_GRES = re.compile(r"gpu(?::[\w.-]+)?:(\d+)")
_PER_TASK = "cluster.gpus_per_task"

ELASTIC_NODES = "resilience.nodes"
# A batch that is larger than this many of the given one is no way out.
_MOST_TIMES = 16
_RANKS = "model.nsys_profile.ranks"
_FP8_RECIPE = "model.fp8_recipe"
# Transformer Engine: scales of blocks are new in Hopper, MXFP8 in Blackwell (common/recipe/__init__.py).
_CAPABILITIES = {"blockwise": (9, 0), "mxfp8": (10, 0)}


def gpu_problems(values: Values, plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find tasks without a GPU each, and GPUs without the precision."""
    resources = plan.job.resources
    if values.raw("trainer.accelerator") == "cpu":
        return
    if facts.lacks_gpus is not None and values.raw("trainer.accelerator") in ("gpu", "cuda"):
        key, value = "trainer.accelerator", values.raw("trainer.accelerator")
        yield warning(CHECK, key, value, facts.lacks_gpus, f"{full(key)}=cpu")
    counted = gpu_of(resources, facts.gpu_types)
    yield from _type(resources, counted)
    yield from _precision(values, counted)
    if resources.gpus_per_task is not None:
        yield from _per_task(resources.tasks_per_node, resources.gpus_per_task, facts.node_gpus)
    else:
        yield from _per_node(resources)


def python_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Check that the supervisor of a job has its Python, on this machine or on nodes that are like it."""
    if not facts.supervisor_python:
        return
    scheduler, check, key = plan.scheduler, "job.python", "cluster.scheduler"
    if scheduler == "local":
        fix = "install Python 3.6.2 or newer as /usr/bin/python3"
        yield error(check, key, scheduler, f"{facts.supervisor_python}: the job would end at once", fix)
        return
    text = f"{facts.supervisor_python}; on nodes that are like it the job would end at once"
    yield warning(check, key, scheduler, text, "ask the nodes: slipway doctor --nodes")


def _type(resources: Resources, counted: CountedGpu) -> Iterator[Finding]:
    """Find a type of GPU that is not known, or not asked for."""
    if counted.is_unclear:
        message = f"{counted.source.removeprefix('assumed: ')}; estimates count with {counted.gpu.name}"
        fix = f"cluster.gpu={counted.gpu.name}, or another of docs/memory.md; cluster.gpu_types adds one"
        yield warning(CHECK, "cluster.gpu", None, message, fix)
    asked = resources.gpus_per_node if resources.gpus_per_task is None else resources.gpus_per_task
    if resources.gpu_type is not None and resources.gres is None and asked is not None:
        key = "gpus_per_node" if resources.gpus_per_task is None else "gpus_per_task"
        message = f"the job asks with cluster.{key}={asked}, of any type"
        also = (f"cluster.{key}",)
        shown = f"gpu:{resources.gpu_type}"
        yield warning(CHECK, "cluster.gres", shown, message, "cluster.gpu_request=gres", also)


def _precision(values: Values, counted: CountedGpu) -> Iterator[Finding]:
    """Find a precision that the GPU does not compute in, where the GPU is known."""
    gpu, source, is_assumed = counted
    if is_assumed:
        return
    recipe = str(values.raw(_FP8_RECIPE))
    if values.flag("model.fp8") and not gpu.has_fp8:
        message = (
            f"{gpu.name} ({source}) has no FP8: Transformer Engine refuses it below compute capability 8.9,"
            " which L4, L40S and H100 have"
        )
        yield error(CHECK, "model.fp8", True, message, f"{full('model.fp8')}=False")
    elif values.flag("model.fp8") and (needed := _CAPABILITIES.get(recipe, gpu.capability)) > gpu.capability:
        message = (
            f"{gpu.name} ({source}) has compute capability {gpu.capability[0]}.{gpu.capability[1]}: this"
            f" recipe needs {needed[0]}.{needed[1]}"
        )
        yield error(CHECK, _FP8_RECIPE, recipe, message, f"{full(_FP8_RECIPE)}=tensorwise")
    precision = values.raw("trainer.precision")
    if precision_of(values) == "bf16" and not gpu.has_bf16:
        message = (
            f"{gpu.name} ({source}) has no bf16, which is new with the A100: fused kernels refuse it, and"
            " others are slow"
        )
        yield warning(CHECK, "trainer.precision", precision, message, f"{full('trainer.precision')}=16")


def gpus_of(gpus_per_node: int | None, gres: str | None) -> int | None:
    """Return the GPUs of a node, as far as one of the two says it."""
    named = _GRES.fullmatch(gres or "")
    return gpus_per_node if gpus_per_node is not None else int(named[1]) if named else None


def _per_task(tasks: int, each: int, node: int | None) -> Iterator[Finding]:
    """Find GPUs requested by the task that a node does not have, or a task does not use."""
    if each == 0:
        yield error(CHECK, _PER_TASK, each, "tasks without a GPU", f"{_PER_TASK}=1")
    elif node is not None and tasks * each > node:
        message = (
            f"{count(tasks, 'task')} to a node ({full(DEVICES)}) need {tasks * each} GPUs, and it has {node}"
        )
        ways = [f"{_PER_TASK}=1"] * (each > 1) + [f"{full(DEVICES)}={node}"] * (0 < node < tasks)
        yield error(CHECK, _PER_TASK, each, message, " and ".join(ways) or None, also=(DEVICES,))
    elif each > 1:
        message = f"a task uses one GPU: {count(tasks * (each - 1), 'GPU')} of each node would be idle"
        yield warning(CHECK, _PER_TASK, each, message, f"{_PER_TASK}=1")
    elif node is not None and tasks < node:
        message = f"{count(node - tasks, 'GPU')} of each node would be idle: {full(DEVICES)}={tasks}"
        yield warning(CHECK, _PER_TASK, each, message, f"{full(DEVICES)}={node}", also=(DEVICES,))


def _per_node(resources: Resources) -> Iterator[Finding]:
    tasks, given = resources.tasks_per_node, gpus_of(resources.gpus_per_node, resources.gres)
    key = "cluster.gpus_per_node" if resources.gpus_per_node is not None else "cluster.gres"
    if given is None or given == tasks:
        return
    shown = resources.gres if key == "cluster.gres" else given
    if given < tasks:
        message = f"{count(tasks, 'task')} to a node ({full(DEVICES)}), and {count(given, 'GPU')} for them"
        yield error(CHECK, key, shown, message, f"{full(DEVICES)}={given or 1}", also=(DEVICES,))
    else:
        idle = given - tasks
        message = f"{count(idle, 'GPU')} of each node would be idle: {full(DEVICES)}={tasks}"
        yield warning(CHECK, key, shown, message, f"{full(DEVICES)}={given}", also=(DEVICES,))


def count_problems(plan: Plan) -> Iterator[Finding]:
    """Find the first number of nodes of a range that does not fit, and name those that do."""
    values, counts = Values(plan.job.config or {}), plan.job.resources.node_counts
    shape = read_parallel_config(values)
    if shape is None or not plan.job.resources.is_elastic:
        return
    wrong = {nodes: found for nodes in counts if (found := _problem(values, shape, nodes)) is not None}
    if not wrong:
        return
    nodes, first = next(iter(wrong.items()))
    message = f"with {count(nodes, 'node')}, which Slurm may give it, {first.message}"
    ways = _ways_out(values, shape, counts, [nodes for nodes in counts if nodes not in wrong])
    also = [key for key in (first.key, *first.also) if key not in (None, full(keys.NODES))]
    yield error(
        "elastic.counts",
        ELASTIC_NODES,
        _range_of(counts),
        message,
        "\n".join(ways),
        [key for key in also if key],
    )


def request_problems(plan: Plan) -> Iterator[Finding]:
    """Find what Slurm 22.05 refuses: "--gpus-per-task used without either --gpus or -n/--ntasks"."""
    resources = plan.job.resources
    if resources.is_elastic and resources.gpus_per_task is not None:
        message = (
            f"sbatch takes it for a fixed number of tasks only, and with {ELASTIC_NODES} it is not fixed"
        )
        key, tasks = "cluster.gpus_per_task", resources.gpus_per_task * resources.tasks_per_node
        fix = f"cluster.gpus_per_task=null cluster.gpus_per_node={tasks}"
        yield error("elastic.gpus", key, resources.gpus_per_task, message, fix, (ELASTIC_NODES,))


def _problem(values: Values, shape: ParallelConfig, nodes: int) -> Finding | None:
    """Return what keeps a job from running on so many nodes."""
    return next(chain(problems_at(shape, nodes), rampup_problems_at(values, shape, nodes)), None)


def _ways_out(values: Values, shape: ParallelConfig, counts: range, good: list[int]) -> Iterator[str]:
    yield f"counts of {counts[0]}-{counts[-1]} that fit: {listed(good) if good else 'none'}"
    longest = _longest(good)
    if len(longest) > 1:
        yield f"'{ELASTIC_NODES}={_shown(_range_of(longest))}'"  # a shell would take such braces apart
    elif good:
        yield f"{ELASTIC_NODES}=null {full(keys.NODES)}={good[-1]}"
    batch = _batch_for_all(shape, counts)
    if batch is not None and not any(_problem(values, shape._replace(batch=batch), n) for n in counts):
        yield f"{full(keys.GLOBAL)}={batch}, which fits every count"


def _batch_for_all(shape: ParallelConfig, counts: range) -> int | None:
    """Return the least global batch, from the given one on, that can be divided at every count."""
    if any(nodes * shape.devices % shape.model for nodes in counts):
        return None
    group = shape.group if shape.virtual is not None and shape.pipeline > 1 else 1
    step = math.lcm(*(shape.micro * shape.data(nodes) * group for nodes in counts))
    batch = -(-shape.batch // step) * step
    return batch if batch <= _MOST_TIMES * shape.batch else None


def _longest(good: list[int]) -> range:
    """Return the longest range without a gap, of several the one with more nodes."""
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


def rank_problems(plan: Plan) -> Iterator[Finding]:
    """Find profiled ranks that the job does not have."""
    profile, tasks = plan.job.profile, plan.job.resources.tasks
    if profile is None:
        return
    beyond = [rank for rank in profile.ranks if rank >= tasks]
    if beyond:
        message = f"there is no rank {beyond[0]} among {count(tasks, 'task')}"
        yield error(
            "profile.ranks", _RANKS, list(profile.ranks), message, f"ranks 0 to {tasks - 1}", (NODES,)
        )
