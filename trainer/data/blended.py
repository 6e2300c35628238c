"""Windows of several data sets in one row."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from fractions import Fraction

from trainer.data.indexed import IndexedSource
from trainer.data.interleave import Interleaving
from trainer.data.source import Tokens


class BlendedSource:
    """The windows of the first source, then those of the second, and so on.

    Parameters
    ----------
    sources
        One for each data set.
    weights
        How much of each is trained on; None for as much as each has windows, as in Megatron.
    """

    def __init__(self, sources: Sequence[IndexedSource], weights: Sequence[Fraction] | None) -> None:
        self.sources = sources
        self.sizes = [source.windows for source in sources]
        self.interleaving = Interleaving(self.sizes if weights is None else weights)
        self._starts = [0, *itertools.accumulate(self.sizes)]

    @property
    def windows(self) -> int:
        """How many windows there are in all."""
        return self._starts[-1]

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return sum(source.tokens for source in self.sources)

    @property
    def documents(self) -> int:
        """How many documents there are in all."""
        return sum(source.documents for source in self.sources)

    def window(self, index: int) -> Tokens:
        """Return window `index`."""
        if not 0 <= index < self.windows:
            raise IndexError(index)
        source = bisect.bisect_right(self._starts, index) - 1
        return self.sources[source].window(index - self._starts[source])

    def number(self, source: int, window: int) -> int:
        """Return the number here of a window of a source."""
        return self._starts[source] + window
