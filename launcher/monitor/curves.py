"""The curves of a run: the events of all of its launches, joined on the step."""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from slipway.common.node.events import Event, HeldOut, Start, Train, Validation

# About so many values of a window make a smoothed one; and the weight of a mean that moves is of so many.
_SAMPLES, _MEMORY = 100, 10


class Points:
    """Points by their steps, in columns: a million of them take eight megabytes a column."""

    def __init__(self, *types: str) -> None:
        self._steps = array("q")
        self._columns: list[array[Any]] = [array(kind) for kind in types]
        self._is_sorted, self._last = True, -1

    def __len__(self) -> int:
        return len(self.steps)

    def put(self, step: int, *values: float) -> None:
        """Add a point, in place of one of the same step."""
        if step > self._last:
            self._last = step
        else:
            self._is_sorted = False
        self._steps.append(step)
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def cut(self, step: int) -> None:
        """Forget the points of a step and of all later ones."""
        at = bisect_left(self.steps, step)
        for column in (self._steps, *self._columns):
            del column[at:]
        self._last = self._steps[-1] if at else -1

    @property
    def steps(self) -> array[int]:
        self._sort()
        return self._steps

    @property
    def columns(self) -> list[array[Any]]:
        self._sort()
        return self._columns

    def _sort(self) -> None:
        """Sort the points by their steps; of several points of one step the last one counts."""
        if self._is_sorted:
            return
        newest = {step: index for index, step in enumerate(self._steps)}
        order = [newest[step] for step in sorted(newest)]
        self._columns = [array(column.typecode, map(column.__getitem__, order)) for column in self._columns]
        self._steps = array("q", map(self._steps.__getitem__, order))
        self._is_sorted = True


@dataclass
class Curves:
    """The joined curves.

    A launch that resumes from a checkpoint repeats the steps after it: its first own step removes the points
    of that step and later ones of earlier launches, as the model has forgotten them. `resumed` are the steps
    from which the trainer resumed; `starts` are all steps from which one began to train,
    each with the time.
    """

    # Columns of the loss, of its absence, of the tokens of a step and of the rate; 0 is unknown.
    train: Points = field(default_factory=lambda: Points("d", "b", "q", "d"))
    validation: Points = field(default_factory=lambda: Points("d"))
    start: Start | None = None
    first_step: int = 0
    held_out: HeldOut | None = None
    resumed: list[int] = field(default_factory=list)
    starts: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    _until: float = 0.0
    _has_trained: bool = True

    def add(self, events: Iterable[Event]) -> None:
        """Take in the events of a launch, oldest launch first."""
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Take in the next event of a launch."""
        match event:
            case Train():
                if not self._has_trained:
                    self._rewind(event.step)
                # With a batch size ramp-up the first steps have fewer tokens than the start event says.
                tokens = event.tokens or (self.start.tokens_per_step if self.start else None) or 0
                loss = math.nan if event.loss is None else event.loss
                speed = event.tokens_per_second or 0.0
                self.train.put(event.step, loss, event.loss is None, tokens, speed)
            case Validation():
                self.validation.put(event.step, event.loss)
            case HeldOut():
                self.held_out = event
                return
            case Start():
                if self.start is None:
                    self.first_step = event.step
                self.start, self._until, self._has_trained = event, event.time, False
                return
        if event.time > self._until:
            self.seconds += event.time - self._until if self._until else 0.0
            self._until = event.time

    def _rewind(self, step: int) -> None:
        self._has_trained = True
        origin = self.start.step if self.start else 0
        self.starts.append((origin, self.start.time if self.start else 0.0))
        self.train.cut(step)
        self.validation.cut(origin + 1)
        del self.resumed[bisect_left(self.resumed, origin) :]
        if origin:
            self.resumed.append(origin)

    @property
    def steps(self) -> Sequence[int]:
        """The steps of the training curve in their order."""
        return self.train.steps

    @property
    def losses(self) -> Sequence[float]:
        """The losses of these steps; an unknown one is NaN."""
        return self.train.columns[0]

    def loss(self, index: int) -> float | None:
        """Return the loss of one point of the training curve; -1 is the last one."""
        losses, is_missing = self.train.columns[:2]
        return None if is_missing[index] else float(losses[index])

    @cached_property
    def spikes(self) -> list[tuple[int, float]]:
        """The spikes of the training loss, of curves that take in no further event."""
        steps, losses = keep_finite(self.steps, self.losses)
        return [(steps[index], losses[index]) for index in find_spikes(losses)]

    @property
    def validations(self) -> Sequence[tuple[int, float]]:
        """The held-out curve in the order of its steps."""
        return list(zip(self.validation.steps, self.validation.columns[0], strict=True))

    @property
    def entropy(self) -> float | None:
        """The entropy of the held-out tokens' unigrams, in nats per token."""
        return self.held_out.unigram_entropy if self.held_out else None

    @property
    def tokens(self) -> int | None:
        """Tokens seen, as far as known; a point counts for the steps since the previous one."""
        return sum(tokens for tokens, _ in self._spans()) or None

    @property
    def tokens_per_second(self) -> float | None:
        """The mean throughput: tokens divided by the time that they took."""
        tokens, seconds = 0, 0.0
        for some, speed in self._spans():
            if speed:
                tokens += some
                seconds += some / speed
        return tokens / seconds if seconds else None

    def _spans(self) -> Iterator[tuple[int, float]]:
        _, _, tokens, speeds = self.train.columns
        befores = itertools.chain([self.first_step], self.steps)
        for before, step, each, speed in zip(befores, self.steps, tokens, speeds, strict=False):
            yield (step - before) * int(each), speed


