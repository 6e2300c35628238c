"""The layers' specs for megatron-core, with PyTorch's norms.

Those work under sequence parallelism too. megatron-core's own wrapper of them has no sequence parallelism and
no zero-centred scale without Transformer Engine or Apex.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from megatron.core.jit import jit_fuser
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from slipway.trainer.config.architecture import Architecture
from slipway.trainer.model.backends import core_attention, uses_transformer_engine
from slipway.trainer.model.seeding import make_seeded_layer


def stack_layers(
    shape: Architecture,
    config: TransformerConfig,
    device: Any,
    seed: int,
    part: Literal["gpt", "encoder", "decoder"],
    virtual_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of one chunk of a stack, with our attention, norms and seeds.

    Parameters
    ----------
    seed
        The seed of the layers' weights; the parts of a T5 need different seeds, or their layers would
        start alike.
    part
        Which stack it is: a GPT's, or a T5's encoder or decoder.
    virtual_stage
        Which of this rank's chunks; None if there is but one.

    Raises
    ------
    UserError
        If the attention that is asked for cannot compute this.
    """
    with_engine = uses_transformer_engine(shape, device)
    if part == "gpt":
        spec = get_gpt_layer_with_transformer_engine_spec if with_engine else get_gpt_layer_local_spec
    else:
        from megatron.core.models.T5 import t5_spec

        engine = "transformer_engine_default" if with_engine else "local"
        spec = getattr(t5_spec, f"{part}_model_with_{engine}_spec")
    layer = copy.deepcopy(spec())
    layer.module = make_seeded_layer(seed)
    parts, attention = layer.submodules, core_attention(shape, config, device)
    parts.self_attention.submodules.core_attention = attention
    if hasattr(parts.cross_attention, "submodules"):
        parts.cross_attention.submodules.core_attention = attention
    if with_engine:
        # Its linear layers hold their norms.
        from megatron.core.extensions.transformer_engine import TENorm as final_norm
    else:
        final_norm = norm(shape)
        parts.input_layernorm = parts.pre_mlp_layernorm = final_norm
        if hasattr(parts.cross_attention, "submodules"):
            parts.pre_cross_attn_layernorm = final_norm
    for block in (parts.self_attention, parts.cross_attention, parts.mlp):
        for name in ("linear_proj", "linear_fc2"):
            if getattr(getattr(block, "submodules", None), name, None) is RowParallelLinear:
                setattr(block.submodules, name, RowLinear)
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules([layer] * count, layer_norm=final_norm)


def norm(shape: Architecture) -> type:
    """Return the class for the norms of a stack's layers; its arguments are those of `LayerNorm`."""
    if shape.normalization == "RMSNorm":
        return RMSNorm
    return ZeroCenteredLayerNorm if shape.zero_centered_gamma else LayerNorm


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """megatron-core's linear layer with its group, in place of the default of a call without one.

    Without one, rank 0 warns in every call (megatron-core 0.16.1, utils.py, 501), and a warning cannot be
    part of a compiled graph.
    """

    def _forward_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._forward_impl(*args, **{**kwargs, "tp_group": self.tp_group})


class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]
    """Layer norm (Ba et al. 2016).

    Parameters
    ----------
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
        return _normalize(x, self.weight, self.bias, self.eps)


@jit_fuser  # type: ignore[untyped-decorator]
def _normalize(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    # In 32 bits, as in Transformer Engine: bf16 has no number between 1 and 1.0078, and a small weight would
    # change nothing.
    scale = 1 + weight.float()
    return torch.nn.functional.layer_norm(x.float(), weight.shape, scale, bias.float(), eps).to(x.dtype)


def _mark(module: Any, config: Any) -> None:
    # Each rank sees its own tokens under sequence parallelism: megatron-core adds up the gradients of
    # parameters that are marked so.
    for parameter in module.parameters():
        parameter.sequence_parallel = config is not None and config.sequence_parallel
