"""The readers of a launch's events, for every training engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from launcher.jobs.launches import Launch
from launcher.monitor.events import Event, EventReader, newest, read_head_and_tail
from launcher.monitor.logs import job_logs, newest_log
from launcher.monitor.nemo import NemoReader, read_nemo_end, tokens_per_step


class Reader(Protocol):
    """A reader of the events appended since the last call."""

    def stream(self) -> Iterator[Event]:
        """Yield the new events, oldest first."""

    def newest(self, steps: int) -> list[Event]:
        """Return the new events, with the first step after each start and the last `steps` steps only."""


def open_reader(launch: Launch) -> Reader:
    """Return a reader of all events of a launch that became a job; its files need not exist yet."""
    if not _has_events_in_log(launch):
        return EventReader(launch.metrics)
    return _LogsReader(launch)


def all_events(launch: Launch) -> Iterator[Event]:
    """Yield all events of a launch so far; those of a long one may not fit into memory."""
    return open_reader(launch).stream()


def newest_events(launch: Launch, *, restarted: bool = False) -> list[Event]:
    """Return the events that `launcher.monitor.progress.Progress` needs, read quickly.

    Parameters
    ----------
    restarted
        True if the trainer started more than once.
    """
    if not _has_events_in_log(launch):
        return read_head_and_tail(launch.metrics, restarted=restarted)
    tokens = tokens_per_step(launch.paths.config)
    # The log of a link that has just begun has no step yet.
    logs = reversed(job_logs(launch)) if launch.is_chain else [newest_log(launch)]
    return next((events for log in logs if (events := read_nemo_end(log, tokens))), [])


def _has_events_in_log(launch: Launch) -> bool:
    """Return True if the trainer is NeMo's, which writes its steps to the job's log."""
    return launch.manifest.engine == "nemo" and launch.manifest.job_id is not None


class _LogsReader:
    """A reader of NeMo's events from the log of a job, or from the logs of a chain's links in their order."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._tokens = tokens_per_step(launch.paths.config)
        self._readers: dict[Path, NemoReader] = {}

    def newest(self, steps: int) -> list[Event]:
        return newest(self.stream(), steps)

    def stream(self) -> Iterator[Event]:
        logs = job_logs(self._launch) if self._launch.is_chain else []
        for log in logs or [newest_log(self._launch)]:
            if log not in self._readers:
                self._readers[log] = NemoReader(log, self._tokens)
        for reader in self._readers.values():
            yield from reader.stream()
