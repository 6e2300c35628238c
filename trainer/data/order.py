"""Which samples make up a batch.

The order of samples is a pure function of the seed, the data generation and the number of samples consumed
before: it does not depend on how many processes train, nor on the micro batch size. A rank's share of a
global batch is one contiguous part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from trainer.data.interleave import Interleaving
from trainer.data.permutation import Permutation
from trainer.data.seeds import order_seed


class SampleOrder(Protocol):
    """From the number of a sample in the run to a window of the source."""

    def epoch(self, sample: int) -> int:
        """Return the epoch in which a sample lies, from 0."""

    def window(self, sample: int) -> int:
        """Return the window that is sample number `sample` of the run."""


class Order:
    """The windows of one source, shuffled anew in each epoch.

    Parameters
    ----------
    windows
        How many there are; None for no end of them, which are then taken one after the other.
    seed
        The run's.
    generation
        The data generation: another one is another order of the same windows.
    source
        The source's place in a blend.
    """

    def __init__(self, windows: int | None, seed: int, generation: int = 0, source: int = 0) -> None:
        self._windows = windows
        self._seed = order_seed(seed, generation, source)
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


class BlendedOrder:
    """The windows of several sources in the proportions of a blend; each source has its own epochs.

    A window's number counts through all sources, one after the other, as
    :class:`trainer.data.blended.BlendedSource` does.

    Parameters
    ----------
    interleaving
        Divides the samples among the sources.
    windows
        How many each source has.
    seed, generation
        As for :class:`Order`.
    """

    def __init__(
        self, interleaving: Interleaving, windows: Sequence[int], seed: int, generation: int = 0
    ) -> None:
        self._interleaving = interleaving
        self._orders = [Order(size, seed, generation, source) for source, size in enumerate(windows)]
        self._starts = [0, *itertools.accumulate(windows)]

    def epoch(self, sample: int) -> int:
        """Return how often as many samples as there are windows in all have been seen before this one."""
        return sample // self._starts[-1]

    def window(self, sample: int) -> int:
        """Return the window that is sample number `sample` of the run."""
        source, number = self._interleaving.place(sample)
        return self._starts[source] + self._orders[source].window(number)


def rank_share(first: int, count: int, rank: int, ranks: int) -> range:
    """Return the sample numbers of one data-parallel rank in the batch ``[first, first + count)``."""
    share = count // ranks
    return range(first + rank * share, first + (rank + 1) * share)
