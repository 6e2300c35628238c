"""The sizes that a layout is made of, read from a job's configuration.

The words are Megatron's: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (arXiv 2104.04473), section 3: p pipeline, t tensor, d data parallel size, v model
chunks per pipeline stage, B global batch, b micro batch, m = B / (d b) micro batches.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from launcher.estimates.values import Values, is_whole

# The most nodes that are looked at when others are suggested.
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

    `node` is where its keys are, `stages` how many of the pipeline's stages it has, ``None`` if that cannot
    be told. `ffn`, `groups` and `kv_channels` are ``None`` where they follow from the others.
    """

    node: str
    stages: int | None
    layers: int | None
    hidden: int | None
    heads: int | None
    groups: int | None
    ffn: int | None
    kv_channels: int | None


class ParallelConfig(NamedTuple):
    """How processes share a model and a batch, whatever the number of nodes."""

    devices: int
    tensor: int
    pipeline: int
    virtual: int | None
    context: int
    expert: int
    expert_tensor: int
    group: int
    micro: int
    batch: int

    @property
    def model(self) -> int:
        """The GPUs that one copy of the model takes."""
        return self.tensor * self.pipeline * self.context

    @property
    def experts(self) -> int:
        """The GPUs that one copy of the routed experts takes."""
        return self.expert_tensor * self.expert * self.pipeline

    def data(self, nodes: int) -> int:
        """The data parallel size, where the world can be divided."""
        return nodes * self.devices // self.model

    def micro_batches(self, nodes: int) -> int:
        """Micro batches that each copy of the model does in a step, where the batch can be divided."""
        return self.batch // (self.micro * self.data(nodes))


def read_parallel_config(values: Values) -> ParallelConfig | None:
    """The sizes of a layout; ``None`` where one of them is not a size."""
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
    """The stacks of the model: one, or an encoder and a decoder."""
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


def is_rampup(value: object) -> bool:
    """Return True for a first batch, an increment and the samples that it grows over."""
    if not isinstance(value, list) or len(value) != 3 or not all(is_whole(part) for part in value):
        return False
    return all(part >= 1 for part in value)


def fits(shape: ParallelConfig, nodes: int) -> bool:
    """Return True if a number of nodes can hold a layout: every rule that the node count has a part in."""
    rules = (divides_world, experts_divide_world, divides_batch, interleaves)
    return all(rule(shape, nodes) for rule in rules)


def node_counts(shape: ParallelConfig) -> list[int]:
    """Return the numbers of nodes, up to `MOST_NODES`, that a layout fits on."""
    step = shape.model // math.gcd(shape.model, shape.devices)  # others leave a part of a model over
    return [nodes for nodes in range(step, MOST_NODES + 1, step) if fits(shape, nodes)]


def divides_world(shape: ParallelConfig, nodes: int) -> bool:
    """Return True if tensor × pipeline × context divides the world (megatron/core/parallel_state.py)."""
    return nodes * shape.devices % shape.model == 0


def experts_divide_world(shape: ParallelConfig, nodes: int) -> bool:
    """Return True if expert tensor × expert × pipeline divides it too (megatron/core/parallel_state.py)."""
    is_whole_model = shape.expert == 1 and shape.expert_tensor == shape.tensor
    return is_whole_model or nodes * shape.devices % shape.experts == 0


def divides_batch(shape: ParallelConfig, nodes: int) -> bool:
    """Return True if micro batch × data parallel divides the global batch.

    megatron/core/num_microbatches_calculator.py.
    """
    return shape.batch % (shape.micro * shape.data(nodes)) == 0


def interleaves(shape: ParallelConfig, nodes: int) -> bool:
    """Return True if the interleaved schedule can take the micro batches.

    megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving: they come in
    groups of the pipeline size unless told otherwise: one at least, and no rest smaller than the pipeline.
    """
    if shape.virtual is None or shape.pipeline == 1:
        return True
    micro_batches = shape.micro_batches(nodes)
    rest = micro_batches % shape.group
    return shape.pipeline <= shape.group <= micro_batches and not 0 < rest < shape.pipeline
