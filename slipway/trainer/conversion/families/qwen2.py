"""Qwen2 and Qwen2.5: Llama with a bias of queries, keys and values."""

from __future__ import annotations

from slipway.trainer.conversion.config_options import Only, Rotary
from slipway.trainer.conversion.families.family import Family
from slipway.trainer.conversion.families.llama import RMS_OPTIONS, ROTARY_OPTIONS, rotary_layers

QWEN2 = Family(
    name="qwen2",
    model_class="Qwen2ForCausalLM",
    words="model.embed_tokens.weight",
    fields={
        "position": "rope",
        "normalization": "RMSNorm",
        "normalize_scores": True,
        "bias": False,
        "qkv_bias": True,
    },
    options=(
        *ROTARY_OPTIONS,
        *RMS_OPTIONS,
        Only("use_sliding_window"),
        Rotary(),
    ),
    layers=rotary_layers,
)
