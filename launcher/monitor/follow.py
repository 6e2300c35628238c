"""Following a launch until its job ends: the loop, and what is said when it is over."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

from launcher.monitor.events import Event, EventReader
from launcher.monitor.launches import Launch, open_launch
from launcher.monitor.logs import last_lines
from launcher.monitor.progress import Progress
from launcher.monitor.watch import StatusWatch
from launcher.runs.paths import short
from launcher.schedulers.base import JobStatus, State

INTERRUPTED = 130
_FAILURE_LINES = 20


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
    reader, progress = EventReader(launch.metrics), Progress()
    with StatusWatch(launch) as watch, view:
        while True:
            # The state first: what a job wrote before it ended is there once it is known to have ended.
            over, status = watch.is_over, watch.status
            new = reader.poll()
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
        0 if the job completed, 1 if not or if nobody can tell, 130 after Ctrl-C, which leaves the job
        alone.
    """
    launch = open_launch(run_dir, number)
    try:
        status = follow(run_dir, launch.paths.number)
    except KeyboardInterrupt:
        print(_interrupted(launch), file=sys.stderr)
        return INTERRUPTED
    if status.state.is_good:
        return 0
    print(f"\n{_failed(launch, status)}", file=sys.stderr)
    return 1


def _interrupted(launch: Launch) -> str:
    again = shlex.join(["slipway", "follow", short(launch.paths.run_dir)])
    lines = [f"\nThe job {launch.job} goes on without being watched.", f"  follow it again:  {again}"]
    if launch.manifest.scheduler == "slurm":
        conf = launch.manifest.slurm_conf
        environment = f"SLURM_CONF={shlex.quote(conf)} " if conf else ""
        lines.append(f"  cancel it:        {environment}scancel {launch.job}")
    else:
        lines.append(f"  cancel it:        kill {launch.job}")
    return "\n".join(lines)


def _failed(launch: Launch, status: JobStatus) -> str:
    reason = f" ({status.reason})" if status.reason else ""
    lines = [f"The job {launch.job} of {launch.manifest.run}: {status.state.value}{reason}"]
    if status.state is State.NOT_SUBMITTED or not launch.manifest.job_id:
        return lines[0]
    # Slurm's own messages are in .out; where stderr is kept apart, the traceback is in .err.
    logs = [log for log in (launch.log("err"), launch.log("out")) if log.exists() and log.stat().st_size]
    if not logs:
        return f"{lines[0]}\nIt left no log: {short(launch.log())} is missing or empty"
    lines.append(f"The end of {short(logs[0])}:")
    lines += [f"  {line}" for line in last_lines(logs[0], _FAILURE_LINES).splitlines()]
    return "\n".join([*lines, f"The whole log: {short(logs[0])}"])
