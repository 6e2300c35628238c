"""Asking a scheduler again and again, beside a display that must not wait for the answer."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from launcher.monitor.launches import Launch, ask
from launcher.schedulers.base import JobStatus, State

# A busy controller serves thousands of users: never more often than this, in seconds.
INTERVAL = 2.0
# How long nobody may be able to tell a job's state before following it is given up.
PATIENCE = 60.0


class StatusWatch:
    """The status of one job, asked for every `interval` seconds by a thread.

    Use it as a context. It is asked once before it is entered, so that there is always a status.
    """

    def __init__(self, launch: Launch, interval: float = INTERVAL, patience: float = PATIENCE) -> None:
        self._launch = launch
        self._interval = interval
        self._patience = patience
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="status-watch", daemon=True)
        self._status = ask([launch])[0]
        self._seen = time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()

    @property
    def status(self) -> JobStatus:
        """The newest answer; UNKNOWN when it is too old to be believed."""
        if self._failure:
            raise self._failure
        state = self._status.state
        if self.is_blind and not (state.is_final or state is State.UNKNOWN):
            return JobStatus(State.UNKNOWN, f"no answer from the scheduler; the last was {state.value}")
        return self._status

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

    def _run(self) -> None:
        try:
            while not self._status.state.is_final and not self._stop.wait(self._interval):
                self._status = ask([self._launch])[0]
                if self._status.state is not State.UNKNOWN:
                    self._seen = time.monotonic()
        except BaseException as error:  # told to whoever watches: a thread's own traceback is lost
            self._failure = error
