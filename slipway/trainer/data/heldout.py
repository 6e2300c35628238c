"""The held-out tokens: which windows validation evaluates, and how predictable they are without context."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from slipway.trainer.data.order import Permutation
from slipway.trainer.data.seeds import order_seed
from slipway.trainer.data.source import BlendedSource, Source, Tokens

# Training epochs take the permutations 0, 1, 2, ... of the seed.
_STREAM = 1 << 63


def heldout_windows(
    source: Source, batches: int, global_batch: int, multiple: int, seed: int
) -> list[list[int | None]]:
    """Return the windows of each validation batch: always the first ones of one seeded order.

    In file order they would all be of the first few documents.

    Parameters
    ----------
    source
        The held-out data. Each source of a blend has its share of the windows, and one window at least.
    batches
        Global batches to evaluate at most (``trainer.limit_val_batches``).
    multiple
        A batch is filled up with None to a multiple of this, micro batch times data-parallel size, times
        pipeline stages with virtual ones: the number of processes does not change the windows.
    """
    chosen = _choose(source, batches * global_batch, seed)
    result: list[list[int | None]] = []
    for start in range(0, len(chosen), global_batch):
        batch: list[int | None] = list(chosen[start : start + global_batch])
        result.append(batch + [None] * (-len(batch) % multiple))
    return result


def _choose(source: Source, count: int, seed: int) -> Sequence[int]:
    if isinstance(source, BlendedSource):
        return _choose_from_blend(source, count, seed)
    if source.windows is None:
        return range(count)
    return _shuffle(source.windows, min(count, source.windows), seed)


def _shuffle(windows: int, count: int, seed: int) -> list[int]:
    """Return the first windows of a seeded order, from the start again after the last."""
    permutation = Permutation(windows, seed, _STREAM)
    return [permutation[index % windows] for index in range(count)]


def _choose_from_blend(blend: BlendedSource, count: int, seed: int) -> list[int]:
    """Return the windows of a blend: sources alternate as in training until each has been seen whole."""
    places: list[int] = []
    sources = blend.interleaving.sources
    left, unseen = list(blend.sizes), len(sources)
    while unseen and len(places) < count:
        source = blend.interleaving.place(len(places))[0]
        places.append(source)
        left[source] -= 1
        unseen -= left[source] == 0
    _represent_all(places, sources)
    orders = [
        iter(_shuffle(size, places.count(source), order_seed(seed, 0, source)))
        for source, size in enumerate(blend.sizes)
    ]
    return [blend.number(source, next(orders[source])) for source in places]


def _represent_all(places: list[int], sources: Sequence[int]) -> None:
    """Give a source whose share is less than one sample the last one of the source that has the most."""
    for source in sources:
        if source in places:
            continue
        largest = max(sources, key=places.count)
        if places.count(largest) < 2:
            return
        last = max(index for index, place in enumerate(places) if place == largest)
        places[last] = source


def unigram_entropy(
    targets: Callable[[int], Tokens], batches: list[list[int | None]], vocabulary: int
) -> tuple[int, float]:
    """Return the number of evaluated target tokens, and the entropy of their distribution.

    No model without context can have a lower loss on these tokens: it is the best constant prediction, chosen
    with hindsight. In nats per token, ``-sum p log p``.

    Parameters
    ----------
    targets
        Gives the tokens of a window whose prediction counts.
    batches
        The windows; None is nothing.
    """
    counts = np.zeros(vocabulary, dtype=np.int64)
    for window in (window for batch in batches for window in batch if window is not None):
        counts += np.bincount(targets(window), minlength=vocabulary)[:vocabulary]
    return entropy(counts)


def entropy(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[int, float]:
    """Return the total of the counts and the entropy of their distribution in nats."""
    total = int(counts.sum())
    if total == 0:
        return 0, math.nan
    p = counts[counts > 0] / total
    return total, max(0.0, float(-(p * np.log(p)).sum()))
