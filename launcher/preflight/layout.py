"""Whether a number of nodes can hold a layout: every rule that the node count has a part in.

Functions of a shape and a node count, so that they can be asked at every count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.preflight import shape as keys
from launcher.preflight.findings import Finding, error
from launcher.preflight.shape import Shape, shape_of
from launcher.preflight.values import Values, count

Rule = Callable[[Shape, int], Finding | None]


def layout_problems(config: Mapping[str, Any], nodes: int) -> list[Finding]:
    """What keeps a job's configuration from running on a number of nodes, as far as arithmetic tells."""
    shape = shape_of(Values(config))
    return [] if shape is None else list(problems_at(shape, nodes))


def problems_at(shape: Shape, nodes: int) -> Iterator[Finding]:
    """The same of a shape; the first rule that is broken keeps the later ones from being asked."""
    for rule in RULES:
        found = rule(shape, nodes)
        if found is not None:
            yield found
            return


def fits(shape: Shape, nodes: int) -> bool:
    return next(problems_at(shape, nodes), None) is None


def node_counts(shape: Shape) -> list[int]:
    """The numbers of nodes, up to `MOST_NODES`, that a shape fits on."""
    step = shape.model // math.gcd(shape.model, shape.devices)  # others leave a part of a model over
    return [nodes for nodes in range(step, keys.MOST_NODES + 1, step) if fits(shape, nodes)]


def world_problem(shape: Shape, nodes: int) -> Finding | None:
    """Tensor × pipeline × context divides the world (megatron/core/parallel_state.py)."""
    world = nodes * shape.devices
    if world % shape.model == 0:
        return None
    return error(
        "layout.world",
        *blamed(shape, nodes),
        f"{product(shape)} does not divide {gpus(shape, nodes)}",
        also=(keys.NODES,),
    )


def experts_problem(shape: Shape, nodes: int) -> Finding | None:
    """Expert tensor × expert × pipeline divides the world too (megatron/core/parallel_state.py)."""
    size = shape.experts
    if (shape.expert == 1 and shape.expert_tensor == shape.tensor) or nodes * shape.devices % size == 0:
        return None
    return error(
        "layout.experts",
        keys.EXPERT,
        shape.expert,
        f"expert tensor {shape.expert_tensor} × expert {shape.expert} × pipeline {shape.pipeline} = {size}"
        f" does not divide {gpus(shape, nodes)}",
        also=(keys.NODES,),
    )


def batch_problem(shape: Shape, nodes: int) -> Finding | None:
    """Micro batch × data parallel divides the global batch (megatron/core/num_microbatches_calculator.py)."""
    data = shape.data(nodes)
    step = shape.micro * data
    if shape.batch % step == 0:
        return None
    return error(
        "batch.global",
        keys.GLOBAL,
        shape.batch,
        f"not a multiple of micro batch {shape.micro} × data parallel {data}"
        f" = {step}; data parallel {data} is {gpus(shape, nodes)} / ({product(shape)})",
        also=(keys.MICRO, keys.NODES),
    )


def interleaving_problem(shape: Shape, nodes: int) -> Finding | None:
    """What the interleaved schedule wants of the micro batches.

    megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving: they come in
    groups of the pipeline size unless told otherwise: one at least, and no rest smaller than the pipeline.
    """
    if shape.virtual is None or shape.pipeline == 1:
        return None
    micro_batches = shape.micro_batches(nodes)
    rest = micro_batches % shape.group
    if shape.pipeline <= shape.group <= micro_batches and not 0 < rest < shape.pipeline:
        return None
    return error(
        "batch.interleaved",
        keys.GLOBAL,
        shape.batch,
        f"/ (micro batch {shape.micro} × data parallel {shape.data(nodes)}) is"
        f" {micro_batches} micro batches, and virtual pipeline {shape.virtual} wants them in groups of"
        f" {shape.group}",
        also=(keys.VIRTUAL, keys.NODES),
    )


RULES: tuple[Rule, ...] = (world_problem, experts_problem, batch_problem, interleaving_problem)


def product(shape: Shape) -> str:
    """The GPUs of one copy of the model, with what they are made of."""
    parts = f"tensor {shape.tensor} × pipeline {shape.pipeline} × context {shape.context}"
    return f"{parts} = {shape.model}"


def gpus(shape: Shape, nodes: int) -> str:
    """The world, with what it is made of."""
    return f"{count(nodes, 'node')} × {count(shape.devices, 'GPU')} = {nodes * shape.devices}"


def blamed(shape: Shape, nodes: int) -> tuple[str, int]:
    """The first of the sizes that does not divide what the ones before leave, with its key."""
    world = nodes * shape.devices
    for key, size in ((keys.TENSOR, shape.tensor), (keys.PIPELINE, shape.pipeline)):
        if world % size:
            return key, size
        world //= size
    return keys.CONTEXT, shape.context
