"""What a layout comes to, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arithmetic.layout import ParallelConfig, fits
from launcher.estimates.parallelism import is_encoder_decoder, read_parallel_config
from launcher.estimates.values import Values, count


@dataclass(frozen=True, slots=True)
class Summary:
    """The sizes of a layout that fits its node count, and what a step takes in.

    `tokens` are those that the model reads in a step, global batch × sequence length (a T5's encoder alone);
    ``None`` where the length is not known.
    """

    nodes: int
    devices: int
    world: int
    tensor: int
    pipeline: int
    virtual: int | None
    context: int
    data: int
    micro_batch: int
    micro_batches: int
    global_batch: int
    tokens: int | None

    def __str__(self) -> str:
        virtual = f" (virtual {self.virtual})" if self.virtual else ""
        tokens = f", {self.tokens:,} tokens a step" if self.tokens else ""
        return (
            f"{count(self.nodes, 'node')} × {self.devices} = {count(self.world, 'task')}:"
            f" tensor {self.tensor} × pipeline {self.pipeline}{virtual} × context {self.context}"
            f" × data {self.data}; global batch {self.global_batch} = micro batch {self.micro_batch}"
            f" × data {self.data} × {self.micro_batches}{tokens}"
        )


def summarize(config: Mapping[str, Any], nodes: int) -> Summary | None:
    """Return the numbers of a job's layout; None if it does not fit its nodes, or has none."""
    values = Values(config)
    shape = read_parallel_config(values)
    if shape is None or not fits(shape, nodes):
        return None
    return _summary(values, shape, nodes)


def _summary(values: Values, shape: ParallelConfig, nodes: int) -> Summary:
    key = "model.seq_length" if is_encoder_decoder(values) else "model.encoder_seq_length"
    length = values.whole(key)
    return Summary(
        nodes=nodes,
        devices=shape.devices,
        world=nodes * shape.devices,
        tensor=shape.tensor,
        pipeline=shape.pipeline,
        virtual=shape.virtual,
        context=shape.context,
        data=shape.data(nodes),
        micro_batch=shape.micro,
        micro_batches=shape.micro_batches(nodes),
        global_batch=shape.batch,
        tokens=shape.batch * length if length is not None else None,
    )
