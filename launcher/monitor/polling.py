"""Polling in a thread, beside a display that must not wait for the answers; the polled status of one job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from launcher.jobs.launches import Launch
from launcher.jobs.status import poll
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State

T = TypeVar("T")


class Poller(Generic[T]):
    """The newest answer to a question, first asked at once, so that there is always one.

    Use it as a context: within it a thread asks again and again. `pause` returns the seconds to wait after an
    answer, ``None`` to stop asking.
    """

    def __init__(self, poll: Callable[[], T], pause: Callable[[T], float | None]) -> None:
        self._ask = poll
        self._pause = pause
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._newest = poll()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()

    @property
    def newest(self) -> T:
        """The newest answer; raises what the thread raised."""
        if self._failure:
            raise self._failure
        return self._newest

    def _run(self) -> None:
        try:
            while (seconds := self._pause(self._newest)) is not None and not self._stop.wait(seconds):
                self._newest = self._ask()
        except BaseException as error:  # raised again by `newest`: a thread's own traceback is lost
            self._failure = error


def backoff(interval: float, failures: int, most: float = 30.0) -> float:
    """Return the seconds to wait after so many consecutive failures of the scheduler to answer."""
    return min(interval * 2.0 ** min(failures, 10), max(most, interval))


class JobPoller(Poller[JobStatus]):
    """The status of one job, polled every `interval` seconds by a thread, less often while it is unknown.

    Use it as a context. The first status is known before it is entered. Following is given up after
    `patience` seconds without a known state. The interval is long, as a controller serves thousands of users.
    """

    def __init__(self, launch: Launch, interval: float = 2.0, patience: float = 60.0) -> None:
        self._launch = launch
        self._interval = interval
        self._patience = patience
        self._failures = 0
        self._seen = time.monotonic()
        super().__init__(self._ask_scheduler, self._next_pause)
        self._seen = time.monotonic()

    @property
    def status(self) -> JobStatus:
        """The newest answer; UNKNOWN if it is too old."""
        status = self.newest
        if self.is_blind and not (status.state.is_final or status.state is State.UNKNOWN):
            return JobStatus(
                State.UNKNOWN, f"no answer from the scheduler; the last was {status.state.value}"
            )
        return status

    @property
    def is_over(self) -> bool:
        """True if the job ended, or its state has been unknown for too long."""
        return self.status.state.is_final or self.is_blind

    @property
    def is_blind(self) -> bool:
        """True if the state has been unknown for too long."""
        return time.monotonic() - self._seen > self._patience

    def alive(self) -> None:
        """Record that the job is alive, as its output shows, though the scheduler does not answer."""
        self._seen = time.monotonic()

    def _ask_scheduler(self) -> JobStatus:
        status = poll([self._launch])[0]
        if status.state is State.UNKNOWN:
            self._failures += 1
        else:
            self._failures, self._seen = 0, time.monotonic()
        return status

    def _next_pause(self, status: JobStatus) -> float | None:
        if status.state.is_final:
            return None
        # A scheduler may know a new job only after a moment: the first two failures do not count.
        return backoff(self._interval, max(self._failures - 2, 0), most=15.0)
