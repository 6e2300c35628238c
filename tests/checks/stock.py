"""The GPUs that the shipped layouts are for."""

from __future__ import annotations

# NVIDIA's launcher, whose layouts they are, searches those of its GPT, BERT, T5 and mT5 for GPUs of 80 GB,
# A100 as its comments say (NeMo-Framework-Launcher, auto_configurator/conf/search_config, gpu_memory_gb),
# and has scripts that train its GPT and Llama 2 on A100 (examples/training/gpt/a100, llama/a100). Those of
# Llama 3 are for H100 alone (llama/h100), on which Meta trained it (Llama team 2024, arXiv 2407.21783,
# section 3.3.1), and the measurements of long sequences say h100 in their names. GPT-2 and Llama 1, of
# which it says nothing, are as GPT-3 and Llama 2.
# NeMo 2.4's recipes of Mixtral and DeepSeek are for GPUs of 80 GB too.
_FOR_H100 = ("llama/llama3", "_16k", "_32k", "_64k", "mixtral/", "deepseek/")


def gpu_for(size: str) -> str | None:
    """Return a name of `slipway.arithmetic.gpus`, or ``None`` for the sizes that train without a GPU."""
    if size.endswith("/tiny"):
        return None
    return "h100-80gb" if any(name in size for name in _FOR_H100) else "a100-80gb"
