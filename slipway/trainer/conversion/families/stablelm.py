"""StableLM: Llama with layer norms, without biases of matrices; GPT-3's improved sizes are such models."""

from __future__ import annotations

from slipway.trainer.conversion.config_options import Option, Rotary, number
from slipway.trainer.conversion.families import llama
from slipway.trainer.conversion.families.family import Family, hidden_by_heads

STABLELM = Family(
    name="stablelm",
    model_class="StableLmForCausalLM",
    words=llama.WORDS,
    names=llama.NAMES,
    fields={
        **llama.LLAMA.fields,
        "normalization": "LayerNorm",
        "bias": False,
        "kv_channels": hidden_by_heads,
    },
    options=(
        *(*llama.OPTIONS, Rotary(share=0.25, is_partial=True)),
        Option("layer_norm_eps", "norm_epsilon", number, 1e-5),
        Option("hidden_dropout", "hidden_dropout", number, 0.0),
        *(Option(key, default=False) for key in ("use_qkv_bias", "qk_layernorm", "use_parallel_residual")),
    ),
)
