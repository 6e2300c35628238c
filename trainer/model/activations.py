"""The functions of the feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from trainer.config.architecture import Architecture

Activation = Callable[[Any], Any]


def tanh_gelu(x: Any) -> Any:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016, section 2), as GPT-2 and T5 1.1 use it."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Any) -> Any:
    """ReLU squared (So et al. 2021, Primer)."""
    return torch.square(F.relu(x))


# The function inside a gated unit carries the unit's first letters: SwiGLU is SiLU-gated (Shazeer 2020).
_FUNCTIONS: dict[str, Activation] = {
    "gelu": tanh_gelu,
    "geglu": tanh_gelu,
    "reglu": F.relu,
    "relu": F.relu,
    "swiglu": F.silu,
    "silu": F.silu,
    "squared-relu": squared_relu,
}


def activation(shape: Architecture, device: Any) -> tuple[Activation, bool]:
    """Return the function, and whether megatron-core fuses it with the bias before it.

    megatron-core recognises what it fuses by the function: for `torch.nn.functional.gelu`, which is the exact
    GELU, it computes the tanh form. So that the key means one function, it is that form without fusion too.
    Nothing is fused on a CPU: the fused functions are not compiled there, and slower than PyTorch's own.
    """
    function, gated = _FUNCTIONS[shape.activation], shape.activation.endswith("glu")
    if device.type != "cuda" or not shape.bias_activation_fusion:
        return function, False
    if function is tanh_gelu and (gated or shape.bias):
        return F.gelu, True
    # Of the others megatron-core 0.16 fuses SwiGLU alone.
    return function, function is F.silu and gated
