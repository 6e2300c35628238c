"""Asking again and again in a thread, beside a display that must not wait for the answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

from launcher.schedulers.base import JobStatus, State
from launcher.tracking.launches import Launch
from launcher.tracking.polling import ask

T = TypeVar("T")


class Poller(Generic[T]):
    """The newest answer to a question. It is asked once at first, so that there is always one.

    Use it as a context: inside of it a thread asks.

    Parameters
    ----------
    pause
        How many seconds to wait after an answer; ``None`` to ask no more.
    """

    def __init__(self, ask: Callable[[], T], pause: Callable[[T], float | None]) -> None:
        self._ask = ask
        self._pause = pause
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._newest = ask()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        except BaseException as error:  # told to whoever watches: a thread's own traceback is lost
            self._failure = error


def backoff(interval: float, failures: int, most: float = 30.0) -> float:
    """Seconds to wait before asking again a scheduler that did not answer so many times in a row."""
    return min(interval * 2.0 ** min(failures, 10), max(most, interval))


# A busy controller serves thousands of users: never more often than this, in seconds.
INTERVAL = 2.0
# How long nobody may be able to tell a job's state before following it is given up.
PATIENCE = 60.0


class JobPoller:
    """The status of one job, asked for every `interval` seconds by a thread, slower while nobody can tell.

    Use it as a context. It is asked once before it is entered, so that there is always a status.
    """

    def __init__(self, launch: Launch, interval: float = INTERVAL, patience: float = PATIENCE) -> None:
        self._launch = launch
        self._interval = interval
        self._patience = patience
        self._failures = 0
        self._seen = time.monotonic()
        self._poller = Poller(self._ask, self._pause)
        self._seen = time.monotonic()

    def __enter__(self) -> Self:
        self._poller.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._poller.__exit__(kind, error, trace)

    @property
    def status(self) -> JobStatus:
        """The newest answer; UNKNOWN when it is too old to be believed."""
        status = self._poller.newest
        if self.is_blind and not (status.state.is_final or status.state is State.UNKNOWN):
            return JobStatus(
                State.UNKNOWN, f"no answer from the scheduler; the last was {status.state.value}"
            )
        return status

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to wait for: the job ended, or nobody can tell for too long."""
        return self.status.state.is_final or self.is_blind

    @property
    def is_blind(self) -> bool:
        """Whether the state has been unknown for longer than is worth waiting for."""
        return time.monotonic() - self._seen > self._patience

    def alive(self) -> None:
        """Note a sign of life of the job that the scheduler does not know of."""
        self._seen = time.monotonic()

    def _ask(self) -> JobStatus:
        status = ask([self._launch])[0]
        if status.state is State.UNKNOWN:
            self._failures += 1
        else:
            self._failures, self._seen = 0, time.monotonic()
        return status

    def _pause(self, status: JobStatus) -> float | None:
        if status.state.is_final:
            return None
        # Its first words of a job come late: two failures are nothing yet.
        return backoff(self._interval, max(self._failures - 2, 0), most=15.0)
