"""The tensors of a micro batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.data.source import Source, Tokens, loss_mask
from trainer.errors import UserError


@dataclass(frozen=True)
class Batch:
    """A micro batch; all tensors are ``[micro batch, seq_length]``, the mask is 1.0 where loss counts."""

    tokens: Any
    labels: Any
    mask: Any
    positions: Any


class BatchMaker:
    """Turns windows into the tensors of micro batches.

    Parameters
    ----------
    vocabulary
        Number of tokens; a larger id in the data is an error.
    masked_token
        Id of the input token whose loss does not count, or None; see `loss_mask`.
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

    def _batch(self, source: Source, windows: list[int | None]) -> Batch:
        rows = [source.window(window or 0) for window in windows]
        masks = [
            loss_mask(row, self._masked_token) * (window is not None)
            for row, window in zip(rows, windows, strict=True)
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
                f"{self._vocabulary - 1}: were they made with another tokenizer?",
                found_by="rank",
            )
