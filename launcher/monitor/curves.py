"""The curves of a run: what all of its launches told, joined on the step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from launcher.monitor.events import End, Event, HeldOut, Start, Train, Validation


@dataclass(frozen=True, slots=True)
class Step:
    """A point of the training curve; tokens are those of one step."""

    step: int
    loss: float | None
    tokens_per_step: int | None
    tokens_per_second: float | None


@dataclass
class Curves:
    """The joined curves.

    A launch that goes on from a checkpoint repeats the steps after it: with its first own step, what an
    earlier launch told of that step and later ones is forgotten, as the model has forgotten it.

    Attributes
    ----------
    resumed
        The steps from which the trainer went on.
    seconds
        Time in which a trainer ran, over all launches.
    """

    train: dict[int, Step] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    start: Start | None = None
    first_step: int = 0
    held_out: HeldOut | None = None
    resumed: list[int] = field(default_factory=list)
    seconds: float = 0.0
    _until: float = 0.0
    _has_trained: bool = True

    def add(self, events: Iterable[Event]) -> None:
        """Take in the events of a launch, oldest launch first."""
        for event in events:
            match event:
                case HeldOut():
                    self.held_out = event
                case Start():
                    self._begin(event)
                case Train():
                    self._advance(event)
                case Validation():
                    self.validation[event.step] = event.loss
            if isinstance(event, Train | Validation | End):
                self.seconds += max(event.time - self._until, 0.0) if self._until else 0.0
                self._until = max(event.time, self._until)

    def _begin(self, start: Start) -> None:
        if self.start is None:
            self.first_step = start.step
        self.start, self._until, self._has_trained = start, start.time, False

    def _advance(self, train: Train) -> None:
        if not self._has_trained:
            self._rewind(train.step)
        # A batch that grows has fewer tokens at first than the start told.
        tokens = train.tokens or (self.start.tokens_per_step if self.start else None)
        self.train[train.step] = Step(train.step, train.loss, tokens, train.tokens_per_second)

    def _rewind(self, step: int) -> None:
        self._has_trained = True
        origin = self.start.step if self.start else 0
        self.train = {at: point for at, point in self.train.items() if at < step}
        self.validation = {at: loss for at, loss in self.validation.items() if at <= origin}
        self.resumed = [at for at in self.resumed if at < origin] + ([origin] if origin else [])

    @property
    def points(self) -> list[Step]:
        """The training curve in the order of its steps."""
        return [self.train[step] for step in sorted(self.train)]

    @property
    def validations(self) -> list[tuple[int, float]]:
        """The held-out curve in the order of its steps."""
        return sorted(self.validation.items())

    @property
    def entropy(self) -> float | None:
        """The entropy of the held-out tokens' unigrams, in nats per token."""
        return self.held_out.unigram_entropy if self.held_out else None

    @property
    def tokens(self) -> int | None:
        """Tokens seen, as far as the launches tell; a point stands for the steps since the one before."""
        return sum(tokens for tokens, _ in self._spans()) or None

    @property
    def tokens_per_second(self) -> float | None:
        """The mean throughput: tokens over the time that they took."""
        timed = [(tokens, speed) for tokens, speed in self._spans() if speed]
        seconds = sum(tokens / speed for tokens, speed in timed)
        return sum(tokens for tokens, _ in timed) / seconds if seconds else None

    def _spans(self) -> list[tuple[int, float]]:
        points = self.points
        before = [self.first_step, *(point.step for point in points)]
        return [
            ((point.step - previous) * (point.tokens_per_step or 0), point.tokens_per_second or 0.0)
            for previous, point in zip(before, points, strict=False)
        ]


def finite_points(points: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Leave out what cannot be drawn."""
    return [(step, loss) for step, loss in points if loss is not None and math.isfinite(loss)]


def smooth(values: Sequence[float], window: int | None = None) -> list[float]:
    """A centred moving mean over `window` values (by default a fortieth of them), narrower at the ends.

    At the steep beginning it narrows on both sides, so that the first losses are not pulled down; at the
    flat end only on the right, so that the last noise is smoothed too.
    """
    size = len(values)
    half = (window if window is not None else size // 40) // 2
    sums = list(itertools.accumulate(values, initial=0.0))
    means = []
    for index in range(size):
        left = min(half, index)
        low, high = index - left, min(index + left, size - 1) + 1
        means.append((sums[high] - sums[low]) / (high - low))
    return means
