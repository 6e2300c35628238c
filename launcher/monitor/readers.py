"""What a launch's trainer tells, whichever trainer it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from launcher.jobs.launches import Launch
from launcher.monitor.ends import read_ends
from launcher.monitor.events import Event, EventReader, newest
from launcher.monitor.log_files import job_logs, newest_log

if TYPE_CHECKING:
    from launcher.monitor.nemo import NemoReader


class Reader(Protocol):
    """Reads what was appended since it was last asked."""

    def stream(self) -> Iterator[Event]:
        """Yield the new events, oldest first."""

    def newest(self, steps: int) -> list[Event]:
        """Return the new events, but of the steps only the first of each start and the last `steps`."""


def open_reader(launch: Launch) -> Reader:
    """A reader of all events of a launch that became a job; their files need not exist yet."""
    if not _tells_in_log(launch):
        return EventReader(launch.metrics)
    return _LogsReader(launch)


def all_events(launch: Launch) -> Iterator[Event]:
    """Yield all events of a launch so far; of a long one they are too many to hold."""
    return open_reader(launch).stream()


def newest_events(launch: Launch, *, restarted: bool = False) -> list[Event]:
    """What `launcher.monitor.progress.Progress` needs to know how far a launch is, read quickly.

    Parameters
    ----------
    restarted
        Whether the trainer began more than once.
    """
    if not _tells_in_log(launch):
        return read_ends(launch.metrics, restarted=restarted)
    from launcher.monitor.nemo import read_nemo_end, tokens_per_step

    tokens = tokens_per_step(launch.paths.config)
    # A link that has just begun tells of no step yet.
    logs = reversed(job_logs(launch)) if launch.is_chain else [newest_log(launch)]
    return next((events for log in logs if (events := read_nemo_end(log, tokens))), [])


def _tells_in_log(launch: Launch) -> bool:
    """Whether the trainer is NeMo's, which tells of its steps in the job's log."""
    return launch.manifest.engine == "nemo" and launch.manifest.job_id is not None


class _LogsReader:
    """Reads NeMo's events of a job from its log, or of a chain from the logs of its links in their order."""

    def __init__(self, launch: Launch) -> None:
        from launcher.monitor.nemo import tokens_per_step

        self._launch = launch
        self._tokens = tokens_per_step(launch.paths.config)
        self._readers: dict[Path, NemoReader] = {}

    def newest(self, steps: int) -> list[Event]:
        return newest(self.stream(), steps)

    def stream(self) -> Iterator[Event]:
        from launcher.monitor.nemo import NemoReader

        logs = job_logs(self._launch) if self._launch.is_chain else []
        for log in logs or [newest_log(self._launch)]:
            if log not in self._readers:
                self._readers[log] = NemoReader(log, self._tokens)
        for reader in self._readers.values():
            yield from reader.stream()
