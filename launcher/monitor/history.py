"""The history of a run: each launch with its attempts, its steps, and the diagnosis of its end."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.errors import UserError, shortened
from launcher.jobs.launches import Launch, adopt, read_launch
from launcher.jobs.status import LaunchStatus, poll
from launcher.monitor.checkpoints import DamagedCheckpoint, find_damaged_checkpoints
from launcher.monitor.logs import FAILURES
from launcher.monitor.progress import Progress
from launcher.monitor.provenance_report import Changes, Difference, changes_between, difference_of, encode
from launcher.monitor.readers import all_events, first_and_newest_events
from launcher.monitor.run_status import attributes, elapsed_seconds, links_to_json
from launcher.runs.manifest import Manifest
from launcher.runs.paths import JOB_ID_LOG, launch_numbers
from launcher.schedulers.base import JobStatus
from launcher.schedulers.job_status import exit_reason
from launcher.slurm.notations import format_time_limit
from launcher.slurm.states import State
from launcher.ui import tables
from slipway.common.files import read_text
from slipway.common.node.events import Event, HeldOut, Start
from slipway.common.node.evidence import evidence, read_rank_failures
from slipway.common.node.judging import Facts, find_rule, judge
from slipway.common.node.marks import JobAttempt
from slipway.watch.alerts import Alert, read_alerts

# Slurm's word for a job that was put back into the queue; a job does not stay in this state.
REQUEUED = "REQUEUED"
# Of tasks that were started again inside of their job.
RESTARTED = "RESTARTED"


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a trainer, from `first` (0, or the step of its checkpoint) to `last`."""

    first: int | None = None
    last: int | None = None
    loss: float | None = None

    def __str__(self) -> str:
        return tables.UNKNOWN if self.last is None else f"{tables.text(self.first)}→{self.last}"

    def to_json(self) -> dict[str, Any]:
        return {"first_step": self.first, "step": self.last, "loss": encode(self.loss)}


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """An attempt of a job that had several, a start of its tasks, a task of an array, or a link of a chain.

    Times are in Unix seconds. `reading` is the diagnosis of its end, with a remedy.
    """

    attempt: JobAttempt
    state: str
    reason: str | None
    steps: Steps
    link: int | None = None
    reading: Diagnosis | None = None
    damaged: Sequence[DamagedCheckpoint] = ()

    @property
    def elapsed(self) -> float | None:
        """The elapsed seconds, if both start and end left a mark."""
        started, ended = self.attempt.started, self.attempt.ended
        return ended - started if ended is not None and started is not None else None

    def to_json(self) -> dict[str, Any]:
        attempt = self.attempt
        return {
            "job_id": attempt.job_id,
            "attempt": attempt.number,
            "restart": attempt.restarts,
            **attributes(self, "link", "state", "reason"),
            **attributes(attempt, "exit_code", "started", "ended"),
            "node_list": attempt.nodes,
            "avoids": attempt.avoids,
            "left_out": attempt.left_out,
            "failures_before": attempt.failures,
            "reading": self.reading.to_json() if self.reading else None,
            "damaged_checkpoints": [asdict(checkpoint) for checkpoint in self.damaged],
            **self.steps.to_json(),
        }


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """A launch; its `status` has the reason if its manifest cannot be read.

    `reading` is the diagnosis of its job's end, and `left_out` are its nodes without tasks, if it had one
    attempt; otherwise `attempts` have theirs.
    """

    number: int
    status: LaunchStatus
    steps: Steps = Steps()
    attempts: Sequence[AttemptRow] = ()
    started: float | None = None
    changes: Changes = field(default_factory=Changes)
    reading: Diagnosis | None = None
    damaged: Sequence[DamagedCheckpoint] = ()
    left_out: str | None = None

    @property
    def _manifest(self) -> Manifest | None:
        return self.status.launch.manifest if self.status.launch else None

    @property
    def elapsed(self) -> str | None:
        """The time that its job ran, of a chain that of all links together."""
        chain = self.status.chain
        if chain is None or not self.attempts:
            return self.status.elapsed
        started = {row.attempt.stem: row.attempt.started for row in reversed(self.attempts)}
        seconds = 0.0
        for stem, last in {row.attempt.stem: row.attempt for row in self.attempts}.items():
            begin, end, job = started[stem], last.ended, chain.jobs.get(last.job_id)
            if begin is not None and end is not None:
                seconds += end - begin
            elif job is not None:
                seconds += elapsed_seconds(job) or 0
        return format_time_limit(int(seconds))

    @property
    def notices(self) -> list[str]:
        """Return what sbatch said of its jobs, as a site's filters do."""
        log = self.status.launch.paths.directory / JOB_ID_LOG if self.status.launch else None
        with contextlib.suppress(OSError):
            lines = read_text(log, errors="replace").splitlines() if log else []
            return [shortened(line) for line in lines if not line.startswith("Submitted batch job ")]
        return []

    @property
    def alerts(self) -> list[Alert]:
        """The alerts that were opened while it was the run's newest launch."""
        found = read_alerts(self.status.run_dir)
        return [alert for alert in found if alert.first.origin.launch == self.number]

    @property
    def differs(self) -> Difference | None:
        """The keys by which it is a different training than an earlier launch of the run."""
        return difference_of(self._manifest) if self._manifest else None

    @property
    def commit(self) -> str | None:
        """The commit's first digits, with a * if there were uncommitted changes."""
        manifest = self._manifest
        if manifest is None or manifest.git_commit is None:
            return None
        return manifest.git_commit[:10] + ("*" if manifest.git_dirty else "")

    def to_json(self) -> dict[str, Any]:
        """Return the launch for programs; a number that is not finite is a string, ``"nan"``."""
        manifest = self._manifest
        return {
            "launch": self.number,
            "alerts": [alert.to_json() for alert in self.alerts],
            **attributes(manifest, "tag", "job_id"),
            "state": self.status.state.value,
            **attributes(self.status, "reason", "exit_code"),
            "launched": manifest.created if manifest else None,
            **attributes(manifest, "user", "host"),
            "started": self.started,
            "elapsed": self.elapsed,
            "node_list": self.status.nodes,
            "restarts": self.status.restarts,
            "links": links_to_json(self.status.chain),
            **attributes(self.status.chain, "max_links"),
            **self.steps.to_json(),
            **attributes(manifest, "git_commit", "git_dirty"),
            "added": list(self.changes.added),
            "removed": list(self.changes.removed),
            "changed": {key: list(values) for key, values in self.changes.changed.items()},
            "differs": self.differs.to_json() if self.differs else None,
            "reading": self.reading.to_json() if self.reading else None,
            "damaged_checkpoints": [asdict(checkpoint) for checkpoint in self.damaged],
            "attempts": [attempt.to_json() for attempt in self.attempts],
        }


