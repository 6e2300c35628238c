"""The trend of a loss: falling, rising, or flat within its noise.

The training loss is of another batch at each step, so that single values mean little. The medians of the
first and the last tenth of the steps are compared: a spike moves no median. Their difference counts if it is
more than three times its standard error.

The noise of single values is estimated from the differences between neighbours, in which a slow trend drops
out: sigma² = mean((x[i+1] - x[i])²) / 2 (von Neumann et al. 1941, "The Mean Square Successive Difference"),
here with the median absolute difference in place of the mean square, which spikes would spoil (Rousseeuw and
Croux 1993, "Alternatives to the Median Absolute Deviation": times 1.4826 it estimates the sigma of normal
noise). The standard error of the median of k such values is 1.2533 sigma / √k.

The held-out loss is always of the same tokens: its last value is simply compared with its first.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

# With fewer steps a tenth of them is a single one.
FEWEST_STEPS = 20
_STANDARD_ERRORS = 3.0
_SIGMA_OF_MAD = 1.4826
_ERROR_OF_MEDIAN = 1.2533
# Of more values than `_SORTED` only those near the median are sorted, as a sample of `_SAMPLE` estimates it.
_SORTED, _SAMPLE = 100_000, 1000


class Trend(enum.Enum):
    """The direction of a curve."""

    FALLS = "falls"
    RISES = "rises"
    FLAT = "within its noise"


@dataclass(frozen=True, slots=True)
class LossTrend:
    """A trend, and the two medians that it follows from; `margin` is the least significant difference."""

    trend: Trend
    first: float
    last: float
    margin: float


def measure_trend(losses: Sequence[float]) -> LossTrend | None:
    """Return the trend of a curve of finite losses; ``None`` if they are too few."""
    count = len(losses) // 10
    if len(losses) < FEWEST_STEPS:
        return None
    first, last = median(losses[:count]), median(losses[-count:])
    differences = array("d", (abs(after - before) for before, after in itertools.pairwise(losses)))
    sigma = _SIGMA_OF_MAD * median(differences) / math.sqrt(2)
    margin = _STANDARD_ERRORS * _ERROR_OF_MEDIAN * sigma * math.sqrt(2 / count)
    return LossTrend(_trend(last - first, margin), first, last, margin)


def median(values: Sequence[float]) -> float:
    """Return the median of finite values without sorting all of many, which would copy all of them.

    A sample bounds the median (Floyd and Rivest 1975, "Expected time bounds for selection"); only the values
    between the bounds are sorted.
    """
    size = len(values)
    if size <= _SORTED:
        return statistics.median(values)
    sample = sorted(values[:: size // _SAMPLE])
    low, high = sample[len(sample) * 2 // 5], sample[len(sample) * 3 // 5]
    below = sum(1 for value in values if value < low)
    between = sorted(value for value in values if low <= value <= high)
    middle = (size - 1) // 2 - below, size // 2 - below
    if middle[0] < 0 or middle[1] >= len(between):
        return statistics.median(values)
    return between[middle[0]] if size % 2 else (between[middle[0]] + between[middle[1]]) / 2


def _trend(change: float, margin: float) -> Trend:
    if abs(change) <= margin:
        return Trend.FLAT
    return Trend.RISES if change > 0 else Trend.FALLS
