"""Whether a number of nodes can hold a layout: every rule that the node count has a part in.

Functions of a shape and a node count, so that they can be asked at every count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from arithmetic.layout import ParallelConfig, divides_batch, divides_world, experts_divide_world, interleaves
from launcher.checks.findings import Finding, error
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import read_parallel_config
from launcher.estimates.values import Values, count

Rule = Callable[[ParallelConfig, int], Finding | None]


def layout_problems(config: Mapping[str, Any], nodes: int) -> list[Finding]:
    """What keeps a job's configuration from running on a number of nodes, as far as arithmetic tells."""
    shape = read_parallel_config(Values(config))
    return [] if shape is None else list(problems_at(shape, nodes))


def problems_at(shape: ParallelConfig, nodes: int) -> Iterator[Finding]:
    """The same of a shape; the first rule that is broken keeps the later ones from being asked."""
    for rule in RULES:
        found = rule(shape, nodes)
        if found is not None:
            yield found
            return


def world_problem(shape: ParallelConfig, nodes: int) -> Finding | None:
    if divides_world(shape, nodes):
        return None
    return error(
        "layout.world",
        *blamed(shape, nodes),
        f"{product(shape)} does not divide {gpus(shape, nodes)}",
        also=(keys.NODES,),
    )


def experts_problem(shape: ParallelConfig, nodes: int) -> Finding | None:
    if experts_divide_world(shape, nodes):
        return None
    size = shape.experts
    return error(
        "layout.experts",
        keys.EXPERT,
        shape.expert,
        f"expert tensor {shape.expert_tensor} × expert {shape.expert} × pipeline {shape.pipeline} = {size}"
        f" does not divide {gpus(shape, nodes)}",
        also=(keys.NODES,),
    )


def batch_problem(shape: ParallelConfig, nodes: int) -> Finding | None:
    if divides_batch(shape, nodes):
        return None
    data = shape.data(nodes)
    step = shape.micro * data
    return error(
        "batch.global",
        keys.GLOBAL,
        shape.batch,
        f"not a multiple of micro batch {shape.micro} × data parallel {data}"
        f" = {step}; data parallel {data} is {gpus(shape, nodes)} / ({product(shape)})",
        also=(keys.MICRO, keys.NODES),
    )


def interleaving_problem(shape: ParallelConfig, nodes: int) -> Finding | None:
    if interleaves(shape, nodes):
        return None
    micro_batches = shape.micro_batches(nodes)
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


def product(shape: ParallelConfig) -> str:
    """The GPUs of one copy of the model, with what they are made of."""
    parts = f"tensor {shape.tensor} × pipeline {shape.pipeline} × context {shape.context}"
    return f"{parts} = {shape.model}"


def gpus(shape: ParallelConfig, nodes: int) -> str:
    """The world, with what it is made of."""
    return f"{count(nodes, 'node')} × {count(shape.devices, 'GPU')} = {nodes * shape.devices}"


def blamed(shape: ParallelConfig, nodes: int) -> tuple[str, int]:
    """The first of the sizes that does not divide what the ones before leave, with its key."""
    world = nodes * shape.devices
    for key, size in ((keys.TENSOR, shape.tensor), (keys.PIPELINE, shape.pipeline)):
        if world % size:
            return key, size
        world //= size
    return keys.CONTEXT, shape.context
