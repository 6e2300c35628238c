"""Micro batches of a GPT: their tensors, and the masks that keep documents in one window apart.

The token that ends a document separates two documents (NeMo's ``reset_*`` keys).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from slipway.trainer.data.source import Source, Tokens, check_tokens, loss_mask, select_targets


@dataclass(frozen=True)
class Resets:
    """The options of a window with several documents: whether positions and attention start anew in each.

    With `variable_lengths` attention gets the documents' bounds in place of a mask.
    With `same_kernel` a mask is made even where it forbids nothing more than causal attention does. Without a
    mask a GPU computes with another kernel, which draws another number of random numbers for dropout: the
    data-parallel ranks' generators would no longer be equal.
    """

    end_of_text: int
    positions: bool
    attention: bool
    variable_lengths: bool = False
    same_kernel: bool = False


def document_numbers(tokens: Any, end_of_text: int) -> Any:
    """Return which of its window's documents each token belongs to, ``[micro batch, seq_length]``.

    The token that ends a document belongs to it.
    """
    ends = (tokens == end_of_text).to(torch.int64)
    return ends.cumsum(dim=1) - ends


def positions_in_documents(documents: Any) -> Any:
    """Return each token's distance from the first of its document, ``[micro batch, seq_length]``."""
    places = torch.arange(documents.size(1), device=documents.device).expand_as(documents)
    return places - torch.where(_is_first(documents), places, 0).cummax(dim=1).values


def document_bounds(documents: Any) -> Any:
    """Return where each document begins in the windows one after another, and their number of tokens, int32.

    The latter is repeated up to a power of two, as documents without tokens: layers are compiled for a size.
    """
    begins = _is_first(documents).flatten().nonzero().flatten()
    size = max(16, 1 << len(begins).bit_length())
    bounds = torch.full((size,), documents.numel(), dtype=torch.int32, device=documents.device)
    bounds[: len(begins)] = begins
    return bounds


def _is_first(documents: Any) -> Any:
    """Return whether a token is the first of its document in its window, ``[micro batch, seq_length]``."""
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return is_first


def forbidden_attention(documents: Any) -> Any:
    """Return True where attention is forbidden, ``[micro batch, 1, seq_length, seq_length]``, query by key.

    A token attends to its own document, up to itself.
    """
    length = documents.size(1)
    later = torch.ones(length, length, dtype=torch.bool, device=documents.device).triu(1)
    return ((documents[:, :, None] != documents[:, None, :]) | later)[:, None]


@dataclass(frozen=True)
class Batch:
    """A GPT's micro batch; tensors are ``[micro batch, seq_length]``, the mask is 1.0 where loss counts.

    `documents` are the numbers of the documents that attention keeps apart, or `bounds` their bounds,
    ``[documents + 1]``; None of both if it is causal alone.
    """

    tokens: Any
    labels: Any
    mask: Any
    positions: Any
    documents: Any = None
    bounds: Any = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of megatron-core's GPTModel. Without a mask its attention is causal.

        The mask is made here, on the device of the tensors: it is `seq_length` times as large as the numbers
        of the documents, and would take as long to copy.
        """
        return {
            "input_ids": self.tokens,
            "position_ids": self.positions,
            "attention_mask": self.bounds if self.documents is None else forbidden_attention(self.documents),
            "labels": self.labels,
        }

    def context_share(self, rank: int, ranks: int) -> Batch:
        """Return the part of the sequences that one context-parallel rank computes.

        They are cut into two chunks for each rank, and a rank has one from either end: so all have as much
        of the causal attention to do (megatron-core's ``get_batch_on_this_cp_rank``).
        """
        whole = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = {name: _cut(tensor, rank, ranks) for name, tensor in whole.items() if tensor is not None}
        return replace(self, **parts)


class GPTBatchBuilder:
    """A builder of a GPT's micro batches from windows of tokens.

    Parameters
    ----------
    vocabulary
        Number of tokens; a larger id in the data is an error.
    masked_token
        Id of the input token whose loss does not count, or None; see `loss_mask`.
    resets
        What starts anew with each document; None for nothing.
    """

    def __init__(
        self,
        vocabulary: int,
        masked_token: int | None,
        micro_batch: int,
        device: Any,
        resets: Resets | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._masked_token = masked_token
        self._micro_batch = micro_batch
        self._device = device
        self._resets = resets

    def batches(
        self, source: Source, windows: list[int | None], samples: Sequence[int] | None = None
    ) -> Iterator[Batch]:
        """Yield micro batches of the given windows; None is padding, whose loss does not count.

        The samples' numbers in the run are not used: a GPT gets a window as it is.
        """
        for start in range(0, len(windows), self._micro_batch):
            yield self._batch(source, windows[start : start + self._micro_batch])

    def targets(self, source: Source, window: int) -> Tokens:
        """Return the tokens of a window whose prediction counts."""
        return select_targets(source.window(window), self._masked_token)

    def _batch(self, source: Source, windows: list[int | None]) -> Batch:
        rows = [source.window(window or 0) for window in windows]
        masks = [
            loss_mask(row, self._masked_token) * (window is not None)
            for row, window in zip(rows, windows, strict=True)
        ]
        stacked = np.stack(rows)
        check_tokens(stacked, self._vocabulary)
        tokens = torch.from_numpy(stacked).to(self._device)
        mask = torch.from_numpy(np.stack(masks)).to(self._device)
        inputs = tokens[:, :-1].contiguous()
        return Batch(inputs, tokens[:, 1:].contiguous(), mask, *self._documents(inputs))

    def _documents(self, inputs: Any) -> tuple[Any, Any, Any]:
        """Return the positions, and the documents or their bounds if attention keeps them apart.

        Where each window is one document, causal attention is the same, and faster: the documents are None,
        unless `same_kernel` is set.
        """
        rows, length = inputs.shape
        # Each row has its own memory: an expanded tensor cannot be pinned.
        positions, resets = torch.arange(length, device=self._device).repeat(rows, 1), self._resets
        if resets is None:
            return positions, None, None
        documents = document_numbers(inputs, resets.end_of_text)
        if resets.positions:
            positions = positions_in_documents(documents)
        if not (resets.attention and (resets.same_kernel or bool(documents.any()))):
            return positions, None, None
        if resets.variable_lengths:
            return positions, None, document_bounds(documents)
        return positions, documents, None


def _cut(tensor: Any, rank: int, ranks: int) -> Any:
    chunks = tensor.chunk(2 * ranks, dim=1)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim=1)
