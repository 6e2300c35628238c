"""One line about each run: what `slipway status` tells, gathered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.monitor import formatting
from launcher.monitor.events import read_ends
from launcher.monitor.launches import Launch, ask, open_launch
from launcher.monitor.progress import Progress
from launcher.monitor.tables import REASON
from launcher.schedulers.base import JobStatus, State

COLUMNS = (
    "RUN",
    "LAUNCH",
    "JOB",
    "STATE",
    "ELAPSED/LIMIT",
    "NODES×TASKS",
    "STEP",
    "LOSS",
    "VAL LOSS",
    "TOKENS/S",
    "ETA",
    REASON,
)


@dataclass(frozen=True)
class RunStatus:
    """The newest launch of a run, as the scheduler and the trainer tell it.

    `launch` is ``None`` where it could not be read; the status then says why.
    """

    run_dir: Path
    launch: Launch | None
    status: JobStatus
    progress: Progress

    @property
    def run(self) -> str:
        return self.launch.manifest.run if self.launch else self.run_dir.name

    @property
    def eta(self) -> float | None:
        """Seconds to go, while there is something going on."""
        return self.progress.eta if self.status.state is State.RUNNING else None

    def cells(self) -> list[str]:
        """The values of `COLUMNS`."""
        status, progress = self.status, self.progress
        manifest = self.launch.manifest if self.launch else None
        limit = formatting.text(manifest.time_limit if manifest else None)
        return [
            self.run,
            formatting.text(self.launch.paths.number if self.launch else None),
            self.launch.job if self.launch else formatting.UNKNOWN,
            status.state.value,
            f"{formatting.text(status.elapsed)}/{limit}" if status.elapsed else formatting.UNKNOWN,
            f"{manifest.nodes}×{manifest.tasks_per_node}" if manifest else formatting.UNKNOWN,
            formatting.steps(progress.step, progress.max_steps),
            formatting.loss(progress.loss),
            formatting.loss(progress.validation_loss),
            formatting.count(progress.tokens_per_second),
            formatting.duration(self.eta),
            formatting.text(status.reason),
        ]

    def to_json(self) -> dict[str, Any]:
        """The same for programs; a number that is not finite is a string, ``"nan"``."""
        manifest = self.launch.manifest if self.launch else None
        return {
            "run": self.run,
            "run_dir": str(self.run_dir),
            "launch": self.launch.paths.number if self.launch else None,
            "stage": manifest.stage if manifest else None,
            "job_id": manifest.job_id if manifest else None,
            "state": self.status.state.value,
            "reason": self.status.reason,
            "exit_code": self.status.exit_code,
            "elapsed": self.status.elapsed,
            "time_limit": manifest.time_limit if manifest else None,
            "nodes": manifest.nodes if manifest else None,
            "tasks_per_node": manifest.tasks_per_node if manifest else None,
            "node_list": self.status.nodes,
            "step": self.progress.step,
            "max_steps": self.progress.max_steps,
            "loss": finite(self.progress.loss),
            "val_loss": finite(self.progress.validation_loss),
            "tokens_per_second": finite(self.progress.tokens_per_second),
            "eta_seconds": finite(self.eta),
        }


def finite(number: float | None) -> float | str | None:
    """Keep a diverged loss visible where JSON has no word for it."""
    return number if number is None or math.isfinite(number) else str(number)


def survey(run_dirs: Sequence[Path]) -> list[RunStatus]:
    """Look at the newest launch of each run, in their order."""
    opened = [_open(run_dir) for run_dir in run_dirs]
    statuses = iter(ask([launch for launch in opened if isinstance(launch, Launch)]))
    return [_look(run_dir, launch, statuses) for run_dir, launch in zip(run_dirs, opened, strict=True)]


def _look(run_dir: Path, launch: Launch | JobStatus, statuses: Iterator[JobStatus]) -> RunStatus:
    if isinstance(launch, JobStatus):
        return RunStatus(run_dir, None, launch, Progress())
    return RunStatus(run_dir, launch, next(statuses), Progress(read_ends(launch.metrics)))


def _open(run_dir: Path) -> Launch | JobStatus:
    """Open a run's newest launch; one broken run must not hide the others."""
    try:
        return open_launch(run_dir)
    except UserError as error:
        return JobStatus(State.UNKNOWN, error.message)
