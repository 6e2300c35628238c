"""StableLM: Llama with layer norms, without biases of matrices; GPT-3's improved sizes are such models."""

from __future__ import annotations

from slipway.trainer.conversion.config_options import Only, Option, Rotary, number
from slipway.trainer.conversion.families.family import Family, hidden_by_heads
from slipway.trainer.conversion.families.llama import ROTARY_OPTIONS, rotary_layers

STABLELM = Family(
    name="stablelm",
    model_class="StableLmForCausalLM",
    words="model.embed_tokens.weight",
    fields={
        "position": "rope",
        "normalization": "LayerNorm",
        "normalize_scores": True,
        "bias": False,
        "qkv_bias": False,
        "kv_channels": hidden_by_heads,
    },
    options=(
        *ROTARY_OPTIONS,
        Option("layer_norm_eps", "norm_epsilon", number, 1e-5),
        Option("hidden_dropout", "hidden_dropout", number, 0.0),
        Only("use_qkv_bias"),
        Only("qk_layernorm"),
        Only("use_parallel_residual"),
        Rotary(share=0.25, is_partial=True),
    ),
    layers=rotary_layers,
)
