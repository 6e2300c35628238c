"""The progress that the events of a training add up to, and its silence."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from launcher.ui.tables import NO_STEP
from slipway.common.files import read_text
from slipway.common.node.events import End, Event, HeldOut, Start, Train, Validation
from slipway.watch.pace import Pace, Schedule
from slipway.watch.parameters import NoStep

_NO_SCHEDULE = Schedule()
# The steps over which the throughput is taken: the first step of a training is slow, and single ones jitter.
_WINDOW = 20


class Progress:
    """The newest event of each kind from a trainer.

    `step` is the number of completed steps, or the one that the trainer started from; ``None`` before that.
    """

    def __init__(self, events: Iterable[Event] = (), schedule: Schedule = _NO_SCHEDULE) -> None:
        self.pace = Pace(schedule)
        self.step: int | None = None
        self.start: Start | None = None
        self.train: Train | None = None
        self.validation: Validation | None = None
        self.held_out: HeldOut | None = None
        self.end: End | None = None
        self._first: Train | None = None
        self._speeds: deque[float] = deque(maxlen=_WINDOW)
        self.apply(events)

    def apply(self, events: Iterable[Event]) -> None:
        """Take in further events."""
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Take in one further event."""
        self.pace.take(event)
        match event:
            case Train():
                self.train, self.step = event, event.step
                self._first = self._first or event
                if event.tokens_per_second is not None:
                    self._speeds.append(event.tokens_per_second)
            case Start():
                # A requeued job starts again in the same file: its rate is counted anew, from its
                # checkpoint's step.
                self.start, self.step = event, event.step
                self.train = self.end = self._first = None
                self._speeds.clear()
            case Validation():
                self.validation = event
            case HeldOut():
                self.held_out = event
            case End():
                # A trainer that logs every tenth step may end after another one.
                self.end, self.step = event, max(event.step, self.step or 0)

    @property
    def max_steps(self) -> int | None:
        return self.start.max_steps if self.start else None

    @property
    def loss(self) -> float | None:
        return self.train.loss if self.train else None

    @property
    def validation_loss(self) -> float | None:
        return self.validation.loss if self.validation else None

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the last steps."""
        return sorted(self._speeds)[len(self._speeds) // 2] if self._speeds else None

    @property
    def steps_per_second(self) -> float | None:
        """The rate since the trainer last started, without its first step, which includes the warm-up."""
        if not (self.train and self._first):
            return None
        steps, seconds = self.train.step - self._first.step, self.train.time - self._first.time
        return steps / seconds if steps > 0 and seconds > 0 else None

    @property
    def eta(self) -> float | None:
        """Seconds that the remaining steps will take; never negative, ``None`` if unknown."""
        if self.step is None or self.max_steps is None:
            return None
        if self.step >= self.max_steps:
            return 0.0
        return (self.max_steps - self.step) / self.steps_per_second if self.steps_per_second else None


class Silence(NamedTuple):
    """The seconds for which a running training has had no step, longer than is usual; `usual` is a step's."""

    seconds: float
    usual: float | None

    def __str__(self) -> str:
        from slipway.watch.detectors import say_duration  # late: it is rarely needed

        usual = f" (usual: {say_duration(self.usual)})" if self.usual is not None else ""
        return f"{NO_STEP} for {say_duration(self.seconds)}{usual}"


def find_silence(progress: Progress, elapsed: int | None, now: float) -> Silence | None:
    """Return the silence of a training whose job has run for `elapsed` seconds; ``None`` if none is unusual.

    First steps, validations and saves are long, and so are pauses as long as earlier ones.
    """
    due = progress.pace.find_due(NoStep(), None if elapsed is None else now - elapsed)
    return Silence(now - due[0], progress.pace.interval) if due and now - due[0] > due[1] else None


@cache  # a launch's configuration never changes
def read_schedule(config: Path) -> Schedule:
    """Return the steps at which a training pauses, searched for in the text of its job's configuration."""
    try:
        text = read_text(config)
    except (OSError, ValueError):
        return Schedule()
    keys = ("every_n_train_steps", "val_check_interval")
    found = (re.search(rf"^ +{key}: *([0-9]{{1,9}})$", text, re.MULTILINE) for key in keys)
    return Schedule(*(int(match[1]) if match else None for match in found))
