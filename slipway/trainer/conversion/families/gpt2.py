"""GPT-2, and every GPT with learned positions and layer norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipway.trainer.config.architecture import Architecture
from slipway.trainer.conversion.config_options import (
    FUNCTIONS,
    Activation,
    Imported,
    Only,
    Option,
    flag,
    layers,
    number,
    whole,
)
from slipway.trainer.conversion.families.family import Family, hidden_by_heads
from slipway.trainer.conversion.weight_map import (
    TURNED,
    Linear,
    Norm,
    Row,
    conv_qkv,
    final_norm,
    layer_rows,
    plain_row,
)


def _layers(shape: Architecture) -> Iterator[Row]:
    positions = (shape.max_positions, shape.hidden_size)
    yield plain_row("embedding.position_embeddings.weight", positions, "transformer.wpe.weight")
    # Conv1D always has a bias.
    parts = (
        Norm("self_attention.linear_qkv.layer_norm_", "ln_1"),
        Linear("self_attention.linear_qkv", ("attn.c_attn",), conv_qkv(shape), is_biased=True),
        Linear("self_attention.linear_proj", ("attn.c_proj",), TURNED, is_biased=True),
        Norm("mlp.linear_fc1.layer_norm_", "ln_2"),
        Linear("mlp.linear_fc1", ("mlp.c_fc",), TURNED, is_biased=True),
        Linear("mlp.linear_fc2", ("mlp.c_proj",), TURNED, is_biased=True),
    )
    yield from layer_rows(shape, "decoder", "transformer.h", parts)
    yield from final_norm(shape, "decoder", "transformer.ln_f")


def _four_times_hidden(fields: Any) -> int:
    return 4 * int(fields["hidden_size"])


GPT2 = Family(
    name="gpt2",
    model_class="GPT2LMHeadModel",
    words="transformer.wte.weight",
    fields={
        "position": "learned_absolute",
        "normalization": "LayerNorm",
        "num_query_groups": lambda fields: fields["num_attention_heads"],
        "kv_channels": hidden_by_heads,
    },
    options=(
        Imported("bias", True),
        Option("n_positions", "max_positions", whole, 1024),
        Option("n_embd", "hidden_size", whole, 768),
        Option("n_layer", "num_layers", layers, 12),
        Option("n_head", "num_attention_heads", whole, 12),
        Option("n_inner", "ffn_hidden_size", whole, _four_times_hidden),
        # The exact function is of models that Megatron-LM trained without its fused kernel.
        Activation("activation_function", {**FUNCTIONS, "exact-gelu": "gelu"}, "gelu_new", FUNCTIONS),
        # Of two dropouts the second is kept.
        Option("embd_pdrop", "hidden_dropout", number, 0.1),
        Option("resid_pdrop", "hidden_dropout", number, 0.1),
        Option("attn_pdrop", "attention_dropout", number, 0.1),
        Option("layer_norm_epsilon", "norm_epsilon", number, 1e-5),
        Option("initializer_range", "init_std", number, 0.02),
        Option("scale_attn_weights", "normalize_scores", flag, True),
        Only("scale_attn_by_inverse_layer_idx"),
        Only("add_cross_attention"),
    ),
    layers=_layers,
    is_tied=True,
)
