"""The pace of a training: how long its steps and pauses usually take, and when the next is overdue."""

from typing import NamedTuple, Optional

from slipway.common.node.events import End, Event, Start, Train, Validation
from slipway.watch.parameters import NoStep
from slipway.watch.series import SortedWindow

_STEPS, _PAUSES = 64, 16
# The fewest intervals that have a usual one.
_FEWEST = 4
# An interval of so many usual ones had a pause in it: a validation, a save, an evaluation.
_PAUSE = 3


class Schedule(NamedTuple):
    """The steps at which a training pauses, by its configuration; ``None`` where that is not known.

    Attributes
    ----------
    save_every, validate_every
        Steps between two checkpoints, and between two validations.
    """

    save_every: Optional[int] = None
    validate_every: Optional[int] = None


class Pace:
    """The times of a training's steps, taken from its events one by one.

    Attributes
    ----------
    start
        The newest start.
    train
        The newest step since then.
    last_sign
        Time of the newest event of any kind.
    has_ended
        The training has ended by itself since the start.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.start: Optional[Start] = None
        self.train: Optional[Train] = None
        self.last_sign: Optional[float] = None
        self.has_ended = False
        self._first: Optional[Train] = None
        self._intervals = SortedWindow(_STEPS)
        self._pauses = SortedWindow(_PAUSES)

    def take(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, Train):
            self._take_step(event)
        elif isinstance(event, Start):
            self.start, self.train, self._first, self.has_ended = event, None, None, False
        elif isinstance(event, End):
            self.has_ended = True
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
    def steps_per_second(self) -> Optional[float]:
        """The rate since the start, pauses included, without the first two steps."""
        if not (self._first and self.train):
            return None
        steps, seconds = self.train.step - self._first.step, self.train.time - self._first.time
        return steps / seconds if steps > 0 and seconds > 0 else None

    def find_limit(self, parameters: NoStep) -> Optional[float]:
        """Return the seconds after the last sign at which the next is overdue; ``None`` if none is expected.

        A pause as long as two of the last ones is usual, so that a single hang that went by is not.
        """
        if self.has_ended or (self.start is None and self.train is None):
            return None
        if self.train is None or self.interval is None:
            return parameters.first
        limit = max(parameters.factor * self.interval, parameters.least, 2 * self._pauses.find_largest(2))
        return max(limit, parameters.pause) if self._is_pause_due(self.train.step) else limit

    def _is_pause_due(self, step: int) -> bool:
        return any(every and step % every == 0 for every in self.schedule)
