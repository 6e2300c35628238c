"""The status of a launch: its job's state and times, its trainer's progress; a row of `slipway status`."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.errors import one_line
from launcher.jobs.launches import Launch
from launcher.jobs.status import LaunchStatus, current_statuses
from launcher.monitor.checkpoints import DamagedCheckpoint, damaged_checkpoints, summary
from launcher.monitor.events import Event, Progress
from launcher.monitor.provenance_report import Difference, difference_of
from launcher.monitor.readers import newest_events
from launcher.runs.provenance import user
from launcher.schedulers.base import ChainJobs, JobStatus
from launcher.slurm.notations import parse_time_limit
from launcher.slurm.states import State
from launcher.ui import tables
from launcher.ui.tables import REASON, since
from supervisor.marks import JobAttempt, cancelled_at, chain_end


@dataclass(frozen=True, slots=True)
class Transitions:
    """The times of a job's changes of state in Unix seconds; ``None`` is unknown, or has not happened.

    `started` and `ended` of a chain are those of its current link, of an array those of its first and its
    last task. `last` is the time of the change into the current state.
    """

    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    last: float | None = None

    def to_json(self) -> dict[str, str | None]:
        """Return the times as ISO 8601 in UTC."""
        return {
            "submitted": _iso(self.submitted),
            "started": _iso(self.started),
            "ended": _iso(self.ended),
            "last_transition": _iso(self.last),
        }


def transitions_of(launch: Launch, status: JobStatus) -> Transitions:
    """Return the times of the changes of state, from the manifest, the marks and Slurm's elapsed time."""
    created = _created(launch)
    if status.state is State.NOT_SUBMITTED:
        return Transitions(last=created)
    job_id = status.chain.job_id if status.chain else launch.manifest.job_id
    if job_id is None:
        return Transitions(submitted=created)
    lives = [life for life in launch.attempts if job_id in (life.job_id, life.job_id.partition("_")[0])]
    newest = list({life.job_id: life for life in lives}.values())  # of each task, or of the one job
    if status.state is State.PENDING:
        # The job may have been requeued, or the previous link has just ended.
        return Transitions(created, last=_latest([created, *(life.ended for life in launch.attempts)]))
    started, ended = _started(newest, status), None
    if status.state.is_final:
        ended = _ended(launch, job_id, newest, status, started)
        return Transitions(created, started, ended, ended)
    return Transitions(created, started, last=None if status.state is State.UNKNOWN else started)


def _started(lives: Sequence[JobAttempt], status: JobStatus) -> float | None:
    starts = [life.started for life in lives if life.started is not None]
    # An attempt that is over is not the running one.
    if starts and (status.state.is_final or not all(life.is_over for life in lives)):
        return min(starts)
    elapsed = _elapsed_seconds(status)
    return time.time() - elapsed if elapsed is not None and status.state is State.RUNNING else None


def _ended(
    launch: Launch, job_id: str, lives: Sequence[JobAttempt], status: JobStatus, started: float | None
) -> float | None:
    """Return the end on record: the job's own, its cancellation, start plus elapsed time, or Slurm's end."""
    if lives and all(life.ended is not None for life in lives):
        return _latest(life.ended for life in lives)
    by_user = cancelled_at(launch.paths.directory, job_id)
    if by_user is not None:
        return by_user
    elapsed = _elapsed_seconds(status)
    if started is not None and elapsed is not None:
        return started + elapsed
    if status.ended is not None:
        return status.ended
    end = chain_end(launch.paths.directory) if launch.is_chain else None
    return end.ended if end is not None else None


def _elapsed_seconds(status: JobStatus) -> int | None:
    if status.elapsed is None:
        return None
    with contextlib.suppress(ValueError):
        return parse_time_limit(status.elapsed) or 0
    return None


def _latest(times: Iterable[float | None]) -> float | None:
    return max((when for when in times if when is not None), default=None)


def _created(launch: Launch) -> float | None:
    with contextlib.suppress(ValueError, OverflowError):
        return datetime.fromisoformat(launch.manifest.created).timestamp()
    return None


