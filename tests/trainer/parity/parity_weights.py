"""The correspondence of Hugging Face's weights and ours: one table a family.

A row has our name of a parameter, how theirs become ours, and Hugging Face's names; ``{}`` is the layer.
The functions are linear and lose nothing, so that they turn gradients into ours as well. Shapes: ``n`` heads,
``g`` query groups, ``d`` channels of a head, ``h`` hidden, ``f`` feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Heads:
    """The division of attention; ``groups`` query groups share their keys and values."""

    heads: int
    groups: int


def same(_: Heads, weight: Any) -> Any:
    return weight


def transposed(_: Heads, weight: Any) -> Any:
    """GPT-2's Conv1D keeps its matrices as ``[in, out]``."""
    return weight.T


def grouped_qkv(heads: Heads, query: Any, key: Any, value: Any) -> Any:
    """``[n d, h]`` and twice ``[g d, h]``: by group its queries, key and value, ``[(n + 2 g) d, h]``."""
    parts = [x.reshape(heads.groups, -1, *x.shape[1:]) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def conv_qkv(heads: Heads, weight: Any) -> Any:
    """Return a Conv1D of all three, ``[h, 3 n d]``, or its bias, ``[3 n d]``."""
    return grouped_qkv(heads, *weight.T.chunk(3))


def headed_kv(heads: Heads, key: Any, value: Any) -> Any:
    """Twice ``[n d, h]``, of cross-attention: head by head its key and its value, ``[2 n d, h]``."""
    parts = [x.reshape(heads.heads, -1, x.shape[1]) for x in (key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def stacked(_: Heads, gate: Any, up: Any) -> Any:
    """Return a gated unit's two matrices, the one with the function first: ``[2 f, h]``."""
    return torch.cat([gate, up])


def zeros(_: Heads, embedding: Any) -> Any:
    """Return a bias, ``[v]``, that only we have."""
    return embedding.new_zeros(len(embedding))


Row = tuple[Callable[..., Any], tuple[str, ...]]
Table = dict[str, Row]


def _layers(ours: str, theirs: str, rows: Mapping[str, Row], kind: str = "weight") -> Table:
    return {
        f"{ours}.layers.{{}}.{name}.{kind}": (
            function,
            tuple(f"{theirs}.{{}}.{source}.{kind}" for source in sources),
        )
        for name, (function, sources) in rows.items()
    }


_GPT2_NORMS: Table = {"input_layernorm": (same, ("ln_1",)), "pre_mlp_layernorm": (same, ("ln_2",))}
_GPT2 = "transformer.h"
GPT2: Table = {
    "embedding.word_embeddings.weight": (same, ("transformer.wte.weight",)),
    "embedding.position_embeddings.weight": (same, ("transformer.wpe.weight",)),
    **_layers("decoder", _GPT2, _GPT2_NORMS),
    **_layers("decoder", _GPT2, _GPT2_NORMS, "bias"),
    **_layers(
        "decoder",
        _GPT2,
        {
            "self_attention.linear_qkv": (conv_qkv, ("attn.c_attn",)),
            "self_attention.linear_proj": (transposed, ("attn.c_proj",)),
            "mlp.linear_fc1": (transposed, ("mlp.c_fc",)),
            "mlp.linear_fc2": (transposed, ("mlp.c_proj",)),
        },
    ),
    **_layers(
        "decoder",
        _GPT2,
        {
            "self_attention.linear_qkv": (conv_qkv, ("attn.c_attn",)),
            "self_attention.linear_proj": (same, ("attn.c_proj",)),
            "mlp.linear_fc1": (same, ("mlp.c_fc",)),
            "mlp.linear_fc2": (same, ("mlp.c_proj",)),
        },
        "bias",
    ),
    "decoder.final_layernorm.weight": (same, ("transformer.ln_f.weight",)),
    "decoder.final_layernorm.bias": (same, ("transformer.ln_f.bias",)),
}

LLAMA: Table = {
    "embedding.word_embeddings.weight": (same, ("model.embed_tokens.weight",)),
    **_layers(
        "decoder",
        "model.layers",
        {
            "input_layernorm": (same, ("input_layernorm",)),
            "self_attention.linear_qkv": (
                grouped_qkv,
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ),
            "self_attention.linear_proj": (same, ("self_attn.o_proj",)),
            "pre_mlp_layernorm": (same, ("post_attention_layernorm",)),
            "mlp.linear_fc1": (stacked, ("mlp.gate_proj", "mlp.up_proj")),
            "mlp.linear_fc2": (same, ("mlp.down_proj",)),
        },
    ),
    "decoder.final_layernorm.weight": (same, ("model.norm.weight",)),
    "output_layer.weight": (same, ("lm_head.weight",)),
}


def _t5_stack(stack: str, feed_forward: int, fc1: Row) -> Table:
    """One stack's rows; `feed_forward` is the place of the feed-forward block in Hugging Face's layers."""
    own, cross, dense = "layer.0.SelfAttention", "layer.1.EncDecAttention", f"layer.{feed_forward}"
    rows: Table = {
        "input_layernorm": (same, ("layer.0.layer_norm",)),
        "self_attention.linear_qkv": (grouped_qkv, (f"{own}.q", f"{own}.k", f"{own}.v")),
        "self_attention.linear_proj": (same, (f"{own}.o",)),
        "pre_mlp_layernorm": (same, (f"{dense}.layer_norm",)),
        "mlp.linear_fc1": (fc1[0], tuple(f"{dense}.DenseReluDense.{name}" for name in fc1[1])),
        "mlp.linear_fc2": (same, (f"{dense}.DenseReluDense.wo",)),
    }
    if stack == "decoder":
        rows["pre_cross_attn_layernorm"] = (same, ("layer.1.layer_norm",))
        rows["cross_attention.linear_q"] = (same, (f"{cross}.q",))
        rows["cross_attention.linear_kv"] = (headed_kv, (f"{cross}.k", f"{cross}.v"))
        rows["cross_attention.linear_proj"] = (same, (f"{cross}.o",))
    first = f"{stack}.block.0.{own}.relative_attention_bias.weight"
    return {
        **_layers(stack, f"{stack}.block", rows),
        # Hugging Face has the relative positions in the first layer, for all.
        f"{stack}_relative_pos_emb.relative_attention_bias.weight": (same, (first,)),
        f"{stack}.final_layernorm.weight": (same, (f"{stack}.final_layer_norm.weight",)),
    }


def _t5(fc1: Row) -> Table:
    shared = {"embedding.word_embeddings.weight": (same, ("shared.weight",))}
    return {**shared, **_t5_stack("encoder", 1, fc1), **_t5_stack("decoder", 2, fc1)}


# The first T5: ReLU, and a tied head. megatron-core's tied head has a bias.
T5: Table = {**_t5((same, ("wi",))), "lm_head.output_layer.bias": (zeros, ("shared.weight",))}
# T5 1.1: a gated GELU, and a head of its own.
T5_V1_1: Table = {
    **_t5((stacked, ("wi_0", "wi_1"))),
    "lm_head.output_layer.weight": (same, ("lm_head.weight",)),
}

TABLES = {"gpt2": GPT2, "llama": LLAMA, "t5": T5, "t5_v1_1": T5_V1_1}


def scale(family: str, name: str, hidden: int) -> float:
    """Return what our weight is multiplied by, and its gradient divided.

    The first T5 multiplies what goes into its tied head by ``h ** -0.5``. We have no such factor, but the
    norm before the head can hold it.
    """
    return hidden**-0.5 if (family, name) == ("t5", "decoder.final_layernorm.weight") else 1.0


def our_tensor(family: str, theirs: Mapping[str, Any], name: str, heads: Heads) -> Any:
    """Return our whole parameter, or its gradient, from Hugging Face's, but for its `scale`."""
    stack, _, rest = name.partition(".layers.")
    layer, _, _ = rest.partition(".")
    key = f"{stack}.layers.{{}}{rest.removeprefix(layer)}" if rest else name
    function, sources = TABLES[family][key]
    return function(heads, *(theirs[source.format(layer)] for source in sources))
