"""Initial weights that depend on the seed and on a layer's number alone, not on how layers are laid out."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

# Megatron-LM's distance between the seeds of pipeline stages; ours also keeps those of layers apart.
_STAGE = 100
_LAYER = 1 << 20


def seed_weights(seed: int) -> None:
    """Draw from here on what lies outside of the layers: the embeddings, and the head without layers."""
    _seed(seed)


def seed_training(seed: int) -> None:
    """Seed the random numbers of a training: dropout, different on each pipeline stage.

    It must not depend on how many numbers the initial weights took.
    """
    _seed(seed + _STAGE * parallel_state.get_pipeline_model_parallel_rank())


@functools.cache  # Chunks of one class share compiled graphs.
def make_seeded_layer(seed: int) -> type[TransformerLayer]:
    """Return a TransformerLayer whose weights are drawn from the seed and the layer's number in the model.

    So the stages of a pipeline, and their chunks, start as the model on one rank would: also the head that
    is drawn after the last layer.
    """

    class SeededLayer(TransformerLayer):  # type: ignore[misc]
        def __init__(
            self,
            config: Any,
            submodules: Any,
            layer_number: int = 1,
            hidden_dropout: float | None = None,
            pg_collection: Any = None,
            vp_stage: int | None = None,
        ) -> None:
            offset = get_transformer_layer_offset(
                config, vp_stage, parallel_state.get_pipeline_model_parallel_rank()
            )
            _seed(seed + _LAYER * (layer_number + offset))
            super().__init__(config, submodules, layer_number, hidden_dropout, pg_collection, vp_stage)

    return SeededLayer


def advance_seed(seed: int, count: int) -> int:
    """Return the seed of a stack of layers that comes after another of `count` layers: no two start alike."""
    return seed + _LAYER * count


def _seed(seed: int) -> None:
    # The tensor-parallel generator's seed, which this derives, has to fit 63 bits.
    seed %= 1 << 62
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
