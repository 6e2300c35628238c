"""Documents that share a window, told apart by the token that ends each (NeMo's ``reset_*`` keys)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Resets:
    """What starts anew after the token that ends a document: the positions, and what attention sees.

    With `same_kernel` a mask is made even where it forbids nothing more than causal attention does. Without a
    mask a GPU computes with another kernel, which draws another number of random numbers for dropout: the
    data-parallel ranks' generators would no longer be equal.
    """

    end_of_text: int
    positions: bool
    attention: bool
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
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(is_first, places, 0).cummax(dim=1).values


def forbidden_attention(documents: Any, same_kernel: bool = False) -> Any:
    """Return True where attention is forbidden, ``[micro batch, 1, seq_length, seq_length]``, query by key.

    A token attends to its own document, up to itself. None where each window is one document: causal
    attention is the same then, and faster. Not with `same_kernel`; see :class:`Resets`.
    """
    if not (same_kernel or bool(documents.any())):
        return None
    length = documents.size(1)
    later = torch.ones(length, length, dtype=torch.bool, device=documents.device).triu(1)
    return ((documents[:, :, None] != documents[:, None, :]) | later)[:, None]
