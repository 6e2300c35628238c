"""What a model is given to learn from: the next token for a GPT, what was taken out of a text for a T5."""

from __future__ import annotations

import torch

from trainer.config.settings import Settings
from trainer.data.batches import Batch, BatchMaker
from trainer.data.denoising import DenoisingMaker, T5Batch, sample_lengths
from trainer.data.spans import Lengths
from trainer.data.vocabulary import Vocabulary, read_vocabulary
from trainer.distributed import Place
from trainer.loop.resets import resets_of

Maker = BatchMaker | DenoisingMaker
MicroBatch = Batch | T5Batch


def vocabulary_of(settings: Settings) -> Vocabulary:
    """Return the tokenizer's tokens, and a T5's sentinels after them.

    Raises
    ------
    UserError
        If a file is missing or malformed.
    """
    found = read_vocabulary(settings.data.tokenizer, settings.data.kind == "mock")
    return found.with_sentinels(settings.denoising.sentinels) if settings.denoising else found


def window_length(settings: Settings) -> int:
    """Return the stride of the data's windows, in tokens; each has one more.

    Raises
    ------
    UserError
        If a T5's sample does not fit its encoder and decoder.
    """
    lengths = _lengths(settings)
    return lengths.raw if lengths else settings.seq_length


def make_maker(settings: Settings, place: Place, vocabulary: Vocabulary) -> Maker:
    """Return what turns windows into micro batches, in the memory of the CPU."""
    device, lengths = torch.device("cpu"), _lengths(settings)
    if lengths:
        return DenoisingMaker(
            lengths,
            vocabulary,
            settings.architecture.seq_length,
            (settings.seed, settings.resume.data_generation),
            settings.micro_batch,
            device,
        )
    masked = vocabulary.end_of_text if settings.data.eod_mask_loss else None
    resets = resets_of(settings, place, vocabulary)
    return BatchMaker(vocabulary.size, masked, settings.micro_batch, device, resets)


def _lengths(settings: Settings) -> Lengths | None:
    if settings.denoising is None:
        return None
    return sample_lengths(settings.denoising, settings.seq_length, settings.architecture.seq_length)
