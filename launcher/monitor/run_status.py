"""The status of a launch: its job's state and times, its trainer's progress; a row of `slipway status`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.errors import escape
from launcher.jobs.launches import Launch
from launcher.jobs.lookup import RunRef
from launcher.jobs.status import LaunchStatus, current_statuses
from launcher.monitor.checkpoints import DamagedCheckpoint, find_damaged_checkpoints, summary
from launcher.monitor.progress import Progress, Silence, find_silence, read_schedule
from launcher.monitor.provenance_report import Difference, difference_of, encode
from launcher.monitor.readers import newest_events
from launcher.runs.provenance import user
from launcher.schedulers.base import ChainJobs, JobStatus
from launcher.slurm.notations import format_time_limit, parse_time_limit
from launcher.slurm.states import State
from launcher.ui import tables
from launcher.ui.tables import NO_STEP, REASON, since
from slipway.common.node.marks import JobAttempt, cancelled_at, chain_end, time_limit
from slipway.watch.alerts import Alert, open_alerts


@dataclass(frozen=True, slots=True)
class Transitions:
    """The times of a job's changes of state in Unix seconds; ``None`` is unknown, or has not happened.

    `started` and `ended` of a chain are those of its current link, of an array those of its first and its
    last task. `last_transition` is the time of the change into the current state.
    """

    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    last_transition: float | None = None

    def to_json(self) -> dict[str, str | None]:
        """Return the times as ISO 8601 in UTC."""
        return {name: _format_iso(when) for name, when in asdict(self).items()}


def transitions_of(
    launch: Launch, status: JobStatus, attempts: Sequence[JobAttempt] | None = None
) -> Transitions:
    """Return the times of the changes of state, from the manifest, the marks and Slurm's elapsed time."""
    created = datetime.fromisoformat(launch.manifest.created).timestamp()  # checked when it was read
    if status.state is State.NOT_SUBMITTED:
        return Transitions(last_transition=created)
    job_id = status.chain.job_id if status.chain else launch.manifest.job_id
    if job_id is None:
        return Transitions(submitted=created)
    attempts = launch.attempts if attempts is None else attempts
    if status.state is State.PENDING:
        # The job may have been requeued, or the previous link has just ended.
        last = _find_latest([created, *(attempt.ended for attempt in attempts)])
        return Transitions(created, last_transition=last)
    own = (attempt for attempt in attempts if job_id in (attempt.job_id, attempt.job_id.partition("_")[0]))
    newest = list({attempt.job_id: attempt for attempt in own}.values())  # of each task, or of the one job
    started = _find_start(newest, status)
    if status.state.is_final:
        ended = _find_end(launch, job_id, newest, status, started)
        return Transitions(created, started, ended, ended)
    return Transitions(created, started, last_transition=None if status.state is State.UNKNOWN else started)


def _find_start(attempts: Sequence[JobAttempt], status: JobStatus) -> float | None:
    starts = [attempt.started for attempt in attempts if attempt.started is not None]
    # An attempt that is over is not the running one.
    if starts and (status.state.is_final or not all(attempt.is_over for attempt in attempts)):
        return min(starts)
    elapsed = elapsed_seconds(status)
    return time.time() - elapsed if elapsed is not None and status.state is State.RUNNING else None


def _find_end(
    launch: Launch, job_id: str, attempts: Sequence[JobAttempt], status: JobStatus, started: float | None
) -> float | None:
    """Return the end on record: the job's own, its cancellation, start plus elapsed time, or Slurm's end."""
    if attempts and all(attempt.ended is not None for attempt in attempts):
        return _find_latest(attempt.ended for attempt in attempts)
    by_user = cancelled_at(launch.paths.directory, job_id)
    if by_user is not None:
        return by_user
    elapsed = elapsed_seconds(status)
    if started is not None and elapsed is not None:
        return started + elapsed
    if status.ended is not None:
        return status.ended
    end = chain_end(launch.paths.directory) if launch.is_chain else None
    return end.ended if end is not None else None


def silence_of(status: JobStatus, progress: Progress) -> Silence | None:
    """Return the unusual silence of a training whose job runs."""
    if status.state is not State.RUNNING:
        return None
    return find_silence(progress, elapsed_seconds(status), time.time())


def elapsed_seconds(status: JobStatus) -> int | None:
    """Return the time that a job ran, in seconds."""
    if status.elapsed is None:
        return None
    with contextlib.suppress(ValueError):
        return parse_time_limit(status.elapsed) or 0
    return None


def _find_latest(times: Iterable[float | None]) -> float | None:
    return max((when for when in times if when is not None), default=None)


def _format_iso(when: float | None) -> str | None:
    if when is None:
        return None
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return None


