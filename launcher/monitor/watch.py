"""Watching the state of one job."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from launcher.jobs.launches import Launch
from launcher.jobs.status import poll
from launcher.monitor.poller import Poller, backoff
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State

# A busy controller serves thousands of users: never more often than this, in seconds.
INTERVAL = 2.0
# How long nobody may be able to tell a job's state before following it is given up.
PATIENCE = 60.0


class StatusWatch:
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
        status = poll([self._launch])[0].status
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