def history(run_dir: Path) -> list[LaunchRow]:
    """Return all launches of a run, oldest first, asking each of their schedulers once."""
    broken: dict[int, LaunchRow] = {}
    read = []
    for number in launch_numbers(run_dir):
        try:
            read.append(read_launch(run_dir, number))
        except UserError as error:
            broken[number] = LaunchRow(number, LaunchStatus(State.UNKNOWN, error.message, run_dir=run_dir))
    launches = adopt(read)
    rows = {row.number: row for row in map(_row, poll(launches), [None, *launches])}
    return [(broken | rows)[number] for number in sorted(broken | rows)]


def starts_of(rows: Sequence[LaunchRow]) -> list[tuple[int, float]]:
    """Return the steps from which trainers began, each with the time of its job's start."""
    parts = [(row.steps, row.started) for row in rows]
    parts += [(attempt.steps, attempt.attempt.started) for row in rows for attempt in row.attempts]
    return [
        (steps.first or 0, began) for steps, began in parts if steps.last is not None and began is not None
    ]


def _row(status: LaunchStatus, before: Launch | None) -> LaunchRow:
    launch = status.launch
    assert launch is not None
    attempts = launch.starts
    first = attempts[0] if attempts else None
    several = len(attempts) > 1 or launch.is_chain
    # Tasks of an array run at once, and their events cannot be separated.
    alone = len({attempt.job_id for attempt in attempts}) == 1 or launch.is_chain
    stretches = _stretches(attempts) if several and alone else []
    whole = _Stretch()
    with contextlib.suppress(OSError):  # another user's run that may not be read
        for event in all_events(launch) if several else first_and_newest_events(launch):
            whole.take(event)
            for stretch in stretches:
                if not isinstance(event, HeldOut) and stretch.covers(event.time):  # that has no time
                    stretch.take(event)
    damaged = find_damaged_checkpoints(launch)
    for stretch in stretches:
        stretch.damaged = [checkpoint for checkpoint in damaged if stretch.covers(checkpoint.time)]
    changes = Changes()
    if before is not None:
        changes = changes_between(before.manifest.overrides, launch.manifest.overrides)
    return LaunchRow(
        number=launch.paths.number,
        status=status,
        steps=whole.steps,
        attempts=_attempt_rows(launch, attempts, status, stretches) if several else (),
        started=first.started if first else None,
        changes=changes,
        damaged=damaged,
        left_out=first.left_out if first and not several else None,
        # A job without a verdict is of an earlier version, or lost its node: its state is enough.
        reading=_reading(launch, first, status) if not several and first and first.verdict else None,
    )


