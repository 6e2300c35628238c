"""megatron-core's T5Model."""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.T5 import T5Model
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slipway.trainer.config.architecture import Architecture
from slipway.trainer.config.settings import Settings
from slipway.trainer.distributed import RankContext
from slipway.trainer.model.layers import stack_layers
from slipway.trainer.model.seeding import advance_seed
from slipway.trainer.model.transformer import transformer_config


def t5_chunks(settings: Settings, rank_context: RankContext, vocabulary: int) -> tuple[Any, list[Any]]:
    """Build a T5, which is all of it on every pipeline stage: there is but one.

    The stacks have one embedding, with the decoder's initialization and dropout. As megatron-core has it, a
    tied output has a bias, but for ``model.tokens_head_bias=False``, and an untied one does not.

    Returns
    -------
    tuple
        The decoder's TransformerConfig, and the model in a list.
    """
    encoder, decoder = settings.encoder, settings.architecture
    assert encoder is not None
    first, second = (transformer_config(settings, shape, rank_context) for shape in (encoder, decoder))
    device, seed = rank_context.device, advance_seed(settings.seed, encoder.num_layers)
    model = T5Model(
        config=second,
        encoder_config=first,
        transformer_encoder_layer_spec=_see_all(
            stack_layers(encoder, first, device, settings.seed, "encoder")
        ),
        transformer_decoder_layer_spec=_see_all(stack_layers(decoder, second, device, seed, "decoder")),
        vocab_size=vocabulary,
        max_sequence_length=decoder.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=decoder.tied_embeddings,
        position_embedding_type=decoder.position,
        rotary_percent=decoder.rotary_percentage,
        **_relative(decoder),
    )
    if decoder.position == "rope":
        model.rotary_pos_emb = _rotary(decoder, second)
    if not decoder.head_bias and decoder.tied_embeddings:
        model.lm_head.output_layer.register_parameter("bias", None)
    return second, [model]


def _relative(shape: Architecture) -> dict[str, int]:
    assert shape.relative is not None
    return {
        "relative_attention_num_buckets": shape.relative.buckets,
        "relative_attention_max_distance": shape.relative.max_distance,
    }


def _rotary(shape: Architecture, config: TransformerConfig) -> RotaryEmbedding:
    # T5Model makes one too, without a base and without scaling.
    return RotaryEmbedding(
        kv_channels=config.kv_channels,
        rotary_percent=shape.rotary_percentage,
        rotary_interleaved=config.rotary_interleaved,
        seq_len_interpolation_factor=shape.rope.interpolation,
        rotary_base=shape.rotary_base,
        rope_scaling=shape.rope.scaling is not None,
        rope_scaling_factor=shape.rope.scaling or 1.0,
        use_cpu_initialization=config.use_cpu_initialization,
    )


def _see_all(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Let attention see all of the encoder's tokens without a mask: none of them is padding here.

    megatron-core's specs have masks of padding, which Transformer Engine then insists on.
    """
    for layer in block.layer_specs:
        for attention in (layer.submodules.self_attention, layer.submodules.cross_attention):
            # An encoder's cross-attention is a class that does nothing.
            params = getattr(attention, "params", None)
            if params and params["attn_mask_type"] is not AttnMaskType.causal:
                params["attn_mask_type"] = AttnMaskType.no_mask
    return block
