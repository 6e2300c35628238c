"""GPT-2, and every GPT with learned positions and layer norms."""

from __future__ import annotations

from slipway.trainer.conversion.config_options import FUNCTIONS, Option, count, flag, layers, number
from slipway.trainer.conversion.families.family import Family, hidden_by_heads
from slipway.trainer.conversion.weight_map import StackNames

_LAYER = {
    "self_attention.linear_qkv.layer_norm_": ("ln_1",),
    "self_attention.linear_qkv": ("attn.c_attn",),
    "self_attention.linear_proj": ("attn.c_proj",),
    "mlp.linear_fc1.layer_norm_": ("ln_2",),
    "mlp.linear_fc1": ("mlp.c_fc",),
    "mlp.linear_fc2": ("mlp.c_proj",),
}
# The exact function is of models that Megatron-LM trained without its fused kernel.
_ACTIVATIONS = {**FUNCTIONS, "exact-gelu": "gelu"}

GPT2 = Family(
    name="gpt2",
    model_class="GPT2LMHeadModel",
    words="transformer.wte.weight",
    positions="transformer.wpe.weight",
    names=StackNames("transformer.h", _LAYER, "transformer.ln_f", is_conv=True),
    is_tied=True,
    fields={
        "position": "learned_absolute",
        "normalization": "LayerNorm",
        "num_query_groups": lambda fields: fields["num_attention_heads"],
        "kv_channels": hidden_by_heads,
    },
    options=(
        Option("n_positions", "max_positions", count, 1024),
        Option("n_embd", "hidden_size", count, 768),
        Option("n_layer", "num_layers", layers, 12),
        Option("n_head", "num_attention_heads", count, 12),
        Option("n_inner", "ffn_hidden_size", count, lambda fields: 4 * fields["hidden_size"]),
        Option(
            "activation_function", "activation", default="gelu_new", names=_ACTIVATIONS, unread="exact-gelu"
        ),
        # Of two dropouts the second is kept.
        Option("embd_pdrop", "hidden_dropout", number, 0.1),
        Option("resid_pdrop", "hidden_dropout", number, 0.1),
        Option("attn_pdrop", "attention_dropout", number, 0.1),
        Option("layer_norm_epsilon", "norm_epsilon", number, 1e-5),
        Option("initializer_range", "init_std", number, 0.02),
        Option("scale_attn_weights", "normalize_scores", flag, True),
        Option("scale_attn_by_inverse_layer_idx", default=False),
        Option("add_cross_attention", default=False),
    ),
)
