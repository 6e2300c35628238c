"""Floating-point operations of a training step, and the share of a GPU's peak that they come to.

Counted are *model* FLOPs, as by Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", arXiv:2104.04473, appendix) and Korthikanti et al. 2022 ("Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198, equation 7): the matrix multiplications alone,
two operations for each multiply-add, and the backward pass as twice the forward pass. As in both papers,

- attention is counted in full, though causal attention needs but half of its scores;
- the logits are those of the padded vocabulary, which are computed;
- what recomputing activations does once more is not counted.

For a GPT of l layers, hidden size h, ffn 4h, sequence s and vocabulary V, that is
72 B s l h² (1 + s/6h + V/12lh) for a batch of B sequences.
"""

from __future__ import annotations

import re
from typing import Literal

from trainer.config.architecture import Architecture

GATED = ("geglu", "reglu", "swiglu")

# Dense peak rates in TFLOP/s, without sparsity, from NVIDIA's data sheets; fp32 is the CUDA cores' rate,
# because torch multiplies fp32 matrices in fp32 and not in TF32 unless it is told to. Names as torch tells
# them; the first pattern that fits counts.
_PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bGB200\b", {"bf16": 2500.0, "fp32": 80.0}),  # GB200 NVL72 data sheet: 5,000 sparse
    (r"\bB200\b", {"bf16": 2250.0, "fp32": 75.0}),  # HGX B200 data sheet: 4,500 sparse
    (r"\bH[12]00 NVL\b", {"bf16": 835.5, "fp32": 60.0}),  # H100 and H200 NVL data sheets: 1,671 sparse
    (r"\bH100 PCIe\b", {"bf16": 756.0, "fp32": 51.0}),  # H100 data sheet: 1,513 sparse
    (
        r"\b(GH200|H200|H100)\b",
        {"bf16": 989.4, "fp32": 66.9},
    ),  # H100, H200 and GH200 data sheets: 1,979 sparse
    (r"\bA100\b", {"bf16": 312.0, "fp32": 19.5}),  # A100 data sheet
    (r"\bA30\b", {"bf16": 165.0, "fp32": 10.3}),  # A30 data sheet
    (r"\bA40\b", {"bf16": 149.7, "fp32": 37.4}),  # A40 data sheet
    (r"\bL40S\b", {"bf16": 362.05, "fp32": 91.6}),  # L40S data sheet: 733 sparse
)


def layer_flops(shape: Architecture, length: int, context: int | None = None) -> int:
    """Return the forward FLOPs of one layer for one sequence.

    Parameters
    ----------
    shape
        Sizes of the layer. Grouped queries make keys and values smaller; a gated MLP has three matrices.
    length
        Tokens of the sequence.
    context
        Tokens of the encoder's output, for a layer with cross attention.
    """
    flops = _attention(shape, length, length)
    if context is not None:
        flops += _attention(shape, length, context)
    matrices = 3 if shape.activation in GATED else 2
    return flops + 2 * length * shape.hidden_size * shape.ffn_hidden_size * matrices


def model_flops(shape: Architecture, vocabulary: int, encoder: Architecture | None = None) -> int:
    """Return the model FLOPs of one sample, forward and backward.

    Parameters
    ----------
    shape
        The GPT, or the decoder of a T5.
    vocabulary
        Size of the padded vocabulary.
    encoder
        The encoder of a T5; a sample is then a pair of one input and one target sequence.
    """
    length = shape.seq_length
    forward = 2 * length * shape.hidden_size * vocabulary
    forward += shape.num_layers * layer_flops(shape, length, encoder.seq_length if encoder else None)
    if encoder:
        forward += encoder.num_layers * layer_flops(encoder, encoder.seq_length)
    return 3 * forward


def peak_flops(device: str, precision: Literal["bf16", "fp32"]) -> float | None:
    """Return the dense peak of a GPU in FLOP/s; None if it is not in the table.

    Parameters
    ----------
    device
        Its name, as ``torch.cuda.get_device_name`` tells it.
    precision
        What the matrices are multiplied in.
    """
    for pattern, rates in _PEAK_TFLOPS:
        if re.search(pattern, device.replace("-", " ")):
            return rates[precision] * 1e12
    return None


def _attention(shape: Architecture, queries: int, keys: int) -> int:
    query_size = shape.num_attention_heads * shape.kv_channels
    key_size = shape.num_query_groups * shape.kv_channels
    projections = 2 * queries * shape.hidden_size * query_size * 2  # of the queries, and of the output
    projections += 2 * keys * shape.hidden_size * key_size * 2  # of the keys, and of the values
    return projections + 2 * queries * keys * query_size * 2  # the scores, and the values that they weigh
