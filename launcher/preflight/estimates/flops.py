"""The floating-point operations of a training, counted from its configuration.

Counted are *model* FLOPs, as by our trainer (trainer/report/flops.py), Narayanan et al. 2021 (arXiv
2104.04473, appendix) and Korthikanti et al. 2022 (arXiv 2205.05198, appendix A): the matrix multiplications
alone, two operations for each multiply-add, and the backward pass as twice the forward pass. As in these,

- attention is counted in full, though causal attention needs but half of its scores;
- the logits are those of the padded vocabulary, which are computed;
- what recomputing activations does once more is not counted.

For a GPT of l layers, hidden size h, ffn 4h, sequence s and vocabulary V, that is
72 B s l h² (1 + s/6h + V/12lh) for a batch of B sequences.

Grouped queries: Ainslie et al. 2023 (arXiv 2305.13245). Gated MLPs: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Node = Mapping[str, Any]


def sample_flops(model: Node, vocabulary: int, model_type: str = "gpt") -> int:
    """The model FLOPs of one sample, forward and backward.

    Parameters
    ----------
    model
        NeMo's `model` node, with every value resolved.
    vocabulary
        Rows of the embedding, as `launcher.parameters.vocabulary_size` counts them.
    model_type
        ``gpt``, ``t5`` or ``bert``. A sample of a T5 is a pair of one input and one target sequence.
    """
    if model_type == "t5":
        forward = _t5(model, vocabulary)
    else:
        length = sample_tokens(model, model_type)
        forward = model["num_layers"] * _layer(model, length) + _logits(model, length, vocabulary)
        if model_type == "bert":  # the language model's head has a dense layer of its own
            forward += 2 * length * model["hidden_size"] ** 2
    return int(3 * forward)


def sample_tokens(model: Node, model_type: str = "gpt") -> int:
    """The tokens that a sample counts as: its sequence; of a T5 the encoder's alone, as NeMo counts them."""
    return int(model["seq_length" if model_type == "t5" else "encoder_seq_length"])


def _t5(model: Node, vocabulary: int) -> int:
    encoder, decoder = ({**model, **(model.get(stack) or {})} for stack in ("encoder", "decoder"))
    length = sample_tokens(model, "t5")
    targets = (model.get("data") or {}).get("seq_length_dec") or length
    forward = encoder["num_layers"] * _layer(encoder, length)
    forward += decoder["num_layers"] * (_layer(decoder, targets) + _attention(decoder, targets, length))
    return int(forward + _logits(decoder, targets, vocabulary))


def _layer(model: Node, length: int) -> int:
    """The forward FLOPs of one layer for one sequence."""
    return _attention(model, length, length) + _mlp(model, length)


def _attention(model: Node, queries: int, keys: int) -> int:
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    channels = model.get("kv_channels") or hidden // heads
    width, shared = heads * channels, (model.get("num_query_groups") or heads) * channels
    projections = 2 * queries * hidden * width * 2  # of the queries, and of the output
    projections += 2 * keys * hidden * shared * 2  # of the keys, and of the values
    return int(projections + 2 * queries * keys * width * 2)  # the scores, and the values that they weigh


def _mlp(model: Node, length: int) -> int:
    hidden, inner = model["hidden_size"], model["ffn_hidden_size"]
    matrices = 3 if str(model.get("activation", "gelu")).endswith("glu") else 2
    return int(2 * length * hidden * inner * matrices)


def _logits(model: Node, length: int, vocabulary: int) -> int:
    return int(2 * length * model["hidden_size"] * vocabulary)
