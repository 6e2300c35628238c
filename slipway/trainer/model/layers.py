"""The layers' specs for megatron-core, with PyTorch's norms.

Those work under sequence parallelism too. megatron-core's own wrapper of them has no sequence parallelism and
no zero-centred scale without Transformer Engine or Apex.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from slipway.trainer.config.architecture import Architecture
from slipway.trainer.model.backends import core_attention, uses_transformer_engine
from slipway.trainer.model.seeding import seeded_layer


def gpt_layers(
    shape: Architecture, config: TransformerConfig, device: Any, seed: int, virtual_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of one chunk of a GPT.

    Parameters
    ----------
    shape
        The model.
    config
        The same in megatron-core's words.
    device
        What it is computed on.
    seed
        What the layers' weights are drawn from.
    virtual_stage
        Which of this rank's chunks; None if there is but one.

    Raises
    ------
    UserError
        If the attention that is asked for cannot compute this.
    """
    if uses_transformer_engine(shape, device):
        layer = get_gpt_layer_with_transformer_engine_spec()
    else:
        layer = get_gpt_layer_local_spec()
    return _block(layer, shape, config, device, seed, virtual_stage)


def t5_layers(
    shape: Architecture,
    config: TransformerConfig,
    device: Any,
    seed: int,
    part: Literal["encoder", "decoder"],
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of a T5's encoder or decoder; see `gpt_layers`.

    The parts need seeds of their own, or their layers would start alike.
    """
    from megatron.core.models.T5 import t5_spec

    if uses_transformer_engine(shape, device):
        layer = getattr(t5_spec, f"{part}_model_with_transformer_engine_default_spec")()
    else:
        layer = getattr(t5_spec, f"{part}_model_with_local_spec")()
    return _block(layer, shape, config, device, seed, None)


def _block(
    layer: Any,
    shape: Architecture,
    config: TransformerConfig,
    device: Any,
    seed: int,
    virtual_stage: int | None,
) -> TransformerBlockSubmodules:
    """Complete megatron-core's spec of a layer with our attention, norms and seeds, and repeat it."""
    layer = copy.deepcopy(layer)
    layer.module = seeded_layer(seed)
    parts, attention = layer.submodules, core_attention(shape, config, device)
    parts.self_attention.submodules.core_attention = attention
    if hasattr(parts.cross_attention, "submodules"):
        parts.cross_attention.submodules.core_attention = attention
    if uses_transformer_engine(shape, device):
        # Its linear layers hold their norms.
        from megatron.core.extensions.transformer_engine import TENorm as final_norm
    else:
        final_norm = norm(shape)
        parts.input_layernorm = parts.pre_mlp_layernorm = final_norm
        if hasattr(parts.cross_attention, "submodules"):
            parts.pre_cross_attn_layernorm = final_norm
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules([layer] * count, layer_norm=final_norm)


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
