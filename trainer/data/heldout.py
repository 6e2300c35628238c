"""The held-out tokens: which windows validation evaluates, and how predictable they are without context."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trainer.data.permutation import Permutation
from trainer.data.source import Source, loss_mask

# Training epochs take the permutations 0, 1, 2, ... of the seed.
_STREAM = 1 << 63


def heldout_windows(
    windows: int | None, batches: int, global_batch: int, multiple: int, seed: int
) -> list[list[int | None]]:
    """Return the windows of each validation batch: always the first ones of one seeded order.

    In file order they would all be of the first few documents.

    Parameters
    ----------
    windows
        Windows in the validation split, or None for no end.
    batches
        Global batches to evaluate at most (``trainer.limit_val_batches``).
    global_batch
        Windows in a global batch.
    multiple
        A batch is filled up with None to a multiple of this, micro batch times data-parallel size: what is
        evaluated does not depend on the number of processes.
    seed
        The run's.
    """
    count = batches * global_batch
    order: Sequence[int] = range(count)
    if windows is not None:
        count = min(count, windows)
        permutation = Permutation(windows, seed, _STREAM)
        order = [permutation[index] for index in range(count)]
    result: list[list[int | None]] = []
    for start in range(0, count, global_batch):
        batch: list[int | None] = list(order[start : start + global_batch])
        result.append(batch + [None] * (-len(batch) % multiple))
    return result


def unigram_entropy(
    source: Source, batches: list[list[int | None]], masked_token: int | None, vocabulary: int
) -> tuple[int, float]:
    """Return the number of evaluated target tokens, and the entropy of their own distribution.

    No model without context can have a lower loss on these tokens: it is the best constant prediction, chosen
    with hindsight. In nats per token, ``-sum p log p``.
    """
    counts = np.zeros(vocabulary, dtype=np.int64)
    for window in (window for batch in batches for window in batch if window is not None):
        tokens = source.window(window)
        targets = tokens[1:][loss_mask(tokens, masked_token) > 0]
        counts += np.bincount(targets, minlength=vocabulary)[:vocabulary]
    return entropy(counts)


def entropy(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[int, float]:
    """Return the total of the counts and the entropy of their distribution in nats."""
    total = int(counts.sum())
    if total == 0:
        return 0, math.nan
    p = counts[counts > 0] / total
    return total, max(0.0, float(-(p * np.log(p)).sum()))
