"""Interleaving of several weighted sources of samples.

The sources are the leaves of a balanced binary tree. Of the first ``k`` samples of a node whose left branch
has the fraction ``a/b`` of its weight, ``round(k a/b)`` go to the left and the rest to the right. So both
the branch of a sample and its number within that branch are arithmetic on whole numbers: any sample of a
run is found at once, without an index of all those before it, and no error builds up over a long run.

After any number of samples ``n`` a source with the weight ``w`` (of a sum of 1) has had ``w n`` of them to
within ``ceil(log2(sources)) / 2``: each level rounds by 1/2 at most, and the levels below only scale that
down. Megatron's ``build_blending_indices`` follows the weights as closely, but has to write down all
samples.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction


class Interleaving:
    """A division of the samples ``0, 1, 2, ...`` among sources in proportion to their weights.

    Parameters
    ----------
    weights
        One for each source; only their ratios count. A source with the weight 0 has no samples, and the
        others are divided as if it were not there.

    Attributes
    ----------
    sources
        The sources that have samples.
    """

    def __init__(self, weights: Sequence[Fraction | int]) -> None:
        self.sources = [source for source, weight in enumerate(weights) if weight > 0]
        if not self.sources or min(weights) < 0:
            raise ValueError(f"weights {weights}: expected numbers of at least 0, and one above")
        self._count = len(weights)
        scale = math.lcm(*(Fraction(weight).denominator for weight in weights))
        self._sums = [0, *itertools.accumulate(int(weights[source] * scale) for source in self.sources)]

    def place(self, sample: int) -> tuple[int, int]:
        """Return the source of a sample, and the sample's number among those of this source."""
        first, last = 0, len(self._sums) - 1
        while last - first > 1:
            middle = (first + last) // 2
            before = self._count_left(first, middle, last, sample)
            if self._count_left(first, middle, last, sample + 1) > before:
                last, sample = middle, before
            else:
                first, sample = middle, sample - before
        return self.sources[first], sample

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples are of each source."""
        counts = [0] * self._count
        branches = [(0, len(self.sources), samples)]
        while branches:
            first, last, samples = branches.pop()
            if last - first == 1:
                counts[self.sources[first]] = samples
                continue
            middle = (first + last) // 2
            left = self._count_left(first, middle, last, samples)
            branches += [(first, middle, left), (middle, last, samples - left)]
        return counts

    def _count_left(self, first: int, middle: int, last: int, samples: int) -> int:
        """Return ``round(samples * left / both)``, halves up."""
        left = self._sums[middle] - self._sums[first]
        both = self._sums[last] - self._sums[first]
        return (2 * samples * left + both) // (2 * both)


class Mixture:
    """Interleavings one after the other: each source goes on where the interleaving before left it.

    Parameters
    ----------
    first
        Divides the samples from 0 on.
    changes
        From which sample on the sources have other weights, in ascending order, and those weights.
    """

    def __init__(
        self, first: Interleaving, changes: Sequence[tuple[int, Sequence[Fraction | int]]] = ()
    ) -> None:
        self._starts, self._parts = [0], [first]
        # The samples that each source had before a part.
        self._before = [first.counts(0)]
        for start, weights in changes:
            self._before.append(self.counts(start))
            self._starts.append(start)
            self._parts.append(Interleaving(weights))

    def place(self, sample: int) -> tuple[int, int]:
        """Return the source of a sample, and the sample's number among those of this source."""
        part = bisect.bisect_right(self._starts, sample) - 1
        source, number = self._parts[part].place(sample - self._starts[part])
        return source, self._before[part][source] + number

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples are of each source."""
        part = bisect.bisect_right(self._starts, samples) - 1
        own = self._parts[part].counts(samples - self._starts[part])
        return [before + count for before, count in zip(self._before[part], own, strict=True)]
