"""Qwen2 and Qwen2.5: Llama with a bias of queries, keys and values."""

from __future__ import annotations

from slipway.trainer.conversion.config_options import Option, Rotary
from slipway.trainer.conversion.families import llama
from slipway.trainer.conversion.families.family import Family

QWEN2 = Family(
    name="qwen2",
    model_class="Qwen2ForCausalLM",
    words=llama.WORDS,
    names=llama.NAMES,
    fields={**llama.LLAMA.fields, "bias": False, "qkv_bias": True},
    options=(*llama.OPTIONS, *llama.RMS_OPTIONS, Rotary(), Option("use_sliding_window", default=False)),
)
