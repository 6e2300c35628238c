"""What an estimate of memory reads of a job's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.estimates.countable import is_countable, model_type_of, precision_of
from launcher.estimates.parallelism import (
    ParallelConfig,
    Stack,
    fits,
    is_encoder_decoder,
    read_parallel_config,
    stacks_of,
)
from launcher.estimates.values import Values, full
from launcher.parameters import Parts, parts_of, vocabulary_size

# Features that put weights or activations elsewhere than is counted here, as people call them.
_NOT_COUNTED = {
    "model.mtp_num_layers": "multi-token prediction is not counted yet",
    "model.moe_latent_size": "experts in a latent space are not counted yet",
    "model.pipeline_model_parallel_layout": "layers that are listed by stage are not counted yet",
    "model.fsdp": "FSDP is not counted yet",
    "model.cpu_offloading": "what is offloaded to the host is not counted yet",
}


@dataclass(frozen=True, slots=True)
class Training:
    """A training that can be counted with: its values, its layout, and what its model is made of.

    `stacks` are those of the layout, in the order of `parts.stacks`; `lengths` the tokens of each
    of their sequences.
    """

    values: Values
    engine: str
    shape: ParallelConfig
    data: int
    micro_batches: int
    vocabulary: int
    parts: Parts
    stacks: tuple[Stack, ...]
    lengths: tuple[int, ...]

    @property
    def is_encoder_decoder(self) -> bool:
        return len(self.stacks) > 1

    @property
    def sequence_parallel(self) -> bool:
        return self.shape.tensor > 1 and self.values.flag("model.sequence_parallel")

    @property
    def expert_data(self) -> int:
        """The copies of each routed expert (megatron/core/parallel_state.py: expert data parallel)."""
        return max(self.data * self.shape.model // self.shape.experts, 1)

    @property
    def precision(self) -> str:
        """``bf16``, ``16`` or ``32``."""
        return precision_of(self.values)

    @property
    def has_fp8(self) -> bool:
        """Whether the matrices of the layers are multiplied in FP8, by Transformer Engine."""
        has_engine = self.engine != "megatron" and self.values.flag("model.transformer_engine")
        return has_engine and self.values.flag("model.fp8") and self.precision != "32"

    @property
    def has_half_weights(self) -> bool:
        """Whether weights are in 16 bits; NeMo casts 32-bit ones on the way without `megatron_amp_O2`."""
        if self.precision == "32":
            return False
        return self.engine != "nemo" or self.values.flag("model.megatron_amp_O2")


def training_of(config: Mapping[str, Any], nodes: int, engine: str) -> Training | None:
    """Read a job's configuration; ``None`` where it cannot be counted with."""
    values = Values(config)
    shape, model = read_parallel_config(values), values.node("model")
    if shape is None or model is None or not is_countable(values) or not fits(shape, nodes):
        return None
    if values.raw("trainer.accelerator") == "cpu" or any(values.raw(key) for key in _NOT_COUNTED):
        return None
    stacks, lengths = tuple(stacks_of(values)), _lengths(values)
    if lengths is None or not all(stack.stages for stack in stacks):
        return None
    vocabulary = vocabulary_size(model)
    if vocabulary is None:
        return None
    parts = parts_of(model, vocabulary, model_type_of(values))
    return Training(
        values,
        engine,
        shape,
        shape.data(nodes),
        shape.micro_batches(nodes),
        vocabulary,
        parts,
        stacks,
        lengths,
    )


def uncounted(values: Values) -> str | None:
    """Why a training of a good configuration cannot be counted with, if it cannot."""
    for key, why in _NOT_COUNTED.items():
        if values.raw(key):
            return f"{full(key)}={values.raw(key)}: {why}"
    model = values.node("model")
    if model is not None and is_countable(values) and vocabulary_size(model) is None:
        key = "model.override_vocab_size"
        return f"the size of the tokenizer's vocabulary is not known here; {full(key)}=... says it"
    return None


def _lengths(values: Values) -> tuple[int, ...] | None:
    if not is_encoder_decoder(values):
        length = values.whole("model.encoder_seq_length")
        return None if length is None else (length,)
    encoder = values.whole("model.seq_length")
    decoder = values.whole("model.data.seq_length_dec", encoder)
    return None if encoder is None or decoder is None else (encoder, decoder)
