"""Floating-point operations of a training, counted from the sizes of its model.

Counted are *model* FLOPs, as by Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", arXiv:2104.04473, appendix) and Korthikanti et al. 2022 ("Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198, appendix A): the matrix multiplications alone,
two operations for each multiply-add, and the backward pass as twice the forward pass. As in these,

- attention is counted in full, though causal attention needs but half of its scores (Megatron-LM 0.16 counts
  that half alone, which `causal` asks for);
- the logits are those of the padded vocabulary, which are computed;
- what recomputing activations does once more is not counted;
- of a mixture of experts the router, the shared expert, and as many experts as a token goes to are counted,
  as if no token were dropped.

A causal window of w tokens has s w - w² / 2 scores instead of s² / 2: counted in full, twice as many.

For a GPT of l layers, hidden size h, ffn 4h, sequence s and vocabulary V, that is
72 B s l h² (1 + s/6h + V/12lh) for a batch of B sequences.

Grouped queries: Ainslie et al. 2023 (arXiv:2305.13245). Gated MLPs: Shazeer 2020 (arXiv:2002.05202).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.arithmetic.parameters import expert_width, sparse_layers

Node = Mapping[str, Any]


def sample_flops(model: Node, vocabulary: int, model_type: str = "gpt", *, causal: bool = False) -> int:
    """Return the model FLOPs of one sample, forward and backward.

    Parameters
    ----------
    model
        NeMo's `model` node, with every value resolved.
    vocabulary
        Rows of the embedding, as `slipway.arithmetic.parameters.vocabulary_size` counts them.
    model_type
        ``gpt``, ``t5`` or ``bert``. A sample of a T5 is a pair of one input and one target sequence.
    causal
        Count the half of the scores that causal attention needs: those of a GPT, and of a T5's decoder.
    """
    if model_type == "t5":
        forward = _t5(model, vocabulary, causal)
    else:
        length = sample_tokens(model, model_type)
        forward = _layers(model, length, causal) + _logits(model, length, vocabulary)
        if model_type == "bert":  # the language model's head has its own dense layer
            forward += 2 * length * model["hidden_size"] ** 2
    return int(3 * forward)


def sample_tokens(model: Node, model_type: str = "gpt") -> int:
    """Return the tokens that a sample counts as: of a T5 the encoder's alone, as NeMo counts them."""
    return int(model["seq_length" if model_type == "t5" else "encoder_seq_length"])


def layer_flops(stack: Node, length: int, context: int | None = None, *, causal: bool = False) -> int:
    """Return the forward FLOPs of one layer for one sequence of `length` tokens.

    Parameters
    ----------
    stack
        NeMo's keys of the layer. Grouped queries make keys and values smaller; a gated MLP has three
        matrices.
    context
        Tokens of the encoder's output, for a layer with cross attention.
    causal
        Leave out the scores of later tokens.
    """
    flops = _attention(stack, length, length, causal=causal)
    if context is not None:
        flops += _attention(stack, length, context)
    return flops + _mlp(stack, length, stack["ffn_hidden_size"])


def _t5(model: Node, vocabulary: int, causal: bool) -> int:
    encoder, decoder = ({**model, **(model.get(stack) or {})} for stack in ("encoder", "decoder"))
    length = sample_tokens(model, "t5")
    targets = (model.get("data") or {}).get("seq_length_dec") or length
    forward = encoder["num_layers"] * layer_flops(encoder, length)
    forward += decoder["num_layers"] * layer_flops(decoder, targets, length, causal=causal)
    return int(forward + _logits(decoder, targets, vocabulary))


def _layers(model: Node, length: int, causal: bool) -> int:
    """Count the forward FLOPs of the layers of a GPT or BERT for one sequence."""
    layers = model["num_layers"]
    sparse, windowed = sparse_layers(model, 0, layers), windowed_layers(model)
    attention = windowed * _self_attention(model, length, attention_window(model) or length, causal)
    attention += (layers - windowed) * _self_attention(model, length, length, causal)
    experts = sparse * _experts(model, length) if sparse else 0
    return int(attention + experts + (layers - sparse) * _mlp(model, length, model["ffn_hidden_size"]))


def _self_attention(model: Node, length: int, window: int, causal: bool) -> int:
    pairs = 2 * length * window - window * window if window < length else length * length
    if model.get("multi_latent_attention"):
        return _latent_attention(model, length, pairs, causal)
    return _attention(model, length, length, pairs, causal=causal)


def attention_window(model: Node) -> int | None:
    """Return how many tokens a sliding window has, the token itself included; ``None`` without one.

    `window_size` is of the tokens before and behind, -1 for all (megatron/core/transformer/
    transformer_config.py).
    """
    size = model.get("window_size")
    before = size[0] if isinstance(size, (list, tuple)) and size else None
    return before + 1 if isinstance(before, int) and before >= 0 else None


def windowed_layers(model: Node) -> int:
    """Count the layers that attend to a sliding window.

    With `window_attn_skip_freq` N every N-th layer attends to all; a list has a flag for each layer.
    """
    layers, skip = int(model["num_layers"]), model.get("window_attn_skip_freq")
    if attention_window(model) is None:
        return 0
    if isinstance(skip, (list, tuple)):
        return sum(map(bool, skip))
    return layers - layers // skip if isinstance(skip, int) and skip > 0 else layers


def _latent_attention(model: Node, length: int, pairs: int, causal: bool) -> int:
    """Count multi-latent attention as a training computes it.

    DeepSeek-AI 2024, DeepSeek-V2 (arXiv:2405.04434), section 2.1.
    """
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    rank, query_rank = model["kv_lora_rank"], model.get("q_lora_rank")
    plain, rotated, value = model["qk_head_dim"], model["qk_pos_emb_head_dim"], model["v_head_dim"]
    query = heads * (plain + rotated)
    weights = query_rank * (hidden + query) if query_rank else hidden * query
    weights += hidden * (rank + rotated) + rank * heads * (plain + value) + heads * value * hidden
    scores = 2 * pairs * (query + heads * value)
    return int(2 * length * weights + (scores // 2 if causal else scores))


def _experts(model: Node, length: int) -> int:
    """Count the router, the shared expert, and as many routed ones as a token goes to."""
    inner = (model.get("moe_router_topk") or 2) * expert_width(model)
    shared = model.get("moe_shared_expert_intermediate_size") or 0
    router = 2 * length * model["hidden_size"] * model["num_moe_experts"]
    return int(router + _mlp(model, length, inner + shared))


def _attention(
    model: Node, queries: int, keys: int, pairs: int | None = None, *, causal: bool = False
) -> int:
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    channels = model.get("kv_channels") or hidden // heads
    width, shared = heads * channels, (model.get("num_query_groups") or heads) * channels
    projections = 2 * queries * hidden * width * 2  # of the queries, and of the output
    projections += 2 * keys * hidden * shared * 2  # of the keys, and of the values
    # The scores, and the values that they weigh.
    scores = 2 * (queries * keys if pairs is None else pairs) * width * 2
    return int(projections + (scores // 2 if causal else scores))


def _mlp(model: Node, length: int, inner: int) -> int:
    hidden = model["hidden_size"]
    matrices = 3 if str(model.get("activation", "gelu")).endswith("glu") else 2
    return int(2 * length * hidden * inner * matrices)


def _logits(model: Node, length: int, vocabulary: int) -> int:
    return int(2 * length * model["hidden_size"] * vocabulary)
