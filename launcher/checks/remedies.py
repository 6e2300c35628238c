"""Remedies: values that would make a plan valid, found by search, for findings that are reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from launcher.checks import layout_search
from launcher.checks.facts import Facts
from launcher.checks.findings import Severity
from launcher.checks.layout_search import LayoutSearch, Suggestion
from launcher.checks.rules import layout as rules
from launcher.checks.rules.model import has_gpus
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import (
    apply_changes,
    is_encoder_decoder,
    node_counts,
    read_parallel_config,
)
from launcher.estimates.training import find_unsupported_feature
from launcher.estimates.values import Values, count, divisors, gib, listed
from launcher.plan import Plan
from slipway.arithmetic.layout import ParallelConfig, fits

_NEAREST_SHOWN = 4


def _apply(values: Values, changes: Mapping[str, Any]) -> Values:
    return Values(apply_changes(values.config, changes))


def _fits(values: Values, nodes: int) -> bool:
    shape = read_parallel_config(values)
    return shape is not None and fits(shape, nodes)


def _sizes(values: Values, shape: ParallelConfig, nodes: int) -> str | None:
    """Suggest other values of the size that does not divide the world, the others unchanged."""
    key, _ = rules.offending_key(shape, nodes)
    if key == keys.CONTEXT:
        return _contexts(values, shape, nodes)
    if key == keys.TENSOR:
        tensors = [size for size in rules.tensor_sizes(values) if _fits(_apply(values, {key: size}), nodes)]
        return f"valid tensor sizes: {listed(tensors)}" if tensors else None
    pipelines = divisors(nodes * shape.devices)
    sizes = [size for size in pipelines if _is_valid(values, shape, shape.tensor, size, nodes)]
    return f"pipeline sizes that would do with tensor {shape.tensor}: {listed(sizes)}" if sizes else None


def _contexts(values: Values, shape: ParallelConfig, nodes: int) -> str:
    """Suggest context sizes that divide the sequence, the world and the batch.

    Another sequence length would do too, and then the data's and the positions would have to change.
    """
    fitting = [size for size in divisors(nodes * shape.devices) if fits(shape._replace(context=size), nodes)]
    sizes = [size for size in fitting if _is_sequence_cut(_apply(values, {keys.CONTEXT: size}))]
    if not sizes:
        return f"no context size would do on {count(nodes, 'node')} with these batch sizes"
    return f"context sizes that would do: {listed(sizes)}"


def _is_sequence_cut(values: Values) -> bool:
    # NeMo's answer: without tensor parallel, any context size yields only a warning.
    problems = (*rules.context_problems(values, "nemo"), *rules.sequence_parallel_problems(values, "nemo"))
    return not any(problem.severity is Severity.ERROR for problem in problems)


def _node_counts(values: Values, shape: ParallelConfig, nodes: int) -> str:
    counts = node_counts(shape)
    return f"node counts that would do: {listed(counts) if counts else f'none up to {keys.MOST_NODES}'}"


def _split(values: Values, tensor: int, pipeline: int) -> dict[str, Any]:
    changes = {keys.TENSOR: tensor, keys.PIPELINE: pipeline}
    return {**changes, keys.SPLIT_RANK: pipeline // 2} if is_encoder_decoder(values) else changes


def _is_valid(values: Values, shape: ParallelConfig, tensor: int, pipeline: int, nodes: int) -> bool:
    """Return True if tensor and pipeline sizes divide the world, the batch and the layers."""
    if shape.virtual is not None and pipeline == 1:
        return False
    tried = _apply(values, _split(values, tensor, pipeline))
    return _fits(tried, nodes) and rules.layers_fit(tried)


def _micro_batches(values: Values, shape: ParallelConfig, nodes: int) -> str | None:
    sizes = [size for size in divisors(shape.batch) if fits(shape._replace(micro=size), nodes)]
    return f"valid micro batch sizes: {listed(sizes)}" if sizes else None


def _global_batches(values: Values, shape: ParallelConfig, nodes: int) -> str | None:
    """Suggest the nearest multiples of one micro batch for all copies of the model."""
    step = shape.micro * shape.data(nodes) * (shape.group if shape.virtual is not None else 1)
    if step == 0:
        return None
    below = shape.batch // step * step
    near = [size for size in range(below - step, below + 3 * step, step) if size > 0]
    return f"global batches near it: {listed(near[:_NEAREST_SHOWN])}, ... (multiples of {step})"


_Way = Callable[[Values, ParallelConfig, int], str | None]


def _suggest_sizes(ways: Sequence[_Way], plan: Plan, _: Facts) -> str | None:
    """Suggest other values of single sizes; None if the layout has invalid sizes."""
    values = Values(plan.job.config or {})
    parallel = read_parallel_config(values)
    if parallel is None:
        return None
    lines = [way(values, parallel, plan.job.resources.nodes) for way in ways]
    return "\n".join(line for line in lines if line is not None)


def _suggest_world(plan: Plan, facts: Facts) -> str:
    """Suggest layouts that have room, and sizes that divide the world, with or without room."""
    numbers = _suggest_sizes([_sizes, _node_counts], plan, facts)
    alone = "by arithmetic alone, whether or not the memory is enough"
    return f"{would_fit(plan, facts)}\n{alone}:\n{numbers}"


def would_fit(plan: Plan, facts: Facts) -> str:
    """Name the nearest and the fastest layout that fit, or explain why none does.

    Layouts without an estimate of their memory are not named.
    """
    config = plan.job.config or {}
    why = find_unsupported_feature(Values(config)) if has_gpus(plan) else None
    if why is not None:
        return f"no layout is suggested: {why}"
    search = LayoutSearch(plan, facts)
    nearest = search.nearest()
    if nearest is None:
        halved = next(layout_search.find_best_with_half_gradients(plan, facts), None)
        if halved is not None:
            return f"would fit, with gradients in bf16: {_format(config, halved)}"
        return why_none(search, layout_search.search_least_nodes(plan, facts))
    lines = [f"would fit: {_format(config, nearest)}"]
    fastest = next(search.best(), None)
    if fastest and fastest.seconds and nearest.seconds:
        saved = 1 - fastest.seconds / nearest.seconds
        if saved > 2 * layout_search.EQUAL_STEPS:
            lines.append(f"would fit, with {saved:.0%} less time for a step: {_format(config, fastest)}")
    halved = layout_search.find_own_with_half_gradients(search)
    if halved is not None:
        lines.append(f"this layout would fit, with gradients in bf16: {_format(config, halved)}")
    return "\n".join(lines)


def why_none(search: LayoutSearch, more: Suggestion | None) -> str:
    """Explain why nothing fits: the smallest layout, and the nodes on which one fits."""
    job, smallest = search.plan.job, search.smallest
    if job.resources.is_elastic:
        counts = job.resources.node_counts
        return f"no layout fits every number of nodes from {counts[0]} to {counts[-1]}"
    message = f"no layout fits on {count(search.nodes, 'node')}"
    if smallest is None:
        message += " with these batch sizes"
    elif search.fits(smallest):
        message += ", for other reasons than memory: slipway check names them"
    elif smallest.fullest is not None:
        layout, stage = smallest.layout, smallest.fullest
        total, memory = map(gib, (stage.total, search.counted.gpu.memory))
        message += (
            f": the smallest, tensor {layout.tensor} × pipeline {layout.pipeline} × context {layout.context},"
            f" takes {total} of {memory} GiB on stage {stage.stage}"
        )
    if more is None:
        return f"{message}\nnor on another number of nodes up to {keys.MOST_NODES}, as far as was searched"
    return f"{message}\nwould fit on {count(more.nodes, 'node')}: {_format(job.config or {}, more)}"


def _format(config: Mapping[str, Any], suggestion: Suggestion) -> str:
    return " ".join(layout_search.overrides(config, suggestion)) or "the layout as it is"


# Valid values by the id of a check, for its findings that name no remedy themselves.
REMEDIES: Mapping[str, Callable[[Plan, Facts], str | None]] = {
    "layout.world": _suggest_world,
    "layout.context": partial(_suggest_sizes, [_contexts]),
    "layout.experts": partial(_suggest_sizes, [_node_counts]),
    "batch.global": partial(_suggest_sizes, [_global_batches, _micro_batches, _node_counts]),
    "batch.interleaved": partial(_suggest_sizes, [_global_batches, _micro_batches, _node_counts]),
    "memory.fits": would_fit,
}
