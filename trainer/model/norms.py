"""Norms that megatron-core has only with Transformer Engine or Apex."""

from __future__ import annotations

from typing import Any

import torch


class ZeroCenteredLayerNorm(torch.nn.Module):  # type: ignore[misc]
    """Layer norm whose scale is ``1 + weight``, with the weight starting at zero (NeMo's ``layernorm1p``).

    Parameters
    ----------
    config
        megatron-core's TransformerConfig; unused, its specs pass it.
    hidden_size
        Size of the last dimension of the input, ``[..., hidden_size]``.
    eps
        Added to the variance.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x: Any) -> Any:
        """Normalize the last dimension."""
        return torch.nn.functional.layer_norm(x, self.weight.shape, 1 + self.weight, self.bias, self.eps)
