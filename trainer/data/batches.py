"""Which samples make up a batch, and their tensors.

The order of samples is a pure function of the seed and of the number of samples consumed before: it does not
depend on how many processes train, nor on the micro batch size. A rank's share of a global batch is one
contiguous part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.permutation import Permutation
from trainer.data.source import Source, Tokens
from trainer.errors import UserError


@dataclass(frozen=True)
class Batch:
    """A micro batch; all tensors are ``[micro batch, seq_length]``, the mask is 1.0 where loss counts."""

    tokens: Any
    labels: Any
    mask: Any
    positions: Any


class Order:
    """From the number of a sample in the run to a window of the source, shuffled anew in each epoch."""

    def __init__(self, windows: int | None, seed: int) -> None:
        self._windows = windows
        self._seed = seed
        self._epoch = -1
        self._permutation = Permutation(1, seed, 0)

    def epoch(self, sample: int) -> int:
        """Return the epoch in which a sample lies, from 0."""
        return 0 if self._windows is None else sample // self._windows

    def window(self, sample: int) -> int:
        """Return the window that is sample number `sample` of the run."""
        if self._windows is None:
            return sample
        epoch, index = divmod(sample, self._windows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, Permutation(self._windows, self._seed, epoch)
        return self._permutation[index]


def rank_share(first: int, count: int, rank: int, ranks: int) -> range:
    """Return the sample numbers of one data-parallel rank in the batch ``[first, first + count)``."""
    share = count // ranks
    return range(first + rank * share, first + (rank + 1) * share)


class BatchMaker:
    """Turns windows into the tensors of micro batches.

    Parameters
    ----------
    vocabulary
        Number of tokens; a larger id in the data is an error.
    masked_token
        Id of the token whose loss does not count as input position (NeMo's ``eod_mask_loss``), or None.
    micro_batch
        Sequences in a micro batch.
    device
        Where the tensors go.
    """

    def __init__(self, vocabulary: int, masked_token: int | None, micro_batch: int, device: Any) -> None:
        self._vocabulary = vocabulary
        self._masked_token = masked_token
        self._micro_batch = micro_batch
        self._device = device

    def batches(self, source: Source, windows: list[int | None]) -> Iterator[Batch]:
        """Yield micro batches of the given windows; None stands for padding, whose loss does not count."""
        for start in range(0, len(windows), self._micro_batch):
            yield self._batch(source, windows[start : start + self._micro_batch])

    def loss_mask(self, window: Tokens) -> npt.NDArray[np.float32]:
        """Return, for each position of a window's inputs, whether its loss counts, ``[seq_length]``."""
        inputs = window[:-1]
        if self._masked_token is None:
            return np.ones(inputs.shape, dtype=np.float32)
        mask: npt.NDArray[np.float32] = (inputs != self._masked_token).astype(np.float32)
        return mask

    def _batch(self, source: Source, windows: list[int | None]) -> Batch:
        rows = [source.window(window or 0) for window in windows]
        masks = [
            self.loss_mask(row) * (window is not None) for row, window in zip(rows, windows, strict=True)
        ]
        stacked = np.stack(rows)
        self._check(stacked)
        tokens = torch.from_numpy(stacked).to(self._device)
        length = stacked.shape[1] - 1
        positions = torch.arange(length, device=self._device).expand(len(rows), length)
        mask = torch.from_numpy(np.stack(masks)).to(self._device)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, positions)

    def _check(self, tokens: Tokens) -> None:
        # Tensor-parallel embeddings would silently read a foreign token as zeros.
        highest = int(tokens.max())
        if highest >= self._vocabulary:
            raise UserError(
                f"the data hold token {highest}, but the vocabulary of model.tokenizer.vocab_file ends at "
                f"{self._vocabulary - 1}: were they made with another tokenizer?"
            )
