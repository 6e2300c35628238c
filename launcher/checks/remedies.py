"""Remedies of findings about layouts: other sizes, other node counts, other layouts.

They are looked for once it is known what is reported: looking for layouts runs the checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from arithmetic.layout import ParallelConfig, fits
from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity
from launcher.checks.layout_search import (
    EQUAL_STEPS,
    LayoutSearch,
    Suggestion,
    best_with_half_gradients,
    gib,
    on_least_nodes,
    overrides,
    own_with_half_gradients,
)
from launcher.checks.rules.layout import (
    blamed,
    context_fits,
    layers_fit,
    sequence_parallel_problems,
    tensor_sizes,
)
from launcher.checks.rules.model import has_gpus
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import MOST_NODES, is_encoder_decoder, node_counts, read_parallel_config
from launcher.estimates.training import uncounted
from launcher.estimates.values import Values, count, divisors, listed
from launcher.plan import Plan

_LAYOUTS_SHOWN = 6
_NEAREST_SHOWN = 4


def add_remedies(findings: Iterable[Finding], plan: Plan, facts: Facts) -> list[Finding]:
    """Return the findings, those about layouts with what would be valid instead."""
    return [_remedied(finding, plan, facts) for finding in findings]


def _remedied(finding: Finding, plan: Plan, facts: Facts) -> Finding:
    if finding.fix is not None or finding.severity is Severity.SKIPPED:
        return finding
    if finding.id == "memory.fits":
        return replace(finding, fix=would_fit(plan, facts))
    values = Values(plan.job.config or {})
    parallel = read_parallel_config(values)
    if finding.id not in _WAYS or parallel is None:
        return finding
    return replace(finding, fix=_remedies(finding.id, values, parallel, plan, facts))


def _remedies(check: str, values: Values, shape: ParallelConfig, plan: Plan, facts: Facts) -> str:
    """Return lines that name what would be valid on the plan's node count."""
    nodes = plan.job.resources.nodes
    lines = [way(values, shape, nodes) for way in _WAYS[check]]
    if check == "layout.world":
        # What has room first: of what divides, much has not.
        best = [would_fit(plan, facts), _layouts(values, shape, LayoutSearch(plan, facts))]
        lines = [*best, "by arithmetic alone, whether or not the memory is enough:", *lines]
    return "\n".join(line for line in lines if line is not None)


def _sizes(values: Values, shape: ParallelConfig, nodes: int) -> str | None:
    """Suggest other values of the size that does not divide the world, the others unchanged."""
    key, _ = blamed(shape, nodes)
    if key == keys.TENSOR:
        found = [size for size in tensor_sizes(values) if fits(_with_tensor(shape, size), nodes)]
        return f"valid tensor sizes: {listed(found)}" if found else None
    if key == keys.PIPELINE:
        found = [
            size for size in divisors(nodes * shape.devices) if _pipeline_fits(values, shape, size, nodes)
        ]
        return f"pipeline sizes that would do with tensor {shape.tensor}: {listed(found)}" if found else None
    return _contexts(values, shape, nodes)


def _with_tensor(shape: ParallelConfig, tensor: int) -> ParallelConfig:
    expert_tensor = tensor if shape.expert_tensor == shape.tensor else shape.expert_tensor
    return shape._replace(tensor=tensor, expert_tensor=expert_tensor)


def _contexts(values: Values, shape: ParallelConfig, nodes: int) -> str:
    """Suggest context sizes that divide the sequence, the world and the batch.

    Another sequence length would do too, and then the data's and the positions would have to change.
    """
    found = [
        size
        for size in divisors(nodes * shape.devices)
        if fits(shape._replace(context=size), nodes) and _sequence_fits(values, size)
    ]
    if not found:
        return f"no context size would do on {count(nodes, 'node')} with these batch sizes"
    return f"context sizes that would do: {listed(found)}"


def _sequence_fits(values: Values, context: int) -> bool:
    model = {**(values.node("model") or {}), keys.CONTEXT.removeprefix("model."): context}
    tried = Values({**values.config, "model": model})
    # NeMo's answer: without tensor parallel there is a warning alone, whatever the context size.
    cut = next(iter(sequence_parallel_problems(tried, "nemo")), None)
    return context_fits(tried, context) and (cut is None or cut.severity is not Severity.ERROR)


def _node_counts(values: Values, shape: ParallelConfig, nodes: int) -> str:
    counts = node_counts(shape)
    return f"node counts that would do: {listed(counts) if counts else f'none up to {MOST_NODES}'}"


def _layouts(values: Values, shape: ParallelConfig, search: LayoutSearch) -> str:
    """Suggest tensor × pipeline sizes, all else unchanged: those that fit into memory, else the world."""
    nodes = count(search.nodes, "node")
    found = sorted(_fitting(values, shape, search.nodes), key=lambda sizes: (-sizes[0] * sizes[1], -sizes[0]))
    if not found:
        return f"no tensor × pipeline would do on {nodes} with these batch sizes"
    room = {sizes: search.has_room(_sizes_changed(values, *sizes)) for sizes in found}
    good = [sizes for sizes in found if room[sizes]]
    gpu = search.counted.gpu.name
    if good:
        how = ""
    elif None in room.values():
        how = " by arithmetic; how much memory they take cannot be told"
    else:
        how = f" by arithmetic; none of them fits into the memory of {gpu} with all else as it is"
    shown = good or found
    text = ", ".join(f"{tensor} × {pipeline}" for tensor, pipeline in shown[:_LAYOUTS_SHOWN])
    more = ", ..." if len(shown) > _LAYOUTS_SHOWN else ""
    return f"tensor × pipeline that would do on {nodes}: {text}{more}{how}"


