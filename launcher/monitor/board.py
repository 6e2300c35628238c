"""What is known of many runs while they are watched: the newest look, and how old it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from launcher.monitor.overview import StatusRow
from launcher.monitor.poller import Poller, backoff
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State

# A state that old is believed no longer, in questions that should have been answered.
_STALE_QUESTIONS = 3
_STALE_SECONDS = 20.0
# For how long nothing may be told of what has not ended before the watching is given up: by a scheduler that
# answers, and by one that does not (a controller that is restarted takes minutes), in seconds.
PATIENCE = 60.0
BLIND_PATIENCE = 600.0


@dataclass(frozen=True)
class Look:
    """The launches as they are known now.

    `silent` is for how many seconds no scheduler has answered, ``None`` while they answer, and `why` its
    words. `is_over` tells that there is nothing more to wait for.
    """

    rows: Sequence[StatusRow]
    silent: float | None
    why: str | None
    is_over: bool

    @property
    def states(self) -> list[State]:
        return [row.status.state for row in self.rows]


class Board:
    """Looks at runs every `interval` seconds, more seldom while the scheduler does not answer.

    Use it as a context. What was last known of a job stays, but its state is UNKNOWN: a board that cannot see
    does not look healthy.

    Parameters
    ----------
    survey
        Looks at the runs once.
    """

    def __init__(
        self,
        survey: Callable[[], Sequence[StatusRow]],
        interval: float,
        patience: float = PATIENCE,
        blind_patience: float = BLIND_PATIENCE,
    ) -> None:
        self._survey = survey
        self._interval = interval
        self._patience, self._blind_patience = patience, blind_patience
        self._failures = 0
        self._heard = self._told = time.monotonic()
        self._last: dict[Path, StatusRow] = {}
        self._poller = Poller(self._ask, lambda _: backoff(self._interval, self._failures))

    def __enter__(self) -> Self:
        self._poller.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._poller.__exit__(kind, error, trace)

    def look(self) -> Look:
        """What is known now."""
        newest = self._poller.newest
        now = time.monotonic()
        age = now - self._heard
        is_old = age > max(_STALE_QUESTIONS * self._interval, _STALE_SECONDS)
        rows = [self._as_known(row, is_old) for row in newest]
        why = next((row.unanswered for row in newest if row.unanswered), None)
        is_silent = is_old or why is not None
        waits = [row for row in rows if not row.status.state.is_final]
        given_up = age > self._blind_patience or (not is_silent and now - self._told > self._patience)
        return Look(rows, age if is_silent else None, why, not waits or given_up)

    def _ask(self) -> Sequence[StatusRow]:
        rows = self._survey()
        now = time.monotonic()
        if any(row.unanswered for row in rows):
            self._failures, self._told = self._failures + 1, now
        else:
            self._failures, self._heard = 0, now
        told = [row for row in rows if row.status.state is not State.UNKNOWN]
        self._last |= {_place(row): row for row in told}
        if any(row.status.state.is_live for row in told):
            self._told = now
        return rows

    def _as_known(self, row: StatusRow, is_old: bool) -> StatusRow:
        last = self._last.get(_place(row))
        unheard = row.unanswered is not None or is_old
        if row.status.state.is_final or not unheard or last is None:
            return row
        was = last.status
        silent = f"no answer; before that {was.state.value}"
        elapsed = was.elapsed if was.state is not State.PENDING else None
        known = JobStatus(State.UNKNOWN, silent, was.nodes, elapsed, restarts=was.restarts)
        return replace(row, status=known)


def _place(row: StatusRow) -> Path:
    return row.launch.paths.directory if row.launch else row.run_dir
