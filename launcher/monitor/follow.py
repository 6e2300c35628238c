"""Following a launch until its job ends: the loop, the view as plain lines, and the message at its end."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import WATCHING_ENDED, escape
from launcher.jobs.launches import Launch, open_launch
from launcher.monitor.logs import failed_task_logs, find_log, rank_failures, read_last_lines
from launcher.monitor.polling import job_poller
from launcher.monitor.progress import Progress, read_schedule
from launcher.monitor.readers import open_reader
from launcher.monitor.run_status import silence_of, state_words
from launcher.runs.paths import display_path
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from launcher.ui import tables
from slipway.common.node.events import End, Event, HeldOut, Start, Validation

if TYPE_CHECKING:
    from launcher.monitor.live import LiveView

_FAILURE_LINES = 20
# The most steps read at once: as many as a view can show.
_STEPS = 4096


def follow_launch(launch: Launch, view: LinesView | LiveView) -> JobStatus:
    """Update a view until the job has ended; return its final status, UNKNOWN after a minute without any."""
    reader, progress = open_reader(launch), Progress(schedule=read_schedule(launch.paths.config))
    with job_poller(launch) as watch, view:
        while True:
            # The state first: once the job is known to have ended, everything that it wrote is there.
            snapshot = watch.snapshot()
            over, (status,) = snapshot.is_over, snapshot.rows
            new = reader.newest(_STEPS)
            if new:
                watch.mark_alive()
                progress.apply(new)
            view.show(status, progress, new, is_over=over and not new)
            if over and not new:
                return status
            time.sleep(view.interval)


def follow_and_tell(run_dir: Path, number: int | None = None) -> int:
    """Follow a launch, live on a terminal and as lines anywhere else; after a failure, print its log's end.

    Return the exit code of the job's end (`launcher.errors`), or that of Ctrl-C, which leaves the job alone.
    """
    launch = open_launch(run_dir, number)
    view: LinesView | LiveView = LinesView(launch)
    if sys.stdout.isatty():
        from launcher.monitor.live import LiveView

        view = LiveView(launch)
    try:
        status = follow_launch(launch, view)
    except KeyboardInterrupt:
        run = display_path(launch.paths.run_dir)
        print(
            f"\nstopped following; job {launch.job} continues.\n"
            f"  follow it again:  {shlex.join(['slipway', 'follow', run])}\n"
            f"  cancel it:        {shlex.join(['slipway', 'cancel', run])}",
            file=sys.stderr,
        )
        return WATCHING_ENDED
    if not status.state.is_good:
        print(f"\n{_failure_message(launch, status)}", file=sys.stderr)
    return status.state.exit_code


def _failure_message(launch: Launch, status: JobStatus) -> str:
    reason = f" ({status.full_reason})" if status.full_reason else ""
    job = f"Job {launch.find_job(status)} of {launch.manifest.run}"
    lines = [escape(f"{job}: {status.state.value}{reason}")]
    if status.state in (State.NOT_SUBMITTED, State.INTERRUPTED) or not launch.manifest.job_id:
        return lines[0]
    # Slurm's own messages are in .out; with a separate stderr, the traceback is in .err.
    logs = [find_log(launch, extension) for extension in ("err", "out")]
    logs = [*failed_task_logs(launch, status).values(), *logs]
    log = next((log for log in logs if log.is_file() and log.stat().st_size), None)
    if log is None:
        return f"{lines[0]}\nIt has no log: {display_path(launch.log())} is missing or empty"
    lines.append(f"The end of {display_path(log)}:")
    lines += [f"  {line}" for line in read_last_lines(log, _FAILURE_LINES).splitlines()]
    lines.append(f"The full log: {display_path(log)}")
    for failure in rank_failures(launch)[:1]:
        path = display_path(Path(failure.path))
        lines.append(f"Rank {failure.rank} failed first: {escape(failure.error)}: {path}")
    return "\n".join(lines)


_EVERY = 5.0


class LinesView:
    """A view that prints a line for each change of state, each validation, and a step every five seconds."""

    interval = 1.0

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._printed: tuple[object, ...] = ()
        self._last_step = float("-inf")
        self._step: int | None = None
        self._is_silent = False

    def __enter__(self) -> None:
        manifest = self._launch.manifest
        launch = f"{manifest.run}, launch {self._launch.paths.number}, job {self._launch.job}"
        print(escape(launch), flush=True)

    def __exit__(self, *exception: object) -> None:
        """Keep the printed lines."""

    def show(
        self, status: JobStatus, progress: Progress, new: Sequence[Event], *, is_over: bool = False
    ) -> None:
        """Show the newest state, `new` being the events since the last call; at the end what stays."""
        if not status.state.is_final:
            self._print_state(status)
        for event in new:
            self._print_event(event, progress)
        if is_over or time.monotonic() - self._last_step >= _EVERY:
            self._print_step(progress)
        if (silence := silence_of(status, progress)) and not self._is_silent:
            _print(str(silence))
        self._is_silent = silence is not None
        if is_over:
            self._print_state(status)

    def _print_state(self, status: JobStatus) -> None:
        state = (self._launch.find_job(status), status.state, status.reason, status.nodes)
        if state != self._printed:
            self._printed = state
            _print(" ".join(state_words(self._launch, status)))

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

    def _print_step(self, progress: Progress) -> None:
        train = progress.train
        if train is None or train.step == self._step:
            return
        self._step, self._last_step = train.step, time.monotonic()
        parts = [
            f"step {tables.steps(progress.step, progress.max_steps)}",
            f"loss {tables.loss(train.loss)}",
            f"lr {tables.learning_rate(train.learning_rate)}",
            f"{tables.count(progress.tokens_per_second)} tokens/s",
            f"ETA {tables.duration(progress.eta)}",
        ]
        _print("  ".join(parts))


def _print(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {escape(line)}", flush=True)