class _Stretch:
    """The events between two times: their steps, and the damaged checkpoints."""

    def __init__(self, begin: float | None = None, end: float | None = None) -> None:
        self._begin = -math.inf if begin is None else begin
        self._end = math.inf if end is None else end
        self.damaged: Sequence[DamagedCheckpoint] = ()
        self._first: int | None = None
        self._progress = Progress()

    def covers(self, time: float) -> bool:
        return self._begin <= time < self._end

    def take(self, event: Event) -> None:
        if self._first is None and isinstance(event, Start):
            self._first = event.step
        self._progress.take(event)

    @property
    def steps(self) -> Steps:
        return Steps(self._first, self._progress.step, self._progress.loss)


def _stretches(attempts: Sequence[JobAttempt]) -> list[_Stretch]:
    """Return the stretch of each attempt, until the next one began; marks have whole seconds."""
    begins = [attempt.started for attempt in attempts]
    for index, (before, attempt) in enumerate(itertools.pairwise(attempts), start=1):
        if before.ended is not None and attempt.started is not None:
            begins[index] = max(attempt.started, before.ended + 1)
    return [_Stretch(begin, end) for begin, end in itertools.pairwise([*begins, None])]


def _attempt_rows(
    launch: Launch, attempts: Sequence[JobAttempt], status: JobStatus, stretches: Sequence[_Stretch]
) -> list[AttemptRow]:
    last = {attempt.job_id: attempt for attempt in attempts}
    last_starts = {attempt.stem: attempt for attempt in attempts}
    rows = []
    for attempt, stretch in zip(attempts, stretches or [_Stretch()] * len(attempts), strict=True):
        is_last = last[attempt.job_id] is attempt
        job_status = status.chain.jobs.get(attempt.job_id, status) if status.chain else status
        state, reason = _end_of(attempt, job_status, is_last=is_last)
        link = attempt.link if launch.is_chain else None
        is_told = is_last and (launch.is_chain or attempt.restarts)
        reading = _reading(launch, attempt, job_status) if is_told else None
        if last_starts[attempt.stem] is not attempt:
            state, reason = RESTARTED, None
            reading = diagnose(attempt, failures=launch.paths.results / FAILURES)
        rows.append(AttemptRow(attempt, state, reason, stretch.steps, link, reading, stretch.damaged))
    return rows


def _reading(launch: Launch, attempt: JobAttempt, status: JobStatus) -> Diagnosis | None:
    """Return the diagnosis of a link's end; ``None`` if its state says enough."""
    if status.state.is_live or status.state.is_good:
        return None
    logs = [launch.paths.log(attempt.job_id, extension) for extension in ("out", "err")]
    is_known = status.state.is_final
    return diagnose(
        attempt,
        logs,
        launch.paths.results / FAILURES,
        state=status.state.value if is_known else None,
        reason=status.reason if is_known else None,
        tasks_per_node=launch.manifest.tasks_per_node,
        save="USR1" if launch.manifest.engine == "megatron" else "TERM",
    )


