"""Micro batches of a T5: windows of text without some spans, and those spans as the targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipway.trainer.data.seeds import HELDOUT, sample_seed
from slipway.trainer.data.source import Source, Tokens, check_tokens
from slipway.trainer.data.spans import Lengths, corrupt
from slipway.trainer.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class T5Batch:
    """A T5's micro batch.

    Attributes
    ----------
    inputs
        The encoder's tokens, ``[micro batch, seq_length]``, without padding.
    decoder_inputs, labels
        The decoder's tokens and its targets, ``[micro batch, seq_length_dec]``: the former are the latter
        shifted by one.
    mask
        1.0 where the loss counts: on the labels that are not padding.
    """

    inputs: Any
    decoder_inputs: Any
    labels: Any
    mask: Any

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of megatron-core's T5Model.

        There are no masks: the encoder's input has no padding, the decoder is causal by itself, and its
        padding comes after all that counts.
        """
        return {
            "encoder_input_ids": self.inputs,
            "decoder_input_ids": self.decoder_inputs,
            "encoder_attn_mask": None,
            "decoder_attn_mask": None,
            "encoder_decoder_attn_mask": None,
            "lm_labels": self.labels,
        }


class T5BatchBuilder:
    """A builder of a T5's micro batches from windows of tokens.

    Parameters
    ----------
    vocabulary
        With sentinels; a token of the data that is one, or lies beyond, is an error.
    seq_length_dec
        Padded length of the decoder's tokens and targets.
    seeds
        The run's seed and data generation.
    """

    def __init__(
        self,
        lengths: Lengths,
        vocabulary: Vocabulary,
        seq_length_dec: int,
        seeds: tuple[int, int],
        micro_batch: int,
        device: Any,
    ) -> None:
        self._lengths, self._vocabulary = lengths, vocabulary
        self._width = seq_length_dec
        self._seed, self._generation = seeds
        self._micro_batch = micro_batch
        self._device = device

    def batches(
        self, source: Source, windows: Sequence[int | None], samples: Sequence[int] | None = None
    ) -> Iterator[T5Batch]:
        """Yield micro batches of the given windows; None is padding, whose loss does not count.

        Parameters
        ----------
        source
            Windows of at least `lengths.raw` tokens.
        samples
            The samples' numbers in the run, which decide the spans: other ones in each epoch. None for
            held-out windows, whose spans are always the same.
        """
        for start in range(0, len(windows), self._micro_batch):
            part = slice(start, start + self._micro_batch)
            yield self._batch(source, windows[part], None if samples is None else samples[part])

    def targets(self, source: Source, window: int) -> Tokens:
        """Return the tokens of a held-out window that the decoder is to write."""
        return self._corrupt(source, window, None)[1]

    def _batch(self, source: Source, windows: Sequence[int | None], samples: Sequence[int] | None) -> T5Batch:
        rows, words = len(windows), self._vocabulary
        inputs = np.empty((rows, self._lengths.inputs), dtype=np.int64)
        labels = np.full((rows, self._width), words.padding_or_end, dtype=np.int64)
        mask = np.zeros((rows, self._width), dtype=np.float32)
        for row, window in enumerate(windows):
            sample = None if samples is None else samples[row]
            inputs[row], labels[row, : self._lengths.targets] = self._corrupt(source, window or 0, sample)
            mask[row, : self._lengths.targets] = window is not None
        before = np.concatenate((np.full((rows, 1), words.start_or_end), labels[:, :-1]), axis=1)
        return T5Batch(
            *(torch.from_numpy(array).to(self._device) for array in (inputs, before, labels, mask))
        )

    def _corrupt(self, source: Source, window: int, sample: int | None) -> tuple[Tokens, Tokens]:
        tokens = source.window(window)[: self._lengths.raw]
        check_tokens(tokens, self._vocabulary.first_sentinel)
        generation, number = (HELDOUT, window) if sample is None else (self._generation, sample)
        return corrupt(tokens, self._lengths, self._vocabulary, sample_seed(self._seed, generation, number))
