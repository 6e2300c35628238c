"""The status of launches, polled in a thread so that a display need not wait for the answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Self, TypeVar

from launcher.jobs.asking import ASK_SECONDS, AskingTimes
from launcher.jobs.launches import Launch
from launcher.jobs.status import LaunchStatus, poll
from launcher.schedulers.base import JobStatus
from launcher.slurm.notations import format_time_limit, parse_time_limit
from launcher.slurm.states import State

S = TypeVar("S", bound=LaunchStatus)

# A state is out of date after this many unanswered questions, and at least this many seconds.
_STALE_QUESTIONS = 3
_STALE_SECONDS = 20.0
# Between two looks at files, which may take a part of the time.
_LOOK_SECONDS, _MOST_LOOKING = 1.0, 0.2


@dataclass(frozen=True)
class Snapshot(Generic[S]):
    """The newest known status of the launches.

    `silent` is the seconds since a scheduler last answered, ``None`` while it answers, and `why` its error.
    `is_over` is True if there is nothing more to wait for.
    """

    rows: Sequence[S]
    silent: float | None
    why: str | None
    is_over: bool

    @property
    def states(self) -> list[State]:
        return [row.state for row in self.rows]


class StatusPoller(Generic[S]):
    """The status of launches: their files are read each second, their scheduler is asked by `AskingTimes`.

    `collect` asks the scheduler, `refresh` renews what files tell. Use it as a context; the first answer is
    there before. Without an answer the last known facts of a job stay, but its state is UNKNOWN: a display
    that cannot see must not look healthy. Watching is given up after `patience` seconds without the state of
    any live job, and after `blind_patience` without an answer: a controller that is restarted takes minutes.
    """

    def __init__(
        self,
        collect: Callable[[], Sequence[S]],
        interval: float = ASK_SECONDS,
        patience: float = 60.0,
        blind_patience: float = 600.0,
        refresh: Callable[[Sequence[S]], Sequence[S]] = lambda rows: rows,
    ) -> None:
        self._collect, self._refresh = collect, refresh
        self._interval = interval
        self._patience, self._blind_patience = patience, blind_patience
        self._times = AskingTimes(interval)
        self._last: dict[Path, S] = {}
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._rows = self._collect_rows()
        self.mark_alive()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()

    def mark_alive(self) -> None:
        """Record that a job is alive, as its output shows, though the scheduler does not answer."""
        # The times of the last answer, and of the last answer about a live job.
        self._answered = self._seen_live = time.monotonic()

    def snapshot(self) -> Snapshot[S]:
        """Return the latest statuses; raise the thread's exception."""
        if self._failure:
            raise self._failure
        newest, now = self._rows, time.monotonic()
        since = now - self._times.asked
        age = now - self._answered
        is_old = age > max(_STALE_QUESTIONS * self._interval, _STALE_SECONDS)
        given_up = age > self._blind_patience
        rows = [self._keep_known_state(_add_time(row, since), is_old or given_up) for row in newest]
        why = next((row.unanswered for row in newest if row.unanswered), None)
        is_silent = is_old or why is not None
        # Between answers, because one may take longer.
        given_up |= not is_silent and self._answered - self._seen_live > self._patience
        is_over = given_up or all(row.state.is_final for row in rows)
        return Snapshot(rows, age if is_silent else None, why, is_over)

    def _run(self) -> None:
        try:
            pause = look = min(_LOOK_SECONDS, self._interval)
            while not self._stop.wait(pause):
                began = time.monotonic()
                if self._times.is_due():
                    self._rows = self._collect_rows()
                else:
                    self._rows = self._refresh(self._rows)
                    pause = max(look, (time.monotonic() - began) / _MOST_LOOKING)
        except BaseException as error:  # raised again by `snapshot`: a thread's own traceback is lost
            self._failure = error

    def _collect_rows(self) -> Sequence[S]:
        rows = self._collect()
        self._times.note_answer(rows)
        now = time.monotonic()
        if any(row.unanswered for row in rows):
            self._seen_live = now
        else:
            self._answered = now
        known = [row for row in rows if row.state is not State.UNKNOWN]
        self._last |= {row.directory: row for row in known}
        if any(row.state.is_live for row in known):
            self._seen_live = now
        return rows

    def _keep_known_state(self, row: S, is_old: bool) -> S:
        last = self._last.get(row.directory)
        is_unanswered = row.unanswered is not None or is_old
        if row.state.is_final or not is_unanswered or last is None:
            return row
        reason = f"no answer; before that {last.state.value}"
        elapsed = last.elapsed if last.state is not State.PENDING else None
        known = JobStatus(State.UNKNOWN, reason, last.nodes, elapsed, restarts=last.restarts)
        return replace(row, **known.values())


def _add_time(row: S, seconds: float) -> S:
    """Return the row of a running job with the time that passed since the scheduler was asked."""
    if row.state is not State.RUNNING or row.elapsed is None or seconds < 1:
        return row
    with contextlib.suppress(ValueError):
        return replace(row, elapsed=format_time_limit((parse_time_limit(row.elapsed) or 0) + int(seconds)))
    return row


def job_poller(
    launch: Launch, interval: float = ASK_SECONDS, patience: float = 60.0, blind_patience: float = 300.0
) -> StatusPoller[LaunchStatus]:
    """Return the polled status of one launch, which is given up after `patience` seconds without a state."""
    return StatusPoller(lambda: poll([launch]), interval, patience, blind_patience)
