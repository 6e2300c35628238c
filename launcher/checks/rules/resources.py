"""The resources of a job: its GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, check, error, warning
from launcher.estimates.parallelism import DEVICES, CountedGpu, gpu_of
from launcher.estimates.training import precision_of
from launcher.estimates.values import Values, count, full
from launcher.plan import Plan, Resources
from launcher.slurm.cluster import gpus_in_gres
from slipway.arithmetic.gpus import gres_type

GPUS = "layout.gpus"
PER_TASK = "cluster.gpus_per_task"
ELASTIC_NODES, SPARES = "resilience.nodes", "resilience.spares"
_FP8_RECIPE = "model.fp8_recipe"
# Transformer Engine: scales of blocks are new in Hopper, MXFP8 in Blackwell (common/recipe/__init__.py).
_CAPABILITIES = {"blockwise": (9, 0), "mxfp8": (10, 0)}


@check(GPUS, "a node has a GPU for each task, and the GPUs support the precision")
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
        yield from _check_per_task(resources.tasks_per_node, resources.gpus_per_task, facts.node_gpus)
    else:
        yield from _check_per_node(resources)


def _type(resources: Resources, counted: CountedGpu) -> Iterator[Finding]:
    if counted.is_unclear:
        message = f"{counted.source.removeprefix('assumed: ')}; the estimates assume {counted.gpu.name}"
        fix = f"cluster.gpu={counted.gpu.name}, or another of docs/memory.md; cluster.gpu_types adds one"
        yield warning("cluster.gpu", None, message, fix)
    key, number = "cluster.gpus_per_node", resources.gpus_per_node
    if resources.gpus_per_task is not None:
        key, number = PER_TASK, resources.gpus_per_task
    if resources.gpu_type is not None and gres_type(resources.gres) is None and number is not None:
        message = f"the job asks with {key}={number}, of any type"
        fix = "cluster.gpu_request=gres"
        yield warning("cluster.gres", f"gpu:{resources.gpu_type}", message, fix, (key,))


def _precision(values: Values, counted: CountedGpu, engine: str | None) -> Iterator[Finding]:
    """Find a precision that a known GPU does not support."""
    gpu, source, is_assumed = counted
    if is_assumed:
        return
    recipe, precision = str(values.raw(_FP8_RECIPE)), "trainer.precision"
    own = gpu.capability or (99, 0)  # GPUs of other vendors have no limits of CUDA
    if values.flag("model.fp8") and not gpu.has_fp8:
        message = (
            f"{gpu.name} ({source}) has no FP8: Transformer Engine refuses it below compute capability 8.9,"
            " which L4, L40S and H100 have"
        )
        yield error("model.fp8", True, message, f"{full('model.fp8')}=False")
    elif values.flag("model.fp8") and (needed := _CAPABILITIES.get(recipe, own)) > own:
        message = (
            f"{gpu.name} ({source}) has compute capability {own[0]}.{own[1]}: this"
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
    """Return the GPUs of a node from one of the two; None without both."""
    named = gpus_in_gres(gres or "")
    return gpus_per_node if gpus_per_node is not None or not named else sum(number for _, number in named)


def _check_per_task(tasks: int, each: int, node: int | None) -> Iterator[Finding]:
    """Find GPUs requested by the task that a node does not have, or a task does not use."""
    devices = full(DEVICES)
    if each == 0:
        yield error(PER_TASK, each, "tasks without a GPU", f"{PER_TASK}=1")
    elif node is not None and tasks * each > node:
        message = f"{count(tasks, 'task')} per node ({devices}) need {tasks * each} GPUs; the node has {node}"
        ways = [f"{PER_TASK}=1"] * (each > 1) + [f"{devices}={node}"] * (0 < node < tasks)
        yield error(PER_TASK, each, message, " and ".join(ways) or None, (DEVICES,))
    elif each > 1:
        message = f"a task uses one GPU: {count(tasks * (each - 1), 'GPU')} of each node would be idle"
        yield warning(PER_TASK, each, message, f"{PER_TASK}=1")
    elif node is not None and tasks < node:
        yield _warn_idle(PER_TASK, each, tasks, node)


def _check_per_node(resources: Resources) -> Iterator[Finding]:
    tasks, gpus = resources.tasks_per_node, gpus_of(resources.gpus_per_node, resources.gres)
    key, value = "cluster.gpus_per_node", resources.gpus_per_node
    shown: tuple[str, object] = (key, value) if value is not None else ("cluster.gres", resources.gres)
    if gpus is not None and gpus < tasks:
        message = f"{count(tasks, 'task')} per node ({full(DEVICES)}), but {count(gpus, 'GPU')}"
        yield error(*shown, message, f"{full(DEVICES)}={gpus or 1}", (DEVICES,))
    elif gpus is not None and gpus > tasks:
        yield _warn_idle(*shown, tasks, gpus)


def _warn_idle(key: str, value: object, tasks: int, node: int) -> Finding:
    message = f"{count(node - tasks, 'GPU')} of each node would be idle: {full(DEVICES)}={tasks}"
    return warning(key, value, message, f"{full(DEVICES)}={node}", (DEVICES,))


CHECKS = (gpu_problems,)
