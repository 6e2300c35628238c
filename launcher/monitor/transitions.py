"""When a job was submitted, began and ended: from its manifest, its marks and how long Slurm says it ran."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from launcher.jobs.launches import Launch
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from launcher.slurm.times import parse_time_limit
from supervisor.marks import JobAttempt, cancelled_at, chain_end


@dataclass(frozen=True, slots=True)
class Transitions:
    """When a job's states changed, in Unix seconds; ``None`` is not known, or has not happened.

    Of a chain `started` and `ended` are those of the link that counts now, of an array those of its first
    and its last task. `last` is when the job came into the state that it is in.
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
    """Work out when the states of a launch's job changed."""
    created = _created(launch)
    if status.state is State.NOT_SUBMITTED:
        return Transitions(last=created)
    job_id = status.chain.job_id if status.chain else launch.manifest.job_id
    if job_id is None:
        return Transitions(submitted=created)
    lives = [life for life in launch.attempts if job_id in (life.job_id, life.job_id.partition("_")[0])]
    newest = list({life.job_id: life for life in lives}.values())  # of each task, or of the one job
    if status.state is State.PENDING:
        # It may have begun before, and been requeued; or the link before it has just ended.
        return Transitions(created, last=_latest([created, *(life.ended for life in launch.attempts)]))
    started, ended = _started(newest, status), None
    if status.state.is_final:
        ended = _ended(launch, job_id, newest, status, started)
        return Transitions(created, started, ended, ended)
    return Transitions(created, started, last=None if status.state is State.UNKNOWN else started)


def _started(lives: Sequence[JobAttempt], status: JobStatus) -> float | None:
    begun = [life.started for life in lives if life.started is not None]
    # A life that is over is not the one that runs.
    if begun and (status.state.is_final or not all(life.is_over for life in lives)):
        return min(begun)
    ran = _seconds(status)
    return time.time() - ran if ran is not None and status.state is State.RUNNING else None


def _ended(
    launch: Launch, job_id: str, lives: Sequence[JobAttempt], status: JobStatus, started: float | None
) -> float | None:
    """The end that the job recorded, else that of who ended it, else when its time was over, else Slurm's."""
    if lives and all(life.ended is not None for life in lives):
        return _latest(life.ended for life in lives)
    by_user = cancelled_at(launch.paths.directory, job_id)
    if by_user is not None:
        return by_user
    ran = _seconds(status)
    if started is not None and ran is not None:
        return started + ran
    if status.ended is not None:
        return status.ended
    end = chain_end(launch.paths.directory) if launch.is_chain else None
    return end.ended if end is not None else None


def _seconds(status: JobStatus) -> int | None:
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