def _iso(when: float | None) -> str | None:
    if when is None:
        return None
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return None


_GONE = JobStatus(State.UNKNOWN, "the run has no launch, or was removed")

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
        """Seconds to the end of the training, while it runs."""
        return self.progress.eta if self.status.state is State.RUNNING else None

    @property
    def _has_run(self) -> bool:
        """True if the elapsed time means something: that of a pending job is 0."""
        return self.status.elapsed is not None and self.status.state is not State.PENDING

    @property
    def other_user(self) -> str | None:
        """The user who launched the run, if it is another one."""
        return self.launch.manifest.user if self.launch and self.launch.manifest.user != _me() else None

    def cells(self) -> list[str]:
        """Return the values of `COLUMNS`."""
        status, progress = self.status, self.progress
        manifest = self.launch.manifest if self.launch else None
        limit = tables.text(manifest.time_limit if manifest else None)
        values = [
            self.run,
            tables.text(self.launch.paths.number if self.launch else None),
            self.launch.job_in(status) if self.launch else tables.UNKNOWN,
            tables.text(status.chain),
            status.state.value,
            since(self.transitions.last if status.state is not State.UNKNOWN else None, datetime.now()),
            f"{status.elapsed}/{limit}" if self._has_run else tables.UNKNOWN,
            self._size,
            tables.steps(progress.step, progress.max_steps),
            tables.loss(progress.loss),
            tables.loss(progress.validation_loss),
            tables.count(progress.tokens_per_second),
            tables.duration(self.eta),
            tables.text(status.restarts or None),
            tables.text(status.nodes),
            tables.text(self.other_user),
            tables.text("; ".join(filter(None, self._reasons)) or None),
        ]
        return [one_line(value) for value in values]

    @property
    def _reasons(self) -> list[str | None]:
        differs = self.differs.summary() if self.differs else None
        return [self.status.full_reason, differs, summary(self.damaged)]

    @property
    def differs(self) -> Difference | None:
        """The keys by which it is a different training than an earlier launch of the run."""
        return difference_of(self.launch.manifest) if self.launch else None

    @property
    def _size(self) -> str:
        if self.launch is None:
            return tables.UNKNOWN
        return f"{self.launch.nodes}×{self.launch.manifest.tasks_per_node}"

    def to_json(self) -> dict[str, Any]:
        """Return the status for programs; a number that is not finite is a string, ``"nan"``."""
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
            "damaged_checkpoints": [asdict(checkpoint) for checkpoint in self.damaged],
        }


@functools.cache
def _me() -> str:
    return user()


def finite(number: float | None) -> float | str | None:
    """Return a number as JSON can have it: one that is not finite as a string, so that it stays visible."""
    return number if number is None or math.isfinite(number) else str(number)


def as_table(rows: Sequence[StatusRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Return the columns and their values; the column of links only if some row is a chain."""
    names = [name for name in COLUMNS if name != LINK or any(row.status.chain for row in rows)]
    cells = [dict(zip(COLUMNS, row.cells(), strict=True)) for row in rows]
    return names, [[cell[name] for name in names] for cell in cells]


def links_to_json(links: ChainJobs | None) -> list[dict[str, Any]]:
    """Return the jobs of a chain for programs; an empty list for any other job."""
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
    """Return the status of a requested run without a launch: it must not look as if it had completed."""
    return StatusRow(run_dir, None, _GONE)


def collect_status(
    run_dirs: Sequence[Path], only: Mapping[Path, Sequence[int]] | None = None
) -> list[StatusRow]:
    """Look at runs, in their order; the parameters are those of `launcher.jobs.status.current_statuses`."""
    return [_with_progress(item) for item in current_statuses(run_dirs, only)]


def _with_progress(item: LaunchStatus) -> StatusRow:
    events: list[Event] = []
    transitions = Transitions()
    damaged: Sequence[DamagedCheckpoint] = ()
    if item.launch:
        transitions = transitions_of(item.launch, item.status)
        damaged = damaged_checkpoints(item.launch)
        with contextlib.suppress(OSError):  # another user's run that may not be read
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
