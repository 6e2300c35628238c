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

import math
from collections.abc import Sequence
from fractions import Fraction


class Interleaving:
    """A division of the samples ``0, 1, 2, ...`` among sources in proportion to their weights.

    Parameters
    ----------
    weights
        One for each source, each above 0; only their ratios count.
    """

    def __init__(self, weights: Sequence[Fraction | int]) -> None:
        if not weights or min(weights) <= 0:
            raise ValueError(f"weights {weights}: expected numbers above 0")
        scale = math.lcm(*(Fraction(weight).denominator for weight in weights))
        parts = [int(weight * scale) for weight in weights]
        self._sums = [0]
        for part in parts:
            self._sums.append(self._sums[-1] + part)

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
        return first, sample

    def _count_left(self, first: int, middle: int, last: int, samples: int) -> int:
        """Return ``round(samples * left / both)``, halves up."""
        left = self._sums[middle] - self._sums[first]
        both = self._sums[last] - self._sums[first]
        return (2 * samples * left + both) // (2 * both)