def _sizes_changed(values: Values, tensor: int, pipeline: int) -> dict[str, Any]:
    changes = {keys.TENSOR: tensor, keys.PIPELINE: pipeline}
    return {**changes, keys.SPLIT_RANK: pipeline // 2} if is_encoder_decoder(values) else changes


def _fitting(values: Values, shape: ParallelConfig, nodes: int) -> Iterator[tuple[int, int]]:
    """Yield tensor sizes within a node, and pipeline sizes, that divide model, world and batch."""
    least = 2 if values.flag("model.sequence_parallel") else 1
    for tensor in tensor_sizes(values):
        if shape.devices % tensor or tensor < least:
            continue
        for pipeline in divisors(nodes * shape.devices // tensor):
            if _pipeline_fits(values, _with_tensor(shape, tensor), pipeline, nodes):
                yield tensor, pipeline


def _pipeline_fits(values: Values, shape: ParallelConfig, pipeline: int, nodes: int) -> bool:
    if shape.virtual is not None and pipeline == 1:
        return False
    group = pipeline if shape.group == shape.pipeline else shape.group
    tried = shape._replace(pipeline=pipeline, group=group)
    return fits(tried, nodes) and layers_fit(_with_pipeline(values, pipeline))


def _with_pipeline(values: Values, pipeline: int) -> Values:
    model = {**(values.node("model") or {}), keys.PIPELINE.removeprefix("model."): pipeline}
    if is_encoder_decoder(values):
        model[keys.SPLIT_RANK.removeprefix("model.")] = pipeline // 2
    config: Mapping[str, Any] = {**values.config, "model": model}
    return Values(config)


def _micro_batches(values: Values, shape: ParallelConfig, nodes: int) -> str | None:
    sizes = [size for size in divisors(shape.batch) if fits(shape._replace(micro=size), nodes)]
    return f"valid micro batch sizes: {listed(sizes)}" if sizes else None


def _global_batches(values: Values, shape: ParallelConfig, nodes: int) -> str | None:
    """Suggest the nearest multiples of what all copies of the model take at a time."""
    step = shape.micro * shape.data(nodes)
    if step == 0:
        return None
    if shape.virtual is not None:
        step *= shape.group
    below = shape.batch // step * step
    near = [size for size in range(below - step, below + 3 * step, step) if size > 0]
    return f"global batches near it: {listed(near[:_NEAREST_SHOWN])}, ... (multiples of {step})"


Way = Callable[[Values, ParallelConfig, int], str | None]

_WAYS: Mapping[str, tuple[Way, ...]] = {
    "layout.world": (_sizes, _node_counts),  # and layouts
    "layout.context": (_contexts,),
    "layout.experts": (_node_counts,),
    "batch.global": (_global_batches, _micro_batches, _node_counts),
    "batch.interleaved": (_global_batches, _micro_batches, _node_counts),
}


def would_fit(plan: Plan, facts: Facts) -> str:
    """Return lines that name the nearest and the fastest layout that fit, or explain why none does.

    Layouts whose memory is not counted are not named.
    """
    config = plan.job.config or {}
    why = uncounted(Values(config)) if has_gpus(plan) else None
    if why is not None:
        return f"no layout is suggested: {why}"
    search = LayoutSearch(plan, facts)
    nearest = search.nearest()
    if nearest is None:
        halved = next(best_with_half_gradients(plan, facts), None)
        if halved is not None:
            return f"would fit, with gradients in bf16: {_pasted(config, halved)}"
        return why_none(search, on_least_nodes(plan, facts), config)
    lines = [f"would fit: {_pasted(config, nearest)}"]
    fastest = next(search.best(), None)
    if fastest and fastest.seconds and nearest.seconds:
        saved = 1 - fastest.seconds / nearest.seconds
        if saved > 2 * EQUAL_STEPS:
            lines.append(f"would fit, with {saved:.0%} less time for a step: {_pasted(config, fastest)}")
    halved = own_with_half_gradients(search)
    if halved is not None:
        lines.append(f"this layout would fit, with gradients in bf16: {_pasted(config, halved)}")
    return "\n".join(lines)


def why_none(search: LayoutSearch, more: Suggestion | None, config: Mapping[str, Any]) -> str:
    """Return lines that explain why nothing fits: the smallest layout, and the nodes on which one fits."""
    resources, smallest = search.plan.job.resources, search.smallest
    if resources.is_elastic:
        counts = resources.node_counts
        return f"no layout fits every number of nodes from {counts[0]} to {counts[-1]}"
    message = f"no layout fits on {count(search.nodes, 'node')}"
    if smallest is None:
        message += " with these batch sizes"
    elif search.fits(smallest):
        message += ", for other reasons than memory: slipway check names them"
    elif smallest.fullest is not None:
        layout, memory = smallest.layout, search.counted.gpu.memory
        message += (
            f": the smallest, tensor {layout.tensor} × pipeline {layout.pipeline} × context {layout.context},"
            f" takes {gib(smallest.fullest.total)} of {gib(memory)} GiB on stage {smallest.fullest.stage}"
        )
    if more is None:
        return f"{message}\nnor on another number of nodes up to {keys.MOST_NODES}, as far as was searched"
    return f"{message}\nwould fit on {count(more.nodes, 'node')}: {_pasted(config, more)}"


def _pasted(config: Mapping[str, Any], suggestion: Suggestion) -> str:
    return " ".join(overrides(config, suggestion)) or "the layout as it is"
