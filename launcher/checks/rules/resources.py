"""The resources of a job: its GPUs, a range of nodes, the ranks that are profiled."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import chain

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, check, error, warning
from launcher.checks.rules.layout import problems_at
from launcher.checks.rules.training import rampup_problems_at
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import DEVICES, NODES, CountedGpu, gpu_of, read_parallel_config
from launcher.estimates.training import precision_of
from launcher.estimates.values import Values, count, full, listed
from launcher.plan import Plan, Resources
from slipway.arithmetic.layout import ParallelConfig

GPUS = "layout.gpus"
_GRES = re.compile(r"gpu(?::[\w.-]+)?:(\d+)")
_PER_TASK = "cluster.gpus_per_task"

ELASTIC_NODES = "resilience.nodes"
# A batch that is larger than this many of the given one is no way out.
_MOST_TIMES = 16
_FP8_RECIPE = "model.fp8_recipe"
# Transformer Engine: scales of blocks are new in Hopper, MXFP8 in Blackwell (common/recipe/__init__.py).
_CAPABILITIES = {"blockwise": (9, 0), "mxfp8": (10, 0)}


@check(GPUS, "there are as many GPUs on a node as tasks, with the types that they compute in")
def gpu_problems(values: Values, plan: Plan, facts: Facts) -> Iterator[Finding]:
    resources, key = plan.job.resources, "trainer.accelerator"
    accelerator = values.raw(key)
    if accelerator == "cpu":
        return
    if facts.lacks_gpus is not None and accelerator in ("gpu", "cuda"):
        yield warning(key, accelerator, facts.lacks_gpus, f"{full(key)}=cpu")
    counted = gpu_of(resources, facts.gpu_types)
    yield from _type(resources, counted)
    yield from _precision(values, counted, plan.job.engine)
    if resources.gpus_per_task is not None:
        yield from _per_task(resources.tasks_per_node, resources.gpus_per_task, facts.node_gpus)
    else:
        yield from _per_node(resources)


@check("job.python", "the job's supervisor has a Python, 3.6.2 or newer", "supervisor_python")
def python_problems(plan: Plan, supervisor_python: str) -> Iterator[Finding]:
    """Check that the supervisor of a job has its Python, on this machine or on nodes that are like it."""
    key, scheduler = "cluster.scheduler", plan.scheduler
    if supervisor_python and scheduler == "local":
        fix = "install Python 3.6.2 or newer as /usr/bin/python3"
        yield error(key, scheduler, f"{supervisor_python}: the job would end at once", fix)
    elif supervisor_python:
        text = f"{supervisor_python}; on nodes that are like it the job would end at once"
        yield warning(key, scheduler, text, "ask the nodes: slipway doctor --nodes")


def _type(resources: Resources, counted: CountedGpu) -> Iterator[Finding]:
    if counted.is_unclear:
        message = f"{counted.source.removeprefix('assumed: ')}; the estimates assume {counted.gpu.name}"
        fix = f"cluster.gpu={counted.gpu.name}, or another of docs/memory.md; cluster.gpu_types adds one"
        yield warning("cluster.gpu", None, message, fix)
    key, number = "cluster.gpus_per_node", resources.gpus_per_node
    if resources.gpus_per_task is not None:
        key, number = _PER_TASK, resources.gpus_per_task
    if resources.gpu_type is not None and resources.gres is None and number is not None:
        message = f"the job asks with {key}={number}, of any type"
        fix = "cluster.gpu_request=gres"
        yield warning("cluster.gres", f"gpu:{resources.gpu_type}", message, fix, (key,))


def _precision(values: Values, counted: CountedGpu, engine: str | None) -> Iterator[Finding]:
    """Find a precision that the GPU does not compute in, where the GPU is known."""
    gpu, source, is_assumed = counted
    if is_assumed:
        return
    recipe, precision = str(values.raw(_FP8_RECIPE)), "trainer.precision"
    if values.flag("model.fp8") and not gpu.has_fp8:
        message = (
            f"{gpu.name} ({source}) has no FP8: Transformer Engine refuses it below compute capability 8.9,"
            " which L4, L40S and H100 have"
        )
        yield error("model.fp8", True, message, f"{full('model.fp8')}=False")
    elif values.flag("model.fp8") and (needed := _CAPABILITIES.get(recipe, gpu.capability)) > gpu.capability:
        message = (
            f"{gpu.name} ({source}) has compute capability {gpu.capability[0]}.{gpu.capability[1]}: this"
            f" recipe needs {needed[0]}.{needed[1]}"
        )
        yield error(_FP8_RECIPE, recipe, message, f"{full(_FP8_RECIPE)}=tensorwise")
    if precision_of(values) == "bf16" and not gpu.has_bf16:
        message = (
            f"{gpu.name} ({source}) has no bf16, which is new with the A100: fused kernels refuse it, and"
            " others are slow"
        )
        fix = f"{full(precision)}=16"
        if engine == "megatron":
            fix = f"{full(precision)}=32; or {fix} with engine=nemo or engine=megatron_lm, which have fp16"
        yield warning(precision, values.raw(precision), message, fix)


def gpus_of(gpus_per_node: int | None, gres: str | None) -> int | None:
    """Return the GPUs of a node, as far as one of the two says it."""
    named = _GRES.fullmatch(gres or "")
    return gpus_per_node if gpus_per_node is not None else int(named[1]) if named else None


def _per_task(tasks: int, each: int, node: int | None) -> Iterator[Finding]:
    """Find GPUs requested by the task that a node does not have, or a task does not use."""
    devices = full(DEVICES)
    if each == 0:
        yield error(_PER_TASK, each, "tasks without a GPU", f"{_PER_TASK}=1")
    elif node is not None and tasks * each > node:
        message = f"{count(tasks, 'task')} per node ({devices}) need {tasks * each} GPUs; the node has {node}"
        ways = [f"{_PER_TASK}=1"] * (each > 1) + [f"{devices}={node}"] * (0 < node < tasks)
        yield error(_PER_TASK, each, message, " and ".join(ways) or None, (DEVICES,))
    elif each > 1:
        message = f"a task uses one GPU: {count(tasks * (each - 1), 'GPU')} of each node would be idle"
        yield warning(_PER_TASK, each, message, f"{_PER_TASK}=1")
    elif node is not None and tasks < node:
        yield _idle(_PER_TASK, each, tasks, node)


def _per_node(resources: Resources) -> Iterator[Finding]:
    tasks, gpus = resources.tasks_per_node, gpus_of(resources.gpus_per_node, resources.gres)
    key, value = "cluster.gpus_per_node", resources.gpus_per_node
    shown: tuple[str, object] = (key, value) if value is not None else ("cluster.gres", resources.gres)
    if gpus is not None and gpus < tasks:
        message = f"{count(tasks, 'task')} per node ({full(DEVICES)}), but {count(gpus, 'GPU')}"
        yield error(*shown, message, f"{full(DEVICES)}={gpus or 1}", (DEVICES,))
    elif gpus is not None and gpus > tasks:
        yield _idle(*shown, tasks, gpus)


def _idle(key: str, value: object, tasks: int, node: int) -> Finding:
    message = f"{count(node - tasks, 'GPU')} of each node would be idle: {full(DEVICES)}={tasks}"
    return warning(key, value, message, f"{full(DEVICES)}={node}", (DEVICES,))


@check("elastic.counts", "every number of nodes of a range fits the layout and the batch")
def count_problems(plan: Plan) -> Iterator[Finding]:
    """Find the first number of nodes of a range that does not fit, and name those that do."""
    values, counts = Values(plan.job.config or {}), plan.job.resources.node_counts
    shape = read_parallel_config(values)
    if shape is None or not plan.job.resources.is_elastic:
        return
    wrong = {nodes: finding for nodes in counts if (finding := _problem(values, shape, nodes)) is not None}
    if not wrong:
        return
    nodes, first = next(iter(wrong.items()))
    message = f"with {count(nodes, 'node')}, which Slurm may give it, {first.message}"
    ways = _ways_out(values, shape, counts, [nodes for nodes in counts if nodes not in wrong])
    also = [key for key in (first.key, *first.also) if key and key != full(keys.NODES)]
    yield error(ELASTIC_NODES, {"min": counts[0], "max": counts[-1]}, message, "\n".join(ways), also)


@check("elastic.gpus", "GPUs are not asked for by task where the number of tasks is not known")
def request_problems(plan: Plan) -> Iterator[Finding]:
    """Find what Slurm 22.05 refuses: "--gpus-per-task used without either --gpus or -n/--ntasks"."""
    resources = plan.job.resources
    if resources.is_elastic and resources.gpus_per_task is not None:
        message = (
            f"sbatch takes it for a fixed number of tasks only, and with {ELASTIC_NODES} it is not fixed"
        )
        tasks = resources.gpus_per_task * resources.tasks_per_node
        fix = f"{_PER_TASK}=null cluster.gpus_per_node={tasks}"
        yield error(_PER_TASK, resources.gpus_per_task, message, fix, (ELASTIC_NODES,))


def _problem(values: Values, shape: ParallelConfig, nodes: int) -> Finding | None:
    return next(chain(problems_at(shape, nodes), rampup_problems_at(values, shape, nodes)), None)


def _ways_out(values: Values, shape: ParallelConfig, counts: range, good: list[int]) -> Iterator[str]:
    yield f"counts of {counts[0]}-{counts[-1]} that fit: {listed(good) if good else 'none'}"
    longest = _longest(good)
    if len(longest) > 1:
        # Quoted: a shell would take such braces apart.
        yield f"'{ELASTIC_NODES}={{min: {longest[0]}, max: {longest[-1]}}}'"
    elif good:
        yield f"{ELASTIC_NODES}=null {full(keys.NODES)}={good[-1]}"
    # The least global batch, from the given one on, that can be divided at every count.
    if any(nodes * shape.devices % shape.model for nodes in counts):
        return
    step = math.lcm(*(shape.rampup_multiple(nodes) for nodes in counts))
    batch = -(-shape.batch // step) * step
    is_near = batch <= _MOST_TIMES * shape.batch
    if is_near and not any(_problem(values, shape._replace(batch=batch), nodes) for nodes in counts):
        yield f"{full(keys.GLOBAL)}={batch}, which fits every count"


def _longest(good: list[int]) -> range:
    """Return the longest range without a gap, of several the one with more nodes."""
    best, start = range(0), 0
    for index, nodes in enumerate(good):
        if index and nodes != good[index - 1] + 1:
            start = index
        if index - start + 1 >= len(best):
            best = range(good[start], nodes + 1)
    return best


@check("profile.ranks", "profiled ranks are there")
def rank_problems(plan: Plan) -> Iterator[Finding]:
    ranks, tasks = plan.job.profile.ranks if plan.job.profile is not None else (), plan.job.resources.tasks
    beyond = [rank for rank in ranks if rank >= tasks]
    if beyond:
        message = f"there is no rank {beyond[0]} among {count(tasks, 'task')}"
        yield error("model.nsys_profile.ranks", list(ranks), message, f"ranks 0 to {tasks - 1}", (NODES,))
