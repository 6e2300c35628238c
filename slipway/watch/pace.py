"""The pace of a training: how long its steps and pauses usually take, and when the next is overdue."""

from typing import NamedTuple, Optional, Tuple

from slipway.common.node.events import End, Event, Start, Train, Validation
from slipway.watch.parameters import NoStep
from slipway.watch.series import SortedWindow

_STEPS, _PAUSES = 64, 16
# The fewest intervals that have a usual one.
_FEWEST = 4
# An interval of so many usual ones had a pause in it: a validation, a save, an evaluation.
_PAUSE = 3


class Schedule(NamedTuple):
    """The steps between two checkpoints, and between two validations; ``None`` where that is not known."""

    save_every: Optional[int] = None
    validate_every: Optional[int] = None


class Pace:
    """The times of a training's steps, taken from its events one by one.

    Attributes
    ----------
    start, train, end
        The newest start, the newest step since then, and the trainer's own word for its end.
    last_sign
        Time of the newest event of any kind.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.start: Optional[Start] = None
        self.train: Optional[Train] = None
        self.end: Optional[End] = None
        self.last_sign: Optional[float] = None
        self._first: Optional[Train] = None
        self._intervals = SortedWindow(_STEPS)
        self._pauses = SortedWindow(_PAUSES)

    def take(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, Train):
            self._take_step(event)
        elif isinstance(event, Start):
            self.start, self.train, self._first, self.end = event, None, None, None
        elif isinstance(event, End):
            self.end = event
        elif not isinstance(event, Validation):
            return
        self.last_sign = event.time

    def _take_step(self, event: Train) -> None:
        before, self.train = self.train, event
        if before is None:
            return  # the first step's time has compilation and loading in it
        self._first = self._first or event
        interval = event.time - before.time
        if self._intervals and interval > _PAUSE * self._intervals.median:
            self._pauses.add(interval)
        if interval >= 0:
            self._intervals.add(interval)

    @property
    def interval(self) -> Optional[float]:
        """The usual seconds between two steps' events; ``None`` while few are known."""
        return self._intervals.median if len(self._intervals) >= _FEWEST else None

    @property
    def step(self) -> Optional[int]:
        """The newest step, else the one that the training started from."""
        newest = self.end or self.train or self.start
        return newest.step if newest else None

    @property
    def remaining(self) -> Optional[float]:
        """Seconds that the steps left will take, pauses included; ``None`` if unknown."""
        first, train, last = self._first, self.train, self.start and self.start.max_steps
        if last is not None and self.step is not None and self.step >= last:
            return 0.0
        if last is None or not (first and train) or self.interval is None or train.step <= first.step:
            return None
        return (last - train.step) * (train.time - first.time) / (train.step - first.step)

    def find_limit(self, parameters: NoStep) -> Optional[float]:
        """Return the seconds after the last sign at which the next is overdue; ``None`` if none is expected.

        A pause as long as two of the last ones is usual, so that a single hang that went by is not.
        """
        if self.end is not None or (self.start is None and self.train is None):
            return None
        if self.train is None or self.interval is None:
            return parameters.first
        limit = max(parameters.factor * self.interval, parameters.least, 2 * self._pauses.find_largest(2))
        is_pause_due = any(every and self.train.step % every == 0 for every in self.schedule)
        return max(limit, parameters.pause) if is_pause_due else limit

    def find_due(self, parameters: NoStep, began: Optional[float]) -> Optional[Tuple[float, float]]:
        """Return the time of the last sign and the seconds after it at which the next is overdue, if one is.

        If the job `began` after the newest event, of the link before, its beginning is the last sign.
        """
        if self.last_sign is None:
            return None
        if began is not None and self.last_sign < began:
            return began, parameters.first
        limit = self.find_limit(parameters)
        return None if limit is None else (self.last_sign, limit)
