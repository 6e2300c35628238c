"""What a launch's trainer tells, whichever trainer it is."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from launcher.monitor.ends import read_ends
from launcher.monitor.events import Event, EventReader
from launcher.monitor.log_files import newest_log
from launcher.tracking.launches import Launch


class Reader(Protocol):
    """Reads what was appended since it was last asked."""

    def poll(self) -> list[Event]:
        """Return the new events, oldest first."""


def open_reader(launch: Launch) -> Reader:
    """A reader of all events of a launch that became a job; their files need not exist yet."""
    log = _nemo_log(launch)
    if log is None:
        return EventReader(launch.metrics)
    from launcher.monitor.nemo import NemoReader, tokens_per_step

    return NemoReader(log, tokens_per_step(launch.paths.config))


def all_events(launch: Launch) -> list[Event]:
    """All events of a launch so far."""
    return open_reader(launch).poll()


def newest_events(launch: Launch, *, restarted: bool = False) -> list[Event]:
    """What `launcher.monitor.progress.Progress` needs to know how far a launch is, read quickly.

    Parameters
    ----------
    restarted
        Whether the job was requeued.
    """
    log = _nemo_log(launch)
    if log is None:
        return read_ends(launch.metrics, restarted=restarted)
    from launcher.monitor.nemo import read_nemo_end, tokens_per_step

    return read_nemo_end(log, tokens_per_step(launch.paths.config))


def _nemo_log(launch: Launch) -> Path | None:
    manifest = launch.manifest
    if manifest.engine != "nemo" or manifest.job_id is None:
        return None
    return newest_log(launch)
