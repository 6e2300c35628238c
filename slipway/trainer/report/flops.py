"""Model FLOPs of a sample of this training, and the peak of the GPU that they are compared with."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

from slipway.arithmetic.flops import sample_flops
from slipway.arithmetic.gpus import peak_flops
from slipway.trainer.config.architecture import Architecture

_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "activation",
)


def model_flops(
    architecture: Architecture,
    vocabulary: int,
    encoder: Architecture | None = None,
    causal: bool = False,
    teacher: Architecture | None = None,
) -> int:
    """Return the model FLOPs of one sample, forward and backward.

    Parameters
    ----------
    architecture
        The GPT, or the decoder of a T5.
    vocabulary
        Size of the padded vocabulary.
    encoder
        The encoder of a T5; a sample is then a pair of one input and one target sequence.
    causal
        Count the half of the scores that the causal attention of a GPT, or of a decoder, needs.
    teacher
        The GPT whose forward pass the GPT learns from: a third of the FLOPs that training it would take.
    """
    if teacher is not None:
        own = model_flops(architecture, vocabulary, encoder, causal)
        return own + model_flops(teacher, vocabulary, causal=causal) // 3
    sizes = _sizes(architecture)
    if encoder is None:
        model = {**sizes, "encoder_seq_length": architecture.seq_length}
        return sample_flops(model, vocabulary, causal=causal)
    model = {
        "encoder": _sizes(encoder),
        "decoder": sizes,
        "seq_length": encoder.seq_length,
        "data": {"seq_length_dec": architecture.seq_length},
    }
    return sample_flops(model, vocabulary, "t5", causal=causal)


def device_peak(device: str, precision: Literal["bf16", "fp32", "fp8"]) -> float | None:
    """Return the dense peak of a GPU in FLOP/s; None if neither our table nor the site's has it.

    With FP8 it is that of FP8, though attention and the head stay in bf16.
    """
    # The job brings the site's description of its GPUs (`cluster.gpu_types`).
    return peak_flops(device, precision, json.loads(os.environ.get("SLIPWAY_GPUS", "[]")))


def note_unknown_peak(device: str, precision: Literal["bf16", "fp32", "fp8"]) -> str | None:
    """Return the note that a GPU's MFU is unknown; None if it is known."""
    if device_peak(device, precision) is not None:
        return None
    where = "slipway/arithmetic/gpus.json"
    return f"note: {device}: its peak in {precision} is not known ({where}), so no MFU is reported"


def _sizes(architecture: Architecture) -> dict[str, Any]:
    return {name: getattr(architecture, name) for name in _SIZES}
