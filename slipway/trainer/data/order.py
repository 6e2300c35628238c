"""The order of samples, and a rank's share of a batch.

The order of samples is a pure function of the seed, the data generation and the number of samples consumed
before: it does not depend on how many processes train, nor on the micro batch size. A rank's share of a
global batch is one contiguous part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from slipway.trainer.data.interleave import Interleaving, Mixture
from slipway.trainer.data.seeds import mix, order_seed


class Order:
    """The windows of one source, shuffled anew in each epoch.

    Parameters
    ----------
    windows
        How many there are; None for no end of them, which are then taken one after the other.
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

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples are of each source."""
        return [samples]

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
    :class:`slipway.trainer.data.source.BlendedSource` does.

    Parameters
    ----------
    mixture
        Divides the samples among the sources.
    windows
        How many each source has.
    seed, generation
        As for :class:`Order`.
    """

    def __init__(
        self, mixture: Interleaving | Mixture, windows: Sequence[int], seed: int, generation: int = 0
    ) -> None:
        self._mixture = mixture
        self._orders = [Order(size, seed, generation, source) for source, size in enumerate(windows)]
        self._starts = [0, *itertools.accumulate(windows)]

    def epoch(self, sample: int) -> int:
        """Return how often as many samples as there are windows in all have been seen before this one."""
        return sample // self._starts[-1]

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples are of each source."""
        return self._mixture.counts(samples)

    def window(self, sample: int) -> int:
        """Return the window that is sample number `sample` of the run."""
        source, number = self._mixture.place(sample)
        return self._starts[source] + self._orders[source].window(number)


# From the number of a sample in the run to a window of the source.
SampleOrder = Order | BlendedOrder


def rank_share(first: int, count: int, rank: int, ranks: int) -> range:
    """Return the sample numbers of one data-parallel rank in the batch ``[first, first + count)``."""
    share = count // ranks
    return range(first + rank * share, first + (rank + 1) * share)


_MASK = (1 << 64) - 1
_ROUNDS = 6


class Permutation:
    """A pseudo-random bijection of ``range(size)``.

    A balanced Feistel network over the next even number of bits, walked until it lands below `size` (cycle
    walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Each value costs at most a
    handful of rounds, so that any position of a run can be looked up at once.

    Parameters
    ----------
    seed, stream
        Two numbers that choose the permutation; a run uses its seed and the epoch.
    """

    def __init__(self, size: int, seed: int, stream: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} elements")
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        key = mix(mix(seed & _MASK) ^ (stream & _MASK))
        self._keys = [key := mix(key + number) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise IndexError(index)
        value = self._encrypt(index)
        while value >= self._size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half, value & self._low
        for key in self._keys:
            left, right = right, left ^ (mix(right ^ key) & self._low)
        return left << self._half | right
