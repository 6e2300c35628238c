"""The rule that a model fits into the memory of its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from arithmetic.gpus import GPUS
from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity, error, warning
from launcher.estimates import parallelism as keys
from launcher.estimates.gpus import CountedGpu, gpu_of
from launcher.estimates.memory import StageMemory, estimate_memory
from launcher.estimates.training import uncounted
from launcher.estimates.values import Values
from launcher.plan import Plan

CHECK = "memory.fits"
_GIB = 2**30
_STATES = ("weights", "gradients", "optimizer")


def memory_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Compare the fullest pipeline stage with its GPU.

    An error if the estimate alone is more than there is; a warning if it leaves less than the margin, or if
    it is only assumed which GPU there is, unless no GPU known here would do.
    """
    config, resources = plan.job.config, plan.job.resources
    if config is None or not has_gpus(plan):
        return
    stages = estimate_memory(config, resources.nodes, plan.job.engine)
    if stages is None:
        yield from _not_told(Values(config))
        return
    counted, fullest = gpu_of(resources, facts.gpu_types), max(stages, key=lambda stage: stage.total)
    allowed = int(counted.gpu.memory * (1 - plan.assumptions.memory_margin))
    if fullest.total <= allowed:
        return
    too_much = fullest.total > counted.gpu.memory
    certain = not counted.is_assumed or fullest.total > max(gpu.memory for gpu in GPUS.values())
    tell = error if too_much and certain else warning
    key, value = _blamed(config, fullest)
    yield tell(
        CHECK,
        key,
        value,
        f"{_needs(fullest, len(stages))}; {_has(counted, fullest, plan.assumptions.memory_margin)}",
        also=tuple(name for name in (keys.TENSOR, keys.PIPELINE, keys.MICRO, keys.NODES) if name != key),
    )


def parts_told(stage: StageMemory) -> str:
    """Format the parts of a stage's memory, the largest first."""
    parts = {name: getattr(stage, name) for name in (*_STATES, "activations", "logits")}
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / _GIB:.1f}" for name, size in largest if size >= _GIB / 20)


def has_gpus(plan: Plan) -> bool:
    """Return False for tasks on this machine that ask for no GPU: they may do without."""
    resources = plan.job.resources
    asked = resources.gpus_per_node, resources.gpus_per_task, resources.gres, resources.gpu
    return plan.scheduler != "local" or any(asked)


def why_not_told(plan: Plan) -> str | None:
    """Return why the memory of a plan with a valid layout is not estimated; None if it is."""
    if plan.job.config is None:
        return f"stages=[{plan.job.stage}] trains nothing"
    if not has_gpus(plan) or Values(plan.job.config).raw("trainer.accelerator") == "cpu":
        return "no GPUs are asked for"
    return uncounted(Values(plan.job.config))


def _not_told(values: Values) -> Iterator[Finding]:
    """Say what is not counted; what is wrong with a value, or with the layout, other checks say."""
    why = uncounted(values)
    if why is not None and values.raw("trainer.accelerator") != "cpu":
        text = f"not checked: the model fits into the memory of a GPU ({why})"
        yield Finding(CHECK, Severity.SKIPPED, None, text, why=why)


def _blamed(config: Mapping[str, Any], stage: StageMemory) -> tuple[str, Any]:
    """Return the size to change first: micro batch if the activations are most, else tensor."""
    values = Values(config)
    micro = values.whole(keys.MICRO) or 1
    states = stage.weights + stage.gradients + stage.optimizer
    if micro > 1 and stage.total - states > states:
        return keys.MICRO, micro
    return keys.TENSOR, values.whole(keys.TENSOR, 1)


def _needs(stage: StageMemory, stages: int) -> str:
    where = f"pipeline stage {stage.stage} of {stages} (from 0) needs" if stages > 1 else "a GPU needs"
    return f"{where} {stage.total / _GIB:.1f} GiB ({parts_told(stage)})"


def _has(counted: CountedGpu, stage: StageMemory, margin: float) -> str:
    gpu = counted.gpu
    room = f"{gpu.name} has {gpu.memory / _GIB:.1f} GiB ({counted.source})"
    if counted.is_assumed:
        room = f"{gpu.name}, which is assumed, has {gpu.memory / _GIB:.1f} GiB (cluster.gpu=... says which)"
    over = stage.total - gpu.memory
    if over > 0:
        return f"{room}: {over / _GIB:.1f} GiB too little"
    free = -over / _GIB
    return (
        f"{room}: {free:.1f} GiB are left for CUDA, NCCL and fragments, of {margin:.0%} that they should have"
    )
