"""What a layer is made of: megatron-core's specs."""

from __future__ import annotations

import copy
from typing import Any, Literal

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.config.architecture import Architecture
from trainer.model.backends import core_attention, uses_transformer_engine
from trainer.model.norms import norm
from trainer.model.seeding import seeded_layer


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
