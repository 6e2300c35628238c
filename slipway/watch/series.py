"""Series of a run's values with their usual size and spread, kept in bounded memory a step at a time."""

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Deque, List, Optional, Tuple

from slipway.watch.parameters import Spike, Throughput

# Values whose median is the usual one; their rests; the fewest that suffice; the last, not yet counted.
_LEVEL, _RESTS, _LEAST, _LAG = 64, 128, 24, 8
# Steps between two looks at the rests' spread, which changes slowly.
_SIGMA_EVERY = 8
# Values in a row that end a spike.
_CALM = 20
# Steps after which a new level is the usual one.
_SETTLED = 1000
# Values for a small plot.
_SHOWN = 40
_TINY = 1e-12
# The standard deviation of a normal distribution, in its median absolute deviations.
_SIGMA = 1.4826


class SortedWindow:
    """The last values in order of time and of size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: Deque[float] = deque()
        self._sorted: List[float] = []

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        """Add a finite value; the oldest leaves a full window."""
        if len(self.values) == self.size:
            del self._sorted[bisect_left(self._sorted, self.values.popleft())]
        self.values.append(value)
        insort(self._sorted, value)

    def clear(self) -> None:
        """Forget all values."""
        self.values.clear()
        self._sorted.clear()

    @property
    def median(self) -> float:
        return self._sorted[len(self._sorted) // 2]

    def find_largest(self, rank: int) -> float:
        """Return the largest value (rank 1), the second largest (2), ...; 0 if there are fewer."""
        return self._sorted[-rank] if len(self._sorted) >= rank else 0.0

    @property
    def deviation(self) -> float:
        """The median absolute deviation from the median.

        The half of the values that is nearest to the median stands together in their order: a binary search
        finds where it begins.
        """
        values, median = self._sorted, self.median
        half = len(values) // 2 + 1
        low, high = 0, len(values) - half
        while low < high:
            middle = (low + high) // 2
            if median - values[middle] > values[middle + half] - median:
                low = middle + 1
            else:
                high = middle
        return max(median - values[low], values[low + half - 1] - median)


class Spikes:
    """A series of positive values and its spikes: rises that are no chance.

    Logarithms are compared. A value's rest is its distance from the median of the values before it, its score
    the rest in sigmas of the rests before it. What of the scores exceeds `sigmas` adds up from step to step
    (Page's cumulative sum, Biometrika 41, 1954), limited so that `steps` values are needed: the spike
    begins where the sum reaches `enough`. It ends after twenty values in a row below `sigmas`, when the
    training begins again, or when the values have stayed on a new level for long, then the usual one.

    Attributes
    ----------
    since, since_step
        Time and step of the first value of the present spike; ``None`` without one.
    score, worst
        The largest score and the largest value of the present spike.
    last
        The last values, spikes included.
    """

    def __init__(self, parameters: Spike) -> None:
        self._parameters = parameters
        self._largest = parameters.sigmas + parameters.enough / parameters.steps
        self._level, self._rests = SortedWindow(_LEVEL), SortedWindow(_RESTS)
        # The last values and their rests, which may be a spike's first.
        self._newest: Deque[Tuple[float, float]] = deque()
        self.last: Deque[float] = deque(maxlen=_SHOWN)
        self.restart(forget=True)

    def restart(self, forget: bool) -> None:
        """End the present spike as the training begins again; `forget` another one's values."""
        if forget:
            self._level.clear()
            self._rests.clear()
            self.last.clear()
        self._newest.clear()
        self._sigma = self._sum = self.score = self.worst = 0.0
        self._calm = 0
        self._onset = (0.0, 0)
        self.since: Optional[float] = None
        self.since_step: Optional[int] = None

    @property
    def is_blind(self) -> bool:
        """Too few values are known to call one unusual."""
        return len(self._rests) < _LEAST

    @property
    def usual(self) -> float:
        """The median of the values before the present spike."""
        return math.exp(self._level.median)

    def take(self, time: float, step: int, value: float) -> None:
        """Take in the finite value of a step."""
        self.last.append(value)
        logarithm = math.log(max(value, _TINY))
        rest = logarithm - self._level.median if self._level else 0.0
        if not self.is_blind:
            self._judge(time, step, value, rest)
        if self.since is None:
            self._newest.append((logarithm, rest))
            if len(self._newest) > _LAG:
                logarithm, rest = self._newest.popleft()
                self._level.add(logarithm)
                self._rests.add(rest)
                self._sigma = 0.0 if step % _SIGMA_EVERY == 0 else self._sigma

    def _judge(self, time: float, step: int, value: float, rest: float) -> None:
        parameters = self._parameters
        self._sigma = self._sigma or max(_SIGMA * self._rests.deviation, parameters.least)
        score = rest / self._sigma
        excess = min(score, self._largest) - parameters.sigmas
        if self.since is None and self._sum <= 0:
            self._onset, self.score, self.worst = (time, step), 0.0, 0.0
        self.score, self.worst = max(self.score, score), max(self.worst, value)
        if self.since is None:
            self._sum = max(self._sum + excess, 0.0)
            if self._sum >= parameters.enough:
                self.since, self.since_step = self._onset
                self._newest.clear()
            return
        self._calm = self._calm + 1 if excess < 0 else 0
        if self._calm >= _CALM:
            self.restart(forget=False)
        elif step - (self.since_step or 0) > _SETTLED:
            self.restart(forget=True)


class Speeds:
    """The throughput of a training: the usual one, and the stretch in which it has fallen.

    Attributes
    ----------
    since
        Time since when the median of the last `steps` speeds is below a `part` of the usual one; it ends
        when half of the difference is made up.
    """

    def __init__(self, parameters: Throughput) -> None:
        self._part = parameters.part
        self._recent = SortedWindow(parameters.steps)
        self._base = SortedWindow(256)
        self._slow_since: Optional[float] = None
        self.since: Optional[float] = None

    def restart(self, forget: bool) -> None:
        """Begin the last speeds anew; forget the usual one if the training has another layout."""
        self._recent.clear()
        self.since = self._slow_since = None
        if forget:
            self._base.clear()

    @property
    def is_blind(self) -> bool:
        """Too few speeds are known to call one unusual."""
        return len(self._base) < _LEAST

    @property
    def usual(self) -> float:
        return self._base.median

    @property
    def present(self) -> float:
        return self._recent.median if self._recent else self.usual

    @property
    def last(self) -> List[float]:
        return list(self._recent.values)[-_SHOWN:]

    def take(self, time: float, speed: float) -> None:
        """Take in the speed of a step."""
        if len(self._recent) == self._recent.size and self.since is None:
            self._base.add(self._recent.values[0])
        self._recent.add(speed)
        if self.is_blind or len(self._recent) < self._recent.size:
            return
        is_slow = self.present < self._part * self.usual
        if speed < self._part * self.usual:
            self._slow_since = self._slow_since or time
        elif not is_slow:
            self._slow_since = None
        if self.since is None and is_slow:
            self.since = self._slow_since or time
        elif self.since is not None and self.present > (1 + self._part) / 2 * self.usual:
            self.since = None
