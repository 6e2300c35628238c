"""A launch as plain lines, for a pipe or a file: what changes, and a step every few seconds."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from launcher.errors import one_line
from launcher.jobs.launches import Launch
from launcher.monitor import formatting
from launcher.monitor.events import End, Event, HeldOut, Start, Train, Validation
from launcher.monitor.progress import Progress
from launcher.schedulers.base import JobStatus

_EVERY = 5.0


class LinesView:
    """Prints a line for each change of state, for each validation, and for a step every five seconds."""

    interval = 1.0

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._told: tuple[object, ...] = ()
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
        self._tell_state(status)
        for event in new:
            self._tell_event(event, progress)
        if time.monotonic() - self._last_step >= _EVERY:
            self._tell_step(progress)

    def end(self, status: JobStatus, progress: Progress) -> None:
        self._tell_step(progress)
        self._tell_state(status)

    def _tell_state(self, status: JobStatus) -> None:
        job = self._launch.job_in(status)
        told = (job, status.state, status.reason, status.nodes)
        if told == self._told:
            return
        self._told = told
        nodes = f" on {status.nodes}" if status.nodes and not status.state.is_final else ""
        reason = f" ({status.full_reason})" if status.full_reason else ""
        after = f" after {status.elapsed}" if status.elapsed and status.state.is_final else ""
        link = f" (link {status.chain})" if status.chain else ""
        _print(f"job {job}{link} {status.state.value}{reason}{nodes}{after}")

    def _tell_event(self, event: Event, progress: Progress) -> None:
        match event:
            case Start(step=step) if step:
                _print(f"the trainer goes on from step {step}")
            case Start():
                _print("the trainer started")
            case Validation():
                held_out = f"held-out loss {formatting.loss(event.loss)}"
                _print(f"step {formatting.steps(event.step, progress.max_steps)}  {held_out}")
            case HeldOut():
                entropy = formatting.loss(event.unigram_entropy)
                _print(f"unigram entropy of the {event.name} {entropy} nats")
            case End(reason="already_complete"):
                _print("nothing left to do: a larger training.trainer.max_steps would go on")
            case Train() if self._last_step == float("-inf"):
                # The first step shows that it trains; the next ones wait for their time.
                self._tell_step(progress)

    def _tell_step(self, progress: Progress) -> None:
        train = progress.train
        if train is None or train.step == self._step:
            return
        self._step, self._last_step = train.step, time.monotonic()
        parts = [
            f"step {formatting.steps(progress.step, progress.max_steps)}",
            f"loss {formatting.loss(train.loss)}",
            f"lr {formatting.small(train.learning_rate)}",
            f"{formatting.count(progress.tokens_per_second)} tokens/s",
            f"ETA {formatting.duration(progress.eta)}",
        ]
        _print("  ".join(parts))


def _print(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {one_line(line)}", flush=True)