def keep_finite(steps: Sequence[int], losses: Sequence[float]) -> tuple[Sequence[int], Sequence[float]]:
    """Return the points whose loss is finite."""
    if all(map(math.isfinite, losses)):
        return steps, losses
    finite = bytes(map(math.isfinite, losses))
    return array("q", itertools.compress(steps, finite)), array("d", itertools.compress(losses, finite))


def smooth(
    values: Sequence[float], window: int | None = None, at: Sequence[int] | None = None
) -> list[float]:
    """Return a centred moving mean over `window` values, by default a fortieth; `at` some indices, or all.

    The mean is of the middle half of the values, so that a spike does not become a plateau; of a wide window
    it takes evenly spaced values. At the steep beginning the window narrows on both sides, so that the first
    losses are not pulled down; at the flat end only on the right, so that the last noise is smoothed too.
    """
    size = len(values)
    half = (window if window is not None else size // 40) // 2
    means = []
    for index in range(size) if at is None else at:
        left = min(half, index)
        low, high = index - left, min(index + left, size - 1) + 1
        part = sorted(values[low : high : (high - low) // _SAMPLES + 1])
        outer = (len(part) + 1) // 4
        means.append(fmean(part[outer : len(part) - outer]))
    return means


def find_spikes(values: Sequence[float]) -> list[int]:
    """Return the indices of spikes: peaks far above the value before and a moving mean.

    Far is a tenth of the mean, and eight times the mean distance between neighbours. For both means a value
    further above counts as one that is so far above. Between two spikes are at least `_MEMORY` values.
    """
    peaks, last = list[int](), -_MEMORY - 1
    mean = before = values[0] if values else 0.0
    distance = abs(mean) / 50
    for index, value in enumerate(values):
        limit = min(mean, before) + max(8 * distance, abs(mean) / 10)
        if value > limit:
            if index - last > _MEMORY:
                peaks.append(index)
            elif value > values[peaks[-1]]:
                peaks[-1] = index
            last, value = index, limit
        distance += (abs(value - before) - distance) / _MEMORY
        mean += (value - mean) / _MEMORY
        before = value
    return peaks


def choose_evenly(size: int, most: int) -> Sequence[int]:
    """Return at most `most` indices, evenly spaced, with the first and the last."""
    if size <= most:
        return range(size)
    return [round(index * (size - 1) / (most - 1)) for index in range(most)]
