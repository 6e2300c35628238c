"""Mistral without a sliding window: Llama without biases."""

from __future__ import annotations

from slipway.trainer.conversion.config_options import Option, Rotary
from slipway.trainer.conversion.families import llama
from slipway.trainer.conversion.families.family import Family

MISTRAL = Family(
    name="mistral",
    model_class="MistralForCausalLM",
    words=llama.WORDS,
    names=llama.NAMES,
    fields={**llama.LLAMA.fields, "bias": False},
    options=(*llama.OPTIONS, *llama.RMS_OPTIONS, Rotary(), Option("sliding_window", missing=4096)),
)
