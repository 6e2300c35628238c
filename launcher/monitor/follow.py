"""Following a launch until its job ends: the loop, and what is said when it is over."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

from launcher.errors import one_line
from launcher.exit_codes import WATCHING_ENDED
from launcher.jobs.launches import Launch, open_launch
from launcher.monitor.events import Event
from launcher.monitor.log_files import newest_log, rank_failures
from launcher.monitor.logs import last_lines
from launcher.monitor.progress import Progress
from launcher.monitor.readers import open_reader
from launcher.monitor.watch import StatusWatch
from launcher.runs.paths import short
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State

_FAILURE_LINES = 20
# Of what was told between two looks, and before the first one: as many as a view can show.
_STEPS = 4096


class View(AbstractContextManager["View"], Protocol):
    """What shows a launch; a context, so that the terminal is put back in order."""

    # How often it wants to be told, in seconds.
    interval: float

    def __enter__(self) -> Self: ...

    def show(self, status: JobStatus, progress: Progress, new: list[Event]) -> None:
        """Show the newest; `new` are the events since the last time."""

    def end(self, status: JobStatus, progress: Progress) -> None:
        """Show the last of it, which stays on the screen."""


def follow(run_dir: Path, number: int | None = None) -> JobStatus:
    """Show a launch until its job has ended, live on a terminal and as lines anywhere else.

    Parameters
    ----------
    number
        The launch; by default the run's newest.

    Returns
    -------
    JobStatus
        How the job ended; UNKNOWN if nobody could tell for a minute.
    """
    launch = open_launch(run_dir, number)
    return follow_launch(launch, _view(launch))


def follow_launch(launch: Launch, view: View) -> JobStatus:
    """Feed a view until the job has ended."""
    reader, progress = open_reader(launch), Progress()
    with StatusWatch(launch) as watch, view:
        while True:
            # The state first: what a job wrote before it ended is there once it is known to have ended.
            over, status = watch.is_over, watch.status
            new = reader.newest(_STEPS)
            if new:
                watch.alive()
                progress.apply(new)
            if over and not new:
                view.end(status, progress)
                return status
            view.show(status, progress, new)
            time.sleep(view.interval)


def _view(launch: Launch) -> View:
    if sys.stdout.isatty():
        from launcher.monitor.live import LiveView

        return LiveView(launch)
    from launcher.monitor.lines import LinesView

    return LinesView(launch)


def follow_and_tell(run_dir: Path, number: int | None = None) -> int:
    """Follow a launch and say how it ended; a failed job's last words go to stderr.

    Returns
    -------
    int
        What stands for how the job ended (`launcher.exit_codes`), or for Ctrl-C, which leaves the
        job alone.
    """
    launch = open_launch(run_dir, number)
    try:
        status = follow(run_dir, launch.paths.number)
    except KeyboardInterrupt:
        print(_interrupted(launch), file=sys.stderr)
        return WATCHING_ENDED
    if not status.state.is_good:
        print(f"\n{_told(launch, status)}", file=sys.stderr)
    return status.state.exit_code


def _interrupted(launch: Launch) -> str:
    run = short(launch.paths.run_dir)
    return (
        f"\nthe job {launch.job} goes on without being watched.\n"
        f"  follow it again:  {shlex.join(['slipway', 'follow', run])}\n"
        f"  cancel it:        {shlex.join(['slipway', 'cancel', run])}"
    )


def _told(launch: Launch, status: JobStatus) -> str:
    reason = f" ({status.full_reason})" if status.full_reason else ""
    first = one_line(
        f"The job {launch.job_in(status)} of {launch.manifest.run}: {status.state.value}{reason}"
    )
    if status.state in (State.NOT_SUBMITTED, State.INTERRUPTED) or not launch.manifest.job_id:
        return first
    return "\n".join([first, *_last_words(launch)])


def _last_words(launch: Launch) -> list[str]:
    # Slurm's own messages are in .out; where stderr is kept apart, the traceback is in .err.
    logs = [newest_log(launch, extension) for extension in ("err", "out")]
    logs = [log for log in logs if log.is_file() and log.stat().st_size]
    if not logs:
        return [f"It left no log: {short(launch.log())} is missing or empty"]
    lines = [f"The end of {short(logs[0])}:"]
    lines += [f"  {line}" for line in last_lines(logs[0], _FAILURE_LINES).splitlines()]
    lines.append(f"The whole log: {short(logs[0])}")
    failures = rank_failures(launch)
    if failures:
        first = failures[0]
        lines.append(f"Rank {first.rank} failed first: {one_line(first.error)}: {short(first.path)}")
    return lines
