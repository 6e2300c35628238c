"""The parallel sizes of a job's configuration, and the stacks of layers that they divide."""

from __future__ import annotations

import math
from typing import NamedTuple

from arithmetic.layout import ParallelConfig, fits
from launcher.estimates.values import Values

# The most nodes that suggestions are for.
MOST_NODES = 1024

TENSOR = "model.tensor_model_parallel_size"
PIPELINE = "model.pipeline_model_parallel_size"
VIRTUAL = "model.virtual_pipeline_model_parallel_size"
CONTEXT = "model.context_parallel_size"
EXPERT = "model.expert_model_parallel_size"
EXPERT_TENSOR = "model.expert_tensor_parallel_size"
SPLIT_RANK = "model.pipeline_model_parallel_split_rank"
GROUP = "model.microbatch_group_size_per_vp_stage"
MICRO = "model.micro_batch_size"
GLOBAL = "model.global_batch_size"
RAMPUP = "model.rampup_batch_size"
NODES = "trainer.num_nodes"
DEVICES = "trainer.devices"


class Stack(NamedTuple):
    """A stack of transformer layers: that of a GPT or BERT, or one of the two of a T5.

    `node` is the node of its keys; `stages` counts its pipeline stages, None if unknown. `ffn`, `groups` and
    `kv_channels` are None where they follow from the others.
    """

    node: str
    stages: int | None
    layers: int | None
    hidden: int | None
    heads: int | None
    groups: int | None
    ffn: int | None
    kv_channels: int | None


def read_parallel_config(values: Values) -> ParallelConfig | None:
    """Return the sizes of a layout; None where one of them is not a size."""
    tensor, pipeline = values.whole(TENSOR, 1), values.whole(PIPELINE, 1)
    context, expert = values.whole(CONTEXT, 1), values.whole(EXPERT, 1)
    micro, batch, devices = values.whole(MICRO), values.whole(GLOBAL), values.whole(DEVICES)
    if None in (tensor, pipeline, context, expert, micro, batch, devices):
        return None
    assert tensor and pipeline and context and expert and micro and batch and devices
    virtual = values.whole(VIRTUAL)
    return ParallelConfig(
        devices=devices,
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual if virtual != 1 else None,  # NeMo reads 1 as none
        context=context,
        expert=expert,
        expert_tensor=values.whole(EXPERT_TENSOR, tensor) or tensor,
        group=values.whole(GROUP, pipeline) or pipeline,
        micro=micro,
        batch=batch,
    )


def stacks_of(values: Values) -> list[Stack]:
    """Return the stacks of the model: one, or an encoder and a decoder."""
    pipeline = values.whole(PIPELINE, 1)
    if not is_encoder_decoder(values):
        return [_stack(values, "model", pipeline)] if values.node("model") is not None else []
    first = pipeline
    second = pipeline
    if pipeline is not None and pipeline > 1:
        # NeMo: the encoder has the stages before the split rank, the decoder those from it on.
        first = values.whole(SPLIT_RANK)
        second = pipeline - first if first is not None and first < pipeline else None
    return [_stack(values, "model.encoder", first), _stack(values, "model.decoder", second)]


def is_encoder_decoder(values: Values) -> bool:
    """Return True for a T5."""
    return values.node("model.encoder") is not None and values.node("model.decoder") is not None


def _stack(values: Values, node: str, stages: int | None) -> Stack:
    return Stack(
        node=node,
        stages=stages,
        layers=values.whole(f"{node}.num_layers"),
        hidden=values.whole(f"{node}.hidden_size"),
        heads=values.whole(f"{node}.num_attention_heads"),
        groups=values.whole(f"{node}.num_query_groups"),
        ffn=values.whole(f"{node}.ffn_hidden_size"),
        kv_channels=values.whole(f"{node}.kv_channels"),
    )


def node_counts(parallel: ParallelConfig) -> list[int]:
    """Return the numbers of nodes, up to `MOST_NODES`, that a layout fits on."""
    step = parallel.model // math.gcd(parallel.model, parallel.devices)  # others leave a part of a model over
    return [nodes for nodes in range(step, MOST_NODES + 1, step) if fits(parallel, nodes)]
