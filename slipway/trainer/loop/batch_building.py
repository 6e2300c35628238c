"""The builder of a model's micro batches: the next token for a GPT, masked spans for a T5."""

from __future__ import annotations

import torch

from slipway.trainer.config.settings import Settings
from slipway.trainer.data.batches import Batch, GPTBatchBuilder, Resets
from slipway.trainer.data.denoising import T5Batch, T5BatchBuilder
from slipway.trainer.data.training_data import denoised_lengths
from slipway.trainer.data.vocabulary import Vocabulary, read_vocabulary
from slipway.trainer.distributed import RankContext
from slipway.trainer.logs import LOGGER
from slipway.trainer.model.backends import uses_transformer_engine
from slipway.trainer.model.kernels import takes_lengths

BatchBuilder = GPTBatchBuilder | T5BatchBuilder
MicroBatch = Batch | T5Batch


def vocabulary_of(settings: Settings) -> Vocabulary:
    """Return the tokenizer's tokens, and a T5's sentinels after them.

    Raises
    ------
    UserError
        If a file is missing or malformed.
    """
    vocabulary = read_vocabulary(settings.data.tokenizer, settings.data.kind == "mock")
    return vocabulary.add_sentinels(settings.denoising.sentinels) if settings.denoising else vocabulary


def make_batch_builder(settings: Settings, rank_context: RankContext, vocabulary: Vocabulary) -> BatchBuilder:
    """Return the builder of micro batches, in the memory of the CPU."""
    device, lengths = torch.device("cpu"), denoised_lengths(settings)
    if lengths:
        return T5BatchBuilder(
            lengths,
            vocabulary,
            settings.architecture.seq_length,
            (settings.seed, settings.resume.data_generation),
            settings.micro_batch,
            device,
        )
    masked = vocabulary.end_of_text if settings.data.eod_mask_loss else None
    resets = document_resets(settings, rank_context, vocabulary)
    return GPTBatchBuilder(vocabulary.size, masked, settings.micro_batch, device, resets)


def document_resets(settings: Settings, rank_context: RankContext, vocabulary: Vocabulary) -> Resets | None:
    """Return what starts anew with each document, None for nothing.

    Attention that takes no mask crosses documents, and the log says so. NeMo's always does: its
    ``get_attention_mask_from_fusion``, True by default, leaves the mask away.
    """
    data = settings.data
    attention, way_out = data.reset_attention, _suggest_masks(settings, rank_context)
    if attention and way_out:
        attention = False
        if rank_context.is_main:
            LOGGER.warning(
                "model.data.reset_attention_mask=True: attention crosses documents, as it does in "
                "NeMo: Transformer Engine's takes no mask. %s keeps them apart",
                way_out,
            )
    if not (attention or data.reset_positions):
        return None
    return Resets(
        vocabulary.end_of_text,
        data.reset_positions,
        attention,
        variable_lengths=takes_lengths(settings, rank_context.device),
        same_kernel=settings.architecture.attention_dropout > 0,
    )


def _suggest_masks(settings: Settings, rank_context: RankContext) -> str | None:
    """Return what would have the attention take masks; None if it does."""
    if settings.parallel.context > 1:
        return "model.context_parallel_size=1"
    shape = settings.architecture
    with_engine = shape.attention_backend == "transformer_engine" or (
        shape.attention_backend == "auto" and uses_transformer_engine(shape, rank_context.device)
    )
    return "model.attention_backend=sdpa" if with_engine else None
