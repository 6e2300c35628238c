"""GPUs that the job asks for, and tasks that use them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, error, warning
from launcher.estimates.gpus import CountedGpu, gpu_of
from launcher.estimates.model import precision_of
from launcher.estimates.parallelism import DEVICES
from launcher.estimates.values import Values, count, full
from launcher.plan import Resources

CHECK = "layout.gpus"
_GRES = re.compile(r"gpu(?::[\w.-]+)?:(\d+)")
_PER_TASK = "cluster.gpus_per_task"


def gpu_problems(values: Values, resources: Resources, facts: Facts) -> Iterator[Finding]:
    """One task per GPU: `trainer.devices` on each node, as many GPUs from the cluster, with the precision."""
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


def _type(resources: Resources, counted: CountedGpu) -> Iterator[Finding]:
    """The type of GPU that is named is one that is known, and that is asked for."""
    if counted.is_unclear:
        told = f"{counted.source.removeprefix('assumed: ')}; estimates count with {counted.gpu.name}"
        fix = f"cluster.gpu={counted.gpu.name}, or another of docs/memory.md; cluster.gpu_types adds one"
        yield warning(CHECK, "cluster.gpu", None, told, fix)
    asked = resources.gpus_per_node if resources.gpus_per_task is None else resources.gpus_per_task
    if resources.gpu_type is not None and resources.gres is None and asked is not None:
        key = "gpus_per_node" if resources.gpus_per_task is None else "gpus_per_task"
        told = f"the job asks with cluster.{key}={asked}, of any type"
        also = (f"cluster.{key}",)
        shown = f"gpu:{resources.gpu_type}"
        yield warning(CHECK, "cluster.gres", shown, told, "cluster.gpu_request=gres", also)


def _precision(values: Values, counted: CountedGpu) -> Iterator[Finding]:
    """A GPU that somebody says is there has the types that are computed in."""
    gpu, source, is_assumed = counted
    if is_assumed:
        return
    if values.flag("model.fp8") and not gpu.has_fp8:
        told = (
            f"{gpu.name} ({source}) has no FP8: Transformer Engine refuses it below compute capability 8.9,"
            " which L4, L40S and H100 have"
        )
        yield error(CHECK, "model.fp8", True, told, f"{full('model.fp8')}=False")
    precision = values.raw("trainer.precision")
    if precision_of(values) == "bf16" and not gpu.has_bf16:
        told = (
            f"{gpu.name} ({source}) has no bf16, which is new with the A100: fused kernels refuse it, and"
            " others are slow"
        )
        yield warning(CHECK, "trainer.precision", precision, told, f"{full('trainer.precision')}=16")


def gpus_of(gpus_per_node: int | None, gres: str | None) -> int | None:
    """The GPUs of a node, as far as one of the two says it."""
    named = _GRES.fullmatch(gres or "")
    return gpus_per_node if gpus_per_node is not None else int(named[1]) if named else None


def _per_task(tasks: int, each: int, node: int | None) -> Iterator[Finding]:
    """GPUs that are asked for by the task: a node must have them all, and a task uses one."""
    if each == 0:
        yield error(CHECK, _PER_TASK, each, "tasks without a GPU", f"{_PER_TASK}=1")
    elif node is not None and tasks * each > node:
        told = (
            f"{count(tasks, 'task')} to a node ({full(DEVICES)}) need {tasks * each} GPUs, and it has {node}"
        )
        ways = [f"{_PER_TASK}=1"] * (each > 1) + [f"{full(DEVICES)}={node}"] * (0 < node < tasks)
        yield error(CHECK, _PER_TASK, each, told, " and ".join(ways) or None, also=(DEVICES,))
    elif each > 1:
        told = f"a task uses one GPU: {count(tasks * (each - 1), 'GPU')} of each node would be idle"
        yield warning(CHECK, _PER_TASK, each, told, f"{_PER_TASK}=1")
    elif node is not None and tasks < node:
        told = f"{count(node - tasks, 'GPU')} of each node would be idle: {full(DEVICES)}={tasks}"
        yield warning(CHECK, _PER_TASK, each, told, f"{full(DEVICES)}={node}", also=(DEVICES,))


def _per_node(resources: Resources) -> Iterator[Finding]:
    tasks, given = resources.tasks_per_node, gpus_of(resources.gpus_per_node, resources.gres)
    key = "cluster.gpus_per_node" if resources.gpus_per_node is not None else "cluster.gres"
    if given is None or given == tasks:
        return
    shown = resources.gres if key == "cluster.gres" else given
    if given < tasks:
        told = f"{count(tasks, 'task')} to a node ({full(DEVICES)}), and {count(given, 'GPU')} for them"
        yield error(CHECK, key, shown, told, f"{full(DEVICES)}={given or 1}", also=(DEVICES,))
    else:
        idle = given - tasks
        told = f"{count(idle, 'GPU')} of each node would be idle: {full(DEVICES)}={tasks}"
        yield warning(CHECK, key, shown, told, f"{full(DEVICES)}={given}", also=(DEVICES,))