LINK = "LINK"


@dataclass(frozen=True, kw_only=True)
class StatusRow(LaunchStatus):
    """The status of a launch, with the progress of its trainer.

    `task_restarts` counts the new starts of the tasks inside of the job; `restarts` counts its requeues.
    """

    task_restarts: int = 0
    progress: Progress = field(default_factory=Progress)
    transitions: Transitions = field(default_factory=Transitions)
    damaged: Sequence[DamagedCheckpoint] = ()
    alerts: Sequence[Alert] = ()

    @property
    def granted_limit(self) -> str | None:
        """Slurm's time limit of the job, as ``[D-]HH:MM:SS``, if its mark has one."""
        if self.launch is None or self.job_id is None:
            return None
        seconds = time_limit(self.launch.paths.directory, f"{self.job_id}.{self.restarts}")
        at_submission = self.launch.manifest.granted.get("time limit", {}).get("granted")
        return at_submission if seconds is None else format_time_limit(seconds)

    @property
    def eta(self) -> float | None:
        """Seconds to the end of the training, while it runs."""
        return self.progress.eta if self.state is State.RUNNING else None

    @property
    def silence(self) -> Silence | None:
        return silence_of(self, self.progress)

    @property
    def full_reason(self) -> str | None:
        """Return the reason and the job's judgement in one line, or its silence."""
        silence = self.silence
        return str(silence) if silence else super().full_reason

    @property
    def differs(self) -> Difference | None:
        """The keys by which it is a different training than an earlier launch of the run."""
        return difference_of(self.launch.manifest) if self.launch else None

    @property
    def left_out(self) -> str | None:
        """The nodes of the running job that its tasks do not run on, each with the reason."""
        attempts = self.launch.attempts if self.launch and self.state is State.RUNNING else []
        return attempts[-1].left_out if attempts else None

    def cells(self) -> dict[str, str]:
        """Return the values of the columns, by their names."""
        progress, launch = self.progress, self.launch
        manifest = launch.manifest if launch else None
        is_known = self.state is not State.UNKNOWN
        # The elapsed time of a pending job is 0, and means nothing.
        has_run = self.elapsed is not None and self.state is not State.PENDING
        limit = tables.text(_limit(manifest.time_limit if manifest else None, self.granted_limit))
        differs = self.differs.summary() if self.differs else None
        granted = manifest.granted_text if manifest and self.state.is_live else None
        said = self.full_reason or ""  # no alert says it again
        alerts = [alert.newest.why for alert in self.alerts if not (said and _says(alert, said))]
        notes = [self.left_out and f"without {self.left_out}", granted, differs]
        values = {
            "RUN": self.run,
            "LAUNCH": self.number,
            "JOB": launch.find_job(self) if launch else None,
            LINK: self.chain,
            "STATE": self.state.value,
            "SINCE": since(self.transitions.last_transition if is_known else None, datetime.now()),
            "ELAPSED/LIMIT": f"{self.elapsed}/{limit}" if has_run else None,
            "NODES×TASKS": f"{launch.nodes}×{launch.manifest.tasks_per_node}" if launch else None,
            "STEP": tables.steps(progress.step, progress.max_steps),
            "LOSS": tables.loss(progress.loss),
            "VAL LOSS": tables.loss(progress.validation_loss),
            "TOKENS/S": tables.count(progress.tokens_per_second),
            "ETA": tables.duration(self.eta),
            "RESTARTS": self.restarts + self.task_restarts or None,
            "NODELIST": self.nodes,
            "USER": manifest.user if manifest and manifest.user != _me() else None,
            REASON: "; ".join(filter(None, [self.full_reason, *alerts, *notes, summary(self.damaged)])),
        }
        return {name: escape(tables.text(value)) for name, value in values.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the status for programs; a number that is not finite is a string, ``"nan"``."""
        manifest = self.launch.manifest if self.launch else None
        return {
            "run": self.run,
            "run_dir": str(self.run_dir),
            "launch": self.number,
            **attributes(manifest, "stage"),
            "job_id": self.job_id,
            "state": self.state.value,
            **attributes(self, "reason", "why", "exit_code"),
            **self.transitions.to_json(),
            **attributes(self, "elapsed"),
            **attributes(manifest, "time_limit"),
            **attributes(self, "granted_limit"),
            "granted": manifest.granted if manifest else None,
            **attributes(self.launch, "nodes"),
            **attributes(manifest, "tasks_per_node"),
            "node_list": self.nodes,
            "left_out": self.left_out,
            "restarts": self.restarts,
            "task_restarts": self.task_restarts,
            "tasks": {task: state.value for task, state in self.tasks.items()},
            "link": self.chain.current if self.chain else None,
            **attributes(self.chain, "max_links"),
            "links": links_to_json(self.chain),
            **attributes(manifest, "user"),
            "step": self.progress.step,
            "max_steps": self.progress.max_steps,
            "loss": encode(self.progress.loss),
            "val_loss": encode(self.progress.validation_loss),
            "tokens_per_second": encode(self.progress.tokens_per_second),
            "eta_seconds": encode(self.eta),
            "step_seconds": encode(self.progress.pace.interval),
            "no_step_seconds": encode(silence.seconds if (silence := self.silence) else None),
            "differs": self.differs.to_json() if self.differs else None,
            "alerts": [alert.to_json() for alert in self.alerts],
            "damaged_checkpoints": [asdict(checkpoint) for checkpoint in self.damaged],
        }


_me = functools.cache(user)


def _says(alert: Alert, reason: str) -> bool:
    """Return True if a reason is what an alert is about: the same silence, or the end of the run."""
    why = alert.newest.why
    return (alert.first.detector == "no_step" and NO_STEP in reason) or reason in why or why in reason


def _limit(asked: str | None, granted: str | None) -> str | None:
    """Return the granted time limit, and the requested one if it differs."""
    if granted is None or asked is None:
        return granted or asked
    with contextlib.suppress(ValueError):
        if parse_time_limit(granted) == parse_time_limit(asked):
            return asked
    return f"{granted} ({asked} asked for)"


def attributes(source: object, *names: str) -> dict[str, Any]:
    """Return attributes by their names, each ``None`` without an object."""
    return {name: None if source is None else getattr(source, name) for name in names}


def make_table(rows: Sequence[StatusRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Return the columns and their values; the column of links only if some row is a chain."""
    cells = [row.cells() for row in rows]
    has_links = any(row.chain for row in rows)
    names = [name for name in next(iter(cells), ()) if name != LINK or has_links]
    return names, [[cell[name] for name in names] for cell in cells]


def links_to_json(links: ChainJobs | None) -> list[dict[str, Any]]:
    """Return the jobs of a chain for programs; an empty list for any other job."""
    return [
        {
            "link": number,
            "job_id": job_id,
            "state": status.state.value,
            **attributes(status, "reason", "why", "exit_code", "elapsed"),
            "node_list": status.nodes,
        }
        for number, (job_id, status) in (zip(links.numbers, links.jobs.items(), strict=True) if links else ())
    ]


def missing_run(run_dir: Path) -> StatusRow:
    """Return the status of a requested run without a launch: it must not look as if it had completed."""
    return StatusRow(State.UNKNOWN, "the run has no launch, or was removed", run_dir=run_dir)


def collect_status(refs: Sequence[RunRef]) -> list[StatusRow]:
    """Look at runs, in their order; see `launcher.jobs.status.current_statuses`."""
    return [_add_progress(item) for item in current_statuses(refs)]


def _add_progress(item: LaunchStatus) -> StatusRow:
    if item.launch is None:
        return StatusRow.extending(item)
    attempts = item.launch.attempts
    row = StatusRow.extending(
        item,
        task_restarts=sum(attempt.restarts for attempt in attempts if attempt.job_id == item.job_id),
        transitions=transitions_of(item.launch, item, attempts),
        damaged=find_damaged_checkpoints(item.launch),
        alerts=open_alerts(item.run_dir),
    )
    return replace(row, progress=_read_progress(row, item.launch))


def _read_progress(item: StatusRow, launch: Launch) -> Progress:
    with contextlib.suppress(OSError):  # another user's run that may not be read
        events = newest_events(launch, restarted=item.has_restarted or item.task_restarts > 0)
        return Progress(events, read_schedule(launch.paths.config))
    return Progress()


def refresh_progress(rows: Sequence[StatusRow]) -> list[StatusRow]:
    """Read the progress of running jobs again; no scheduler is asked."""
    return [
        replace(row, progress=_read_progress(row, row.launch), alerts=open_alerts(row.run_dir))
        if row.launch and row.state is State.RUNNING
        else row
        for row in rows
    ]


def state_words(launch: Launch | None, status: JobStatus) -> list[str]:
    """Return the words for the state of a job: its id, the state with its reason, its nodes, its duration."""
    is_over = status.state.is_final
    words = [
        f"job {launch.find_job(status)}{f' (link {status.chain})' if status.chain else ''}" if launch else "",
        status.state.value + (f" ({status.full_reason})" if status.full_reason else ""),
        f"on {status.nodes}" if status.nodes and not is_over else "",
        f"after {status.elapsed}" if status.elapsed and is_over else "",
    ]
    return [word for word in words if word]
