"""Following a launch until its job ends: the loop, the view as plain lines, and the message at its end."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from launcher.errors import WATCHING_ENDED, one_line
from launcher.jobs.launches import Launch, open_launch
from launcher.monitor.events import End, Event, HeldOut, Progress, Start, Train, Validation
from launcher.monitor.logs import failed_task_logs, last_lines, newest_log, rank_failures
from launcher.monitor.polling import JobPoller
from launcher.monitor.readers import open_reader
from launcher.runs.paths import short
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from launcher.ui import tables

_FAILURE_LINES = 20
# The most steps read at once: as many as a view can show.
_STEPS = 4096


class View(AbstractContextManager["View"], Protocol):
    """A display of a launch; a context, so that the terminal is restored at its end."""

    # The seconds between two updates.
    interval: float

    def __enter__(self) -> Self: ...

    def show(self, status: JobStatus, progress: Progress, new: list[Event]) -> None:
        """Show the newest state; `new` are the events since the last call."""

    def end(self, status: JobStatus, progress: Progress) -> None:
        """Show the final state, which stays on the screen."""


def follow(run_dir: Path, number: int | None = None) -> JobStatus:
    """Show a launch until its job has ended, live on a terminal and as lines anywhere else.

    Returns
    -------
    JobStatus
        The final status of the job; UNKNOWN if it could not be determined for a minute.
    """
    launch = open_launch(run_dir, number)
    return follow_launch(launch, _view(launch))


def follow_launch(launch: Launch, view: View) -> JobStatus:
    """Update a view until the job has ended."""
    reader, progress = open_reader(launch), Progress()
    with JobPoller(launch) as watch, view:
        while True:
            # The state first: once the job is known to have ended, everything that it wrote is there.
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
    return LinesView(launch)


def follow_and_tell(run_dir: Path, number: int | None = None) -> int:
    """Follow a launch; after a failure, print the end of its log to stderr.

    Returns
    -------
    int
        The exit code of the job's end (`launcher.errors`), or that of Ctrl-C, which leaves the
        job alone.
    """
    launch = open_launch(run_dir, number)
    try:
        status = follow(run_dir, launch.paths.number)
    except KeyboardInterrupt:
        print(_interrupt_message(launch), file=sys.stderr)
        return WATCHING_ENDED
    if not status.state.is_good:
        print(f"\n{_failure_message(launch, status)}", file=sys.stderr)
    return status.state.exit_code


def _interrupt_message(launch: Launch) -> str:
    run = short(launch.paths.run_dir)
    return (
        f"\nstopped following; job {launch.job} continues.\n"
        f"  follow it again:  {shlex.join(['slipway', 'follow', run])}\n"
        f"  cancel it:        {shlex.join(['slipway', 'cancel', run])}"
    )


def _failure_message(launch: Launch, status: JobStatus) -> str:
    reason = f" ({status.full_reason})" if status.full_reason else ""
    first = one_line(f"Job {launch.job_in(status)} of {launch.manifest.run}: {status.state.value}{reason}")
    if status.state in (State.NOT_SUBMITTED, State.INTERRUPTED) or not launch.manifest.job_id:
        return first
    return "\n".join([first, *_end_of_log(launch, status)])


def _end_of_log(launch: Launch, status: JobStatus) -> list[str]:
    # Slurm's own messages are in .out; with a separate stderr, the traceback is in .err.
    logs = [newest_log(launch, extension) for extension in ("err", "out")]
    logs = [*failed_task_logs(launch, status).values(), *logs]
    logs = [log for log in logs if log.is_file() and log.stat().st_size]
    if not logs:
        return [f"It has no log: {short(launch.log())} is missing or empty"]
    lines = [f"The end of {short(logs[0])}:"]
    lines += [f"  {line}" for line in last_lines(logs[0], _FAILURE_LINES).splitlines()]
    lines.append(f"The full log: {short(logs[0])}")
    for path, first in list(rank_failures(launch).items())[:1]:
        lines.append(f"Rank {first.rank} failed first: {one_line(first.error)}: {short(path)}")
    return lines


_EVERY = 5.0


class LinesView:
    """A view that prints a line for each change of state, each validation, and a step every five seconds."""

    interval = 1.0

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._printed: tuple[object, ...] = ()
        self._last_step = float("-inf")
        self._step: int | None = None

    def __enter__(self) -> Self:
        manifest = self._launch.manifest
        launch = f"{manifest.run}, launch {self._launch.paths.number}, job {self._launch.job}"
        print(one_line(launch), flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, status: JobStatus, progress: Progress, new: list[Event]) -> None:
        self._print_state(status)
        for event in new:
            self._print_event(event, progress)
        if time.monotonic() - self._last_step >= _EVERY:
            self._print_step(progress)

    def end(self, status: JobStatus, progress: Progress) -> None:
        self._print_step(progress)
        self._print_state(status)

    def _print_state(self, status: JobStatus) -> None:
        job = self._launch.job_in(status)
        state = (job, status.state, status.reason, status.nodes)
        if state == self._printed:
            return
        self._printed = state
        nodes = f" on {status.nodes}" if status.nodes and not status.state.is_final else ""
        reason = f" ({status.full_reason})" if status.full_reason else ""
        after = f" after {status.elapsed}" if status.elapsed and status.state.is_final else ""
        link = f" (link {status.chain})" if status.chain else ""
        _print(f"job {job}{link} {status.state.value}{reason}{nodes}{after}")

    def _print_event(self, event: Event, progress: Progress) -> None:
        match event:
            case Start(step=step) if step:
                _print(f"the trainer resumed from step {step}")
            case Start():
                _print("the trainer started")
            case Validation():
                held_out = f"held-out loss {tables.loss(event.loss)}"
                _print(f"step {tables.steps(event.step, progress.max_steps)}  {held_out}")
            case HeldOut():
                entropy = tables.loss(event.unigram_entropy)
                _print(f"unigram entropy of the {event.name} {entropy} nats")
            case End(reason="already_complete"):
                _print("nothing left to do: increase training.trainer.max_steps to continue")
            case Train() if self._last_step == float("-inf"):
                # The first step is printed at once, as it shows that the training runs.
                self._print_step(progress)

    def _print_step(self, progress: Progress) -> None:
        train = progress.train
        if train is None or train.step == self._step:
            return
        self._step, self._last_step = train.step, time.monotonic()
        parts = [
            f"step {tables.steps(progress.step, progress.max_steps)}",
            f"loss {tables.loss(train.loss)}",
            f"lr {tables.small(train.learning_rate)}",
            f"{tables.count(progress.tokens_per_second)} tokens/s",
            f"ETA {tables.duration(progress.eta)}",
        ]
        _print("  ".join(parts))


def _print(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {one_line(line)}", flush=True)
