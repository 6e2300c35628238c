"""megatron-core's GPTModel."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from slipway.trainer.config.settings import Settings
from slipway.trainer.distributed import RankContext
from slipway.trainer.model.attention import share_mask
from slipway.trainer.model.backends import attention_backend
from slipway.trainer.model.layers import stack_layers
from slipway.trainer.model.transformer import transformer_config


def gpt_chunks(
    settings: Settings, rank_context: RankContext, vocabulary: int, kind: type[GPTModel] = GPTModel
) -> tuple[Any, list[Any]]:
    """Build this rank's chunks of a GPT: one, or several with virtual pipeline stages, each of a `kind`.

    Returns
    -------
    tuple
        The TransformerConfig that all share, and the chunks, the one nearest to the input first.
    """
    shape, virtual = settings.architecture, settings.parallel.virtual
    config = transformer_config(settings, shape, rank_context)
    stages = range(virtual) if virtual > 1 else [None]
    chunks = [
        kind(
            config=config,
            transformer_layer_spec=stack_layers(
                shape, config, rank_context.device, settings.seed, "gpt", stage
            ),
            vocab_size=vocabulary,
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type=shape.position,
            rotary_percent=shape.rotary_percentage,
            rotary_base=shape.rotary_base,
            seq_len_interpolation_factor=shape.rope.interpolation,
            rope_scaling=shape.rope.scaling is not None,
            rope_scaling_factor=shape.rope.scaling or 1.0,
            vp_stage=stage,
        )
        for stage in stages
    ]
    if attention_backend(shape, config, rank_context.device) == "sdpa":
        for chunk in chunks:
            share_mask(chunk.decoder)
    return config, chunks
