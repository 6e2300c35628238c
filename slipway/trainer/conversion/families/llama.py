"""Llama up to 3.1, and every GPT with rotary positions, RMS norms and gated units."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from slipway.trainer.config.architecture import Architecture
from slipway.trainer.conversion.config_options import (
    GATED,
    Activation,
    ConfigKey,
    Only,
    Option,
    Rotary,
    flag,
    layers,
    number,
    whole,
)
from slipway.trainer.conversion.families.family import Family
from slipway.trainer.conversion.weight_map import (
    STACKED,
    Linear,
    Norm,
    Row,
    final_norm,
    grouped_qkv,
    halved,
    layer_rows,
)

ROTARY_OPTIONS: tuple[ConfigKey, ...] = (
    Option("hidden_size", "hidden_size", whole),
    Option("intermediate_size", "ffn_hidden_size", whole),
    Option("num_hidden_layers", "num_layers", layers),
    Option("num_attention_heads", "num_attention_heads", whole),
    Option("num_key_value_heads", "num_query_groups", whole, lambda fields: fields["num_attention_heads"]),
    Activation("hidden_act", GATED, "silu"),
    Option("max_position_embeddings", "max_positions", whole, 2048),
    Option("initializer_range", "init_std", number, 0.02),
    Option("attention_dropout", "attention_dropout", number, 0.0),
)
RMS_OPTIONS: tuple[ConfigKey, ...] = (
    Option(
        "head_dim",
        "kv_channels",
        whole,
        lambda fields: fields["hidden_size"] // fields["num_attention_heads"],
    ),
    Option("rms_norm_eps", "norm_epsilon", number, 1e-6),
)


def rotary_layers(shape: Architecture) -> Iterator[Row]:
    """Yield the rows of a stack with Llama's names; the fields of `shape` say which weights have biases."""
    fold = partial(halved, shape) if shape.rope.interleaved else None
    queries = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    parts = (
        Linear("self_attention.linear_qkv", queries, grouped_qkv(shape), fold=fold),
        Linear("self_attention.linear_proj", ("self_attn.o_proj",)),
        Linear("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), STACKED),
        Linear("mlp.linear_fc2", ("mlp.down_proj",)),
        Norm("self_attention.linear_qkv.layer_norm_", "input_layernorm"),
        Norm("mlp.linear_fc1.layer_norm_", "post_attention_layernorm"),
    )
    yield from layer_rows(shape, "decoder", "model.layers", parts)
    yield from final_norm(shape, "decoder", "model.norm")


LLAMA = Family(
    name="llama",
    model_class="LlamaForCausalLM",
    words="model.embed_tokens.weight",
    fields={
        "position": "rope",
        "normalization": "RMSNorm",
        "normalize_scores": True,
        "qkv_bias": False,
    },
    options=(
        *ROTARY_OPTIONS,
        *RMS_OPTIONS,
        Option("attention_bias", "bias", flag, False),
        Only("mlp_bias", field="bias"),
        Rotary(),
    ),
    layers=rotary_layers,
)