def _end_of(attempt: JobAttempt, status: JobStatus, *, is_last: bool) -> tuple[str, str | None]:
    if not is_last:
        return REQUEUED, "no mark of its end" if attempt.exit_code is None else exit_reason(attempt.exit_code)
    if attempt.task is None:
        return status.state.value, status.reason
    state = status.tasks.get(attempt.task)
    if attempt.exit_code is None:
        return (state or status.state).value, None
    reason = exit_reason(attempt.exit_code) if attempt.exit_code else None
    return (state or (State.FAILED if attempt.exit_code else State.COMPLETED)).value, reason


# --- the diagnosis of an attempt

# The machine, or whoever ended the job, is the cause of these, and the errors of ranks explain nothing.
_NOT_OF_RANKS = (
    "done",
    "saved",
    "cancelled",
    "ended_by_user",
    "deadline",
    "preempted",
    "node_failed",
    "time_limit",
    "lost",
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of the end of an attempt; `first` is the rank that failed first, and its error."""

    rule: str | None
    verdict: str
    why: str
    nodes: tuple[str, ...] = ()
    first: str | None = None
    advice: str | None = None

    def lines(self) -> list[str]:
        """Return it in up to three lines."""
        why = f"{self.why} (at fault: {', '.join(self.nodes)})" if self.nodes else self.why
        return [why, *filter(None, [self.first, self.advice])]

    def to_json(self) -> dict[str, Any]:
        return {
            **attributes(self, "rule", "verdict", "why"),
            "nodes_at_fault": list(self.nodes),
            "first_failure": self.first,
            "advice": self.advice,
        }


def diagnose(
    attempt: JobAttempt,
    logs: Sequence[Path] = (),
    failures: Path | None = None,
    *,
    state: str | None = None,
    reason: str | None = None,
    save: str | None = None,
    tasks_per_node: int = 1,
) -> Diagnosis | None:
    """Return why an attempt ended; ``None`` if it has not ended, as far as is known.

    The job's logs are read only if it did not judge itself. `state` and `reason` are the scheduler's words
    for its end, ``None`` while it lives, or if they are not known.
    """
    if attempt.verdict and attempt.why:
        known = find_rule(attempt.rule)
        nodes = tuple(attempt.excluded.split(",")) if attempt.excluded else ()
        verdict = attempt.verdict if attempt.verdict in ("done", "exclude", "stop") else "continue"
        advice = known.advice if known else None
        diagnosis = Diagnosis(attempt.rule, verdict, attempt.why, nodes, advice=advice)
    elif attempt.is_over or state is not None:
        facts = Facts(attempt.exit_code, attempt.state or state, reason, signal=attempt.signal, save=save)
        hosts = attempt.nodes.split(",") if attempt.nodes else []
        judgement = judge(facts, evidence(logs, failures, attempt.started or 0.0), hosts, tasks_per_node)
        rule = judgement.rule
        diagnosis = Diagnosis(rule.name, judgement.verdict, rule.means, judgement.nodes, advice=rule.advice)
    else:
        return None
    if diagnosis.rule in _NOT_OF_RANKS:
        return diagnosis
    return replace(diagnosis, first=_find_first_failure(attempt, failures, diagnosis.why))


def _find_first_failure(attempt: JobAttempt, failures: Path | None, why: str) -> str | None:
    """Describe the rank that failed first: by its own error, unless that is `why`, else by the judgement."""
    # Marks have whole seconds; a rank of a later link overwrites the error of an earlier link.
    until = math.inf if attempt.ended is None else attempt.ended + 1
    for left in [] if failures is None else read_rank_failures(failures, attempt.started or 0.0, until):
        error = "" if why and left.error.startswith(why) else f": {left.error}"
        return f"rank {left.rank}{f' on {left.host}' if left.host else ''} failed first{error}"
    if attempt.rank is None:
        return None
    return f"rank {attempt.rank}{f' on {attempt.host}' if attempt.host else ''} failed first"
