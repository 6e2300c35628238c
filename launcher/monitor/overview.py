"""One line about each launch that counts now: what `slipway status` tells, gathered."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.errors import one_line
from launcher.jobs.status import LaunchStatus, current_statuses
from launcher.monitor import formatting
from launcher.monitor.changes import Difference, difference_of
from launcher.monitor.damaged import DamagedCheckpoint, damaged_checkpoints, summary
from launcher.monitor.events import Event
from launcher.monitor.moments import since
from launcher.monitor.progress import Progress
from launcher.monitor.readers import newest_events
from launcher.monitor.tables import REASON
from launcher.monitor.transitions import Transitions, transitions_of
from launcher.runs.provenance import user
from launcher.schedulers.base import ChainJobs, JobStatus
from launcher.slurm.states import State

_GONE = JobStatus(State.UNKNOWN, "it has no launch, or is no longer there")

LINK = "LINK"
COLUMNS = (
    "RUN",
    "LAUNCH",
    "JOB",
    LINK,
    "STATE",
    "SINCE",
    "ELAPSED/LIMIT",
    "NODES×TASKS",
    "STEP",
    "LOSS",
    "VAL LOSS",
    "TOKENS/S",
    "ETA",
    "RESTARTS",
    "NODELIST",
    "USER",
    REASON,
)


@dataclass(frozen=True)
class StatusRow(LaunchStatus):
    """The status of a launch, with the progress of its trainer."""

    progress: Progress = field(default_factory=Progress)
    transitions: Transitions = field(default_factory=Transitions)
    damaged: Sequence[DamagedCheckpoint] = ()

    @property
    def eta(self) -> float | None:
        """Seconds to go, while there is something going on."""
        return self.progress.eta if self.status.state is State.RUNNING else None

    @property
    def _has_run(self) -> bool:
        """Whether an elapsed time says something: that of a job that waits is 0."""
        return self.status.elapsed is not None and self.status.state is not State.PENDING

    @property
    def of_another(self) -> str | None:
        """The user whose run it is, if that is somebody else."""
        return self.launch.manifest.user if self.launch and self.launch.manifest.user != _me() else None

    def cells(self) -> list[str]:
        """The values of `COLUMNS`."""
        status, progress = self.status, self.progress
        manifest = self.launch.manifest if self.launch else None
        limit = formatting.text(manifest.time_limit if manifest else None)
        values = [
            self.run,
            formatting.text(self.launch.paths.number if self.launch else None),
            self.launch.job_in(status) if self.launch else formatting.UNKNOWN,
            formatting.text(status.chain),
            status.state.value,
            since(self.transitions.last if status.state is not State.UNKNOWN else None, datetime.now()),
            f"{status.elapsed}/{limit}" if self._has_run else formatting.UNKNOWN,
            self._size,
            formatting.steps(progress.step, progress.max_steps),
            formatting.loss(progress.loss),
            formatting.loss(progress.validation_loss),
            formatting.count(progress.tokens_per_second),
            formatting.duration(self.eta),
            formatting.text(status.restarts or None),
            formatting.text(status.nodes),
            formatting.text(self.of_another),
            formatting.text("; ".join(filter(None, self._reasons)) or None),
        ]
        return [one_line(value) for value in values]

    @property
    def _reasons(self) -> list[str | None]:
        differs = self.differs.summary() if self.differs else None
        return [self.status.full_reason, differs, summary(self.damaged)]

    @property
    def differs(self) -> Difference | None:
        """By what it is another training than an earlier launch of the run."""
        return difference_of(self.launch.manifest) if self.launch else None

    @property
    def _size(self) -> str:
        if self.launch is None:
            return formatting.UNKNOWN
        return f"{self.launch.nodes}×{self.launch.manifest.tasks_per_node}"

    def to_json(self) -> dict[str, Any]:
        """The same for programs; a number that is not finite is a string, ``"nan"``."""
        manifest = self.launch.manifest if self.launch else None
        return {
            "run": self.run,
            "run_dir": str(self.run_dir),
            "launch": self.launch.paths.number if self.launch else None,
            "stage": manifest.stage if manifest else None,
            "job_id": self.job_id,
            "state": self.status.state.value,
            "reason": self.status.reason,
            "why": self.status.why,
            "exit_code": self.status.exit_code,
            **self.transitions.to_json(),
            "elapsed": self.status.elapsed,
            "time_limit": manifest.time_limit if manifest else None,
            "nodes": self.launch.nodes if self.launch else None,
            "tasks_per_node": manifest.tasks_per_node if manifest else None,
            "node_list": self.status.nodes,
            "restarts": self.status.restarts,
            "tasks": {task: state.value for task, state in self.status.tasks.items()},
            "link": self.status.chain.current if self.status.chain else None,
            "max_links": self.status.chain.max_links if self.status.chain else None,
            "links": links_to_json(self.status.chain),
            "user": manifest.user if manifest else None,
            "step": self.progress.step,
            "max_steps": self.progress.max_steps,
            "loss": finite(self.progress.loss),
            "val_loss": finite(self.progress.validation_loss),
            "tokens_per_second": finite(self.progress.tokens_per_second),
            "eta_seconds": finite(self.eta),
            "differs": self.differs.to_json() if self.differs else None,
            "damaged_checkpoints": [one.to_json() for one in self.damaged],
        }


@functools.cache
def _me() -> str:
    return user()


def finite(number: float | None) -> float | str | None:
    """Keep a diverged loss visible where JSON has no word for it."""
    return number if number is None or math.isfinite(number) else str(number)


def as_table(rows: Sequence[StatusRow]) -> tuple[Sequence[str], list[list[str]]]:
    """The columns and their values; which link it is only where some row is a chain."""
    shown = [name for name in COLUMNS if name != LINK or any(row.status.chain for row in rows)]
    cells = [dict(zip(COLUMNS, row.cells(), strict=True)) for row in rows]
    return shown, [[cell[name] for name in shown] for cell in cells]


def links_to_json(links: ChainJobs | None) -> list[dict[str, Any]]:
    """The jobs of a chain for programs; nothing of any other job."""
    return [
        {
            "link": number,
            "job_id": job_id,
            "state": status.state.value,
            "reason": status.reason,
            "why": status.why,
            "exit_code": status.exit_code,
            "elapsed": status.elapsed,
            "node_list": status.nodes,
        }
        for number, (job_id, status) in (zip(links.numbers, links.jobs.items(), strict=True) if links else ())
    ]


def gone(run_dir: Path) -> StatusRow:
    """A run that was asked for and has no launch: it must not look as if it had ended well."""
    return StatusRow(run_dir, None, _GONE)


def survey(run_dirs: Sequence[Path], only: Mapping[Path, Sequence[int]] | None = None) -> list[StatusRow]:
    """Look at runs, in their order; the parameters are those of `launcher.jobs.status.current_statuses`."""
    return [_with_progress(item) for item in current_statuses(run_dirs, only)]


def _with_progress(item: LaunchStatus) -> StatusRow:
    events: list[Event] = []
    transitions = Transitions()
    damaged: Sequence[DamagedCheckpoint] = ()
    if item.launch:
        transitions = transitions_of(item.launch, item.status)
        damaged = damaged_checkpoints(item.launch)
        with contextlib.suppress(OSError):  # a colleague's that may not be read
            events = newest_events(item.launch, restarted=item.status.has_restarted)
    progress = Progress(events)
    return StatusRow(
        item.run_dir,
        item.launch,
        item.status,
        item.unanswered,
        progress=progress,
        transitions=transitions,
        damaged=damaged,
    )
