"""Which part of a GPU's peak a training reaches: model FLOPs utilization, MFU (Chowdhery et al. 2022, arXiv
2204.02311, section 4.1), as others measured it.

A model between two of the sizes here reaches what lies between, by the logarithm of the size; one beyond them
what the nearest does. All are parts of the dense peak of bf16, those of FP8 too. docs/time.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log
from typing import NamedTuple

from launcher.hardware import Gpu
from launcher.preflight.estimates.sizes import Sized

# NeMo-Megatron-Launcher, README.md at 80353286: what it says of its sizes, "can be trained in about 24 days
# using 128 nodes", or the tokens per second of its section 7; on A100 80GB, as an MFU by `flops`.
_LAUNCHER = "NeMo launcher, 2023"
# The same, examples/README.md at 97f45c18: model TFLOP/s with FP8 on H100.
_LAUNCHER_FP8 = "NeMo launcher, 2024"
# Megatron-LM, README.md at 95f872f5, and Korthikanti et al. 2022 (arXiv 2205.05198), abstract; A100 80GB.
_KORTHIKANTI = "Korthikanti et al. 2022"
# Megatron-LM, README.md at 2488e20d: from 47 % on 96 to 42 % on 4,608 H100.
_MEGATRON = "Megatron-LM, 2024"
# llm-foundry, scripts/train/benchmarking/README.md at 8c8dd48f: bf16 on 256 H100, 2,048 tokens.
_FOUNDRY = "llm-foundry, 2024"
# Llama team 2024 (arXiv 2407.21783), table 4: 38 to 43 % on 8,192 to 16,384 H100.
_LLAMA = "Llama team 2024"
# https://nv-adlr.github.io/MegatronLMV1: 62.4 TFLOP/s at 1.2B, of which 79.6 % are left at 8.7B; a quarter of
# it is taken for recomputing here.
_MEGATRON_1 = "Megatron-LM 1.0, 2020"


class Utilization(NamedTuple):
    """The part of `peak` (FLOP/s of one GPU) that a training reaches, and who says so."""

    mfu: float
    peak: float
    source: str


class Measured(NamedTuple):
    """What a training of a model with so many parameters reached; `name` is the model, `source` who tells."""

    parameters: float
    mfu: float
    name: str
    source: str

    def __str__(self) -> str:
        return f"{self.name} ({self.source})"


# From here on a T5's vocabulary is that of mT5, which was slower.
_LARGE_VOCABULARY = 200_000

_A100: Mapping[str, Sequence[Measured]] = {
    "gpt": (
        Measured(0.126e9, 0.21, "GPT 126M", _LAUNCHER),  # 20 hours on 8 nodes
        Measured(5.0e9, 0.54, "GPT 5B", _LAUNCHER),  # 659,481 tokens/s on 16 nodes
        Measured(20.3e9, 0.49, "GPT 20B", _LAUNCHER),  # 6 days on 64 nodes
        Measured(39.1e9, 0.46, "GPT 40B", _LAUNCHER),  # 6 days on 128 nodes
        Measured(175e9, 0.51, "GPT 175B", _LAUNCHER),  # 24 days on 128 nodes
        Measured(530e9, 0.54, "GPT 530B", _KORTHIKANTI),
        Measured(1008e9, 0.56, "GPT 1T", _KORTHIKANTI),
    ),
    "t5": (
        Measured(0.22e9, 0.28, "T5 220M", _LAUNCHER),  # 3,273,728 tokens/s on 4 nodes
        Measured(2.8e9, 0.30, "T5 3B", _LAUNCHER),  # 1,395,131 tokens/s on 20 nodes
        Measured(11.0e9, 0.38, "T5 11B", _LAUNCHER),  # 26.5 days on 20 nodes
        Measured(23.5e9, 0.30, "T5 23B", _LAUNCHER),  # 36 days on 40 nodes
        Measured(41.2e9, 0.32, "T5 41B", _LAUNCHER),  # 60 days on 40 nodes
    ),
    "mt5": (
        Measured(0.17e9, 0.12, "mT5 170M", _LAUNCHER),  # 4 days on 4 nodes
        Measured(0.39e9, 0.17, "mT5 390M", _LAUNCHER),  # 4 days on 8 nodes
        Measured(3.2e9, 0.20, "mT5 3B", _LAUNCHER),  # 14 days on 20 nodes
        # Of the large ones the vocabulary is a small part.
        Measured(11.0e9, 0.38, "T5 11B", _LAUNCHER),
        Measured(23.5e9, 0.30, "T5 23B", _LAUNCHER),
    ),
    "bert": (
        Measured(0.126e9, 0.21, "GPT 126M", _LAUNCHER),
        Measured(3.9e9, 0.44, "BERT 4B", _LAUNCHER),  # 728,178 tokens/s on 16 nodes
    ),
}
_H100 = (
    Measured(1.3e9, 0.39, "MPT 1B", _FOUNDRY),
    Measured(2.7e9, 0.41, "MPT 3B", _FOUNDRY),
    Measured(6.7e9, 0.44, "MPT 7B", _FOUNDRY),
    Measured(12.9e9, 0.41, "MPT 13B", _FOUNDRY),
    Measured(30e9, 0.41, "MPT 30B", _FOUNDRY),
    Measured(65e9, 0.42, "MPT 70B", _FOUNDRY),
    Measured(175e9, 0.44, "GPT 175B", _MEGATRON),
    Measured(405e9, 0.41, "Llama 405B", _LLAMA),
)
_H100_FP8 = (
    Measured(5.0e9, 0.76, "GPT 5B with FP8", _LAUNCHER_FP8),
    Measured(6.7e9, 0.75, "Llama 7B with FP8", _LAUNCHER_FP8),
    Measured(13.0e9, 0.73, "Llama 13B with FP8", _LAUNCHER_FP8),
    Measured(20.3e9, 0.73, "GPT 20B with FP8", _LAUNCHER_FP8),
    Measured(69.0e9, 0.74, "Llama 70B with FP8", _LAUNCHER_FP8),
    Measured(175e9, 0.81, "GPT 175B with FP8", _LAUNCHER_FP8),
)
_V100 = (
    Measured(1.2e9, 0.37, "GPT 1.2B", _MEGATRON_1),
    Measured(8.7e9, 0.30, "GPT 8.7B", _MEGATRON_1),
)

# What nobody published of a GPU is taken from the A100: the part of it that models reach which were measured
# on both (H100: 7B to 65B; V100: 1.2B and 8.7B).
_OF_A100 = {"a100": 1.0, "h100": 0.85, "h200": 0.85, "v100": 0.7}
# Smaller models than the smallest measured one are far from what it reaches.
_TINY = _A100["gpt"][0]


def default_mfu(model: Sized, gpu: Gpu, is_fp8: bool = False) -> Utilization:
    """The MFU that a model is counted with where the user states none."""
    generation = gpu.name.partition("-")[0]
    measured = _measured(_family(model), generation, is_fp8)
    mfu, source = _between(measured, model.parameters)
    return Utilization(mfu, gpu.peak, source)


def _family(model: Sized) -> str:
    if model.model_type == "t5" and model.vocabulary >= _LARGE_VOCABULARY:
        return "mt5"
    return model.model_type


def _measured(family: str, generation: str, is_fp8: bool) -> Sequence[Measured]:
    """What there is of a family on a generation of GPUs, ascending by size."""
    if generation == "a100":
        return _A100[family]
    part = _OF_A100[generation]
    if family != "gpt":
        return [_on(generation, part, one) for one in _A100[family]]
    if generation == "v100":
        own: Sequence[Measured] = _V100
    else:  # an H200 computes as fast as an H100
        own = _H100_FP8 if is_fp8 else _H100
    return [_on(generation, part, _TINY), *own]


def _on(generation: str, part: float, one: Measured) -> Measured:
    return one._replace(mfu=one.mfu * part, source=f"{one.source}; of the A100's × {part:g}")


def _between(measured: Sequence[Measured], parameters: int) -> tuple[float, str]:
    """The MFU at a size, by the logarithm of the sizes around it."""
    for below, above in pairwise(measured):
        if below.parameters < parameters < above.parameters:
            way = log(parameters / below.parameters) / log(above.parameters / below.parameters)
            return below.mfu + way * (above.mfu - below.mfu), f"between {below} and {above}"
    nearest = min(measured, key=lambda one: abs(log(one.parameters / parameters)))
    return nearest.mfu, f"as {nearest}"
