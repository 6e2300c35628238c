"""Floating-point operations of a training step, and the share of a GPU's peak that they come to.

Counted are *model* FLOPs, as by Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", arXiv:2104.04473, appendix) and Korthikanti et al. 2022 ("Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198, equation 7): the matrix multiplications alone,
two operations for each multiply-add, and the backward pass as twice the forward pass. As in both papers,

- attention is counted in full, though causal attention needs but half of its scores (Megatron-LM 0.16 counts
  that half alone, which `causal` asks for);
- the logits are those of the padded vocabulary, which are computed;
- what recomputing activations does once more is not counted.

For a GPT of l layers, hidden size h, ffn 4h, sequence s and vocabulary V, that is
72 B s l h² (1 + s/6h + V/12lh) for a batch of B sequences.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainer.config.architecture import Architecture

GATED = ("geglu", "reglu", "swiglu")

# What Slurm, NVML and torch write in front of a GPU's name.
_MAKERS = re.compile(r"^(?:(?:nvidia|tesla) )+")


def layer_flops(shape: Architecture, length: int, context: int | None = None, causal: bool = False) -> int:
    """Return the forward FLOPs of one layer for one sequence.

    Parameters
    ----------
    shape
        Sizes of the layer. Grouped queries make keys and values smaller; a gated MLP has three matrices.
    length
        Tokens of the sequence.
    context
        Tokens of the encoder's output, for a layer with cross attention.
    causal
        Whether the scores of later tokens are left out.
    """
    flops = _attention(shape, length, length)
    if causal:
        flops -= _scores(shape, length, length) // 2
    if context is not None:
        flops += _attention(shape, length, context)
    matrices = 3 if shape.activation in GATED else 2
    return flops + 2 * length * shape.hidden_size * shape.ffn_hidden_size * matrices


def model_flops(
    shape: Architecture, vocabulary: int, encoder: Architecture | None = None, causal: bool = False
) -> int:
    """Return the model FLOPs of one sample, forward and backward.

    Parameters
    ----------
    shape
        The GPT, or the decoder of a T5.
    vocabulary
        Size of the padded vocabulary.
    encoder
        The encoder of a T5; a sample is then a pair of one input and one target sequence.
    causal
        Whether the GPT's, or the decoder's, attention to itself counts the half that it needs.
    """
    length = shape.seq_length
    forward = 2 * length * shape.hidden_size * vocabulary
    forward += shape.num_layers * layer_flops(shape, length, encoder.seq_length if encoder else None, causal)
    if encoder:
        forward += encoder.num_layers * layer_flops(encoder, encoder.seq_length)
    return 3 * forward


def peak_flops(device: str, precision: Literal["bf16", "fp32"]) -> float | None:
    """Return the dense peak of a GPU in FLOP/s; None if ``gpus.json`` does not have it.

    Parameters
    ----------
    device
        Its name, as ``torch.cuda.get_device_name`` tells it.
    precision
        What the matrices are multiplied in. That of fp32 is the CUDA cores' rate, because torch multiplies
        fp32 matrices in fp32 and not in TF32 unless it is told to.
    """
    name = _MAKERS.sub("", " ".join(re.findall(r"[a-z0-9]+", device.lower())))
    peaks = {row["peak_tflops"].get(precision) for row in _gpus() if re.fullmatch(row["names"], name)}
    # A name may leave the memory open, which is all the same here.
    peak = peaks.pop() if len(peaks) == 1 else None
    return peak * 1e12 if peak is not None else None


def unknown_peak(device: str, precision: Literal["bf16", "fp32"]) -> str | None:
    """Return the note that a GPU's MFU cannot be told; None if it can."""
    if peak_flops(device, precision) is not None:
        return None
    return f"note: {device}: its peak in {precision} is not known (trainer/gpus.json), so no MFU is told"


@cache
def _gpus() -> list[dict[str, Any]]:
    """Read the table; what a site says of its own GPUs (`cluster.gpu_types`) comes with the job."""
    table = Path(__file__).resolve().parents[1] / "gpus.json"
    rows = json.loads(table.read_text(encoding="utf-8"))["gpus"]
    site = json.loads(os.environ.get("SLIPWAY_GPUS", "[]"))
    own = {row["name"] for row in site}
    return [*site, *(row for row in rows if row["name"] not in own)]


def _attention(shape: Architecture, queries: int, keys: int) -> int:
    query_size = shape.num_attention_heads * shape.kv_channels
    key_size = shape.num_query_groups * shape.kv_channels
    projections = 2 * queries * shape.hidden_size * query_size * 2  # of the queries, and of the output
    projections += 2 * keys * shape.hidden_size * key_size * 2  # of the keys, and of the values
    return projections + _scores(shape, queries, keys)


def _scores(shape: Architecture, queries: int, keys: int) -> int:
    """Count the scores, and the values that they weigh."""
    return 2 * queries * keys * shape.num_attention_heads * shape.kv_channels * 2
