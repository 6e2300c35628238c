"""PyTorch's norms for megatron-core's layer specs, under sequence parallelism too.

megatron-core's own wrapper of them has no sequence parallelism and no zero-centred scale without Transformer
Engine or Apex.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.config.architecture import Architecture


def norm(shape: Architecture) -> type:
    """Return the class for the norms of a stack's layers; its arguments are those of `LayerNorm`."""
    if shape.normalization == "RMSNorm":
        return RMSNorm
    return ZeroCenteredLayerNorm if shape.zero_centered_gamma else LayerNorm


class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]
    """Layer norm (Ba et al. 2016).

    Parameters
    ----------
    config
        megatron-core's TransformerConfig.
    hidden_size
        Size of the last dimension of the input, ``[..., hidden_size]``.
    eps
        Added to the variance.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark(self, config)


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """Root mean square norm (Zhang and Sennrich 2019), without a bias; see `LayerNorm` for the arguments."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark(self, config)


class ZeroCenteredLayerNorm(torch.nn.Module):  # type: ignore[misc]
    """Layer norm whose scale is ``1 + weight``, with the weight starting at zero (NeMo's ``layernorm1p``).

    See `LayerNorm` for the arguments.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps
        _mark(self, config)

    def forward(self, x: Any) -> Any:
        """Normalize the last dimension."""
        return torch.nn.functional.layer_norm(x, self.weight.shape, 1 + self.weight, self.bias, self.eps)


def _mark(module: Any, config: Any) -> None:
    # Each rank sees its own tokens under sequence parallelism: megatron-core adds up the gradients of what is
    # marked so.
    for parameter in module.parameters():
        parameter.sequence_parallel = config is not None and config.sequence_parallel
