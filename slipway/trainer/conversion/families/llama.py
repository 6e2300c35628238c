"""Llama up to 3.1, and every GPT with rotary positions, RMS norms and gated units."""

from __future__ import annotations

from slipway.trainer.conversion.config_options import GATED, Option, Rotary, count, flag, layers, number
from slipway.trainer.conversion.families.family import Family
from slipway.trainer.conversion.weight_map import StackNames

WORDS = "model.embed_tokens.weight"
NAMES = StackNames(
    layers="model.layers",
    layer={
        "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.linear_proj": ("self_attn.o_proj",),
        "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": ("mlp.down_proj",),
        "self_attention.linear_qkv.layer_norm_": ("input_layernorm",),
        "mlp.linear_fc1.layer_norm_": ("post_attention_layernorm",),
    },
    final_norm="model.norm",
)
# The options of all families of Llama's shape; the second ones are of those with RMS norms.
OPTIONS = (
    Option("hidden_size", "hidden_size", count),
    Option("intermediate_size", "ffn_hidden_size", count),
    Option("num_hidden_layers", "num_layers", layers),
    Option("num_attention_heads", "num_attention_heads", count),
    Option("num_key_value_heads", "num_query_groups", count, lambda of: of["num_attention_heads"]),
    Option("hidden_act", "activation", default="silu", names=GATED),
    Option("max_position_embeddings", "max_positions", count, 2048),
    Option("initializer_range", "init_std", number, 0.02),
    Option("attention_dropout", "attention_dropout", number, 0.0),
)
RMS_OPTIONS = (
    Option("head_dim", "kv_channels", count, lambda of: of["hidden_size"] // of["num_attention_heads"]),
    Option("rms_norm_eps", "norm_epsilon", number, 1e-6),
)

LLAMA = Family(
    name="llama",
    model_class="LlamaForCausalLM",
    words=WORDS,
    names=NAMES,
    fields={"position": "rope", "normalization": "RMSNorm", "normalize_scores": True, "qkv_bias": False},
    options=(
        *(*OPTIONS, *RMS_OPTIONS, Rotary()),
        Option("attention_bias", "bias", flag, False),
        Option("mlp_bias", default=lambda fields: fields["bias"]),
    ),
)
