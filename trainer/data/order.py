"""Which samples make up a batch.

The order of samples is a pure function of the seed and of the number of samples consumed before: it does not
depend on how many processes train, nor on the micro batch size. A rank's share of a global batch is one
contiguous part of it.
"""

from __future__ import annotations

from trainer.data.permutation import Permutation


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
