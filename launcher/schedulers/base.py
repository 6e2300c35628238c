"""What the rest of the launcher knows of a scheduler: one small protocol and the states of a job."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launcher.errors import UserError


class State(enum.Enum):
    """The states of a job, in Slurm's words, and those that only we know."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    DEADLINE = "DEADLINE"
    SUSPENDED = "SUSPENDED"
    NOT_SUBMITTED = "NOT_SUBMITTED"
    # The payload saved and left before its end (exit code 75), to be launched again: FAILED, to Slurm.
    INTERRUPTED = "INTERRUPTED"
    # Asked, and not told: never to be shown as healthy.
    UNKNOWN = "UNKNOWN"

    @property
    def is_final(self) -> bool:
        return self in _FINAL

    @property
    def is_good(self) -> bool:
        return self is State.COMPLETED


_FINAL = {
    State.COMPLETED,
    State.FAILED,
    State.CANCELLED,
    State.TIMEOUT,
    State.OUT_OF_MEMORY,
    State.NODE_FAIL,
    State.PREEMPTED,
    State.DEADLINE,
    State.NOT_SUBMITTED,
    State.INTERRUPTED,
}


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as its scheduler sees it.

    `reason` is the scheduler's own word (why a job waits, how it ended); `nodes` its node list; `elapsed`
    the time it ran, as ``[D-]HH:MM:SS``; `exit_code` is ``None`` until it is known.
    """

    state: State
    reason: str | None = None
    nodes: str | None = None
    elapsed: str | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job to ask about: its id, and the launch directory in which it leaves its own marks."""

    job_id: str
    launch_dir: Path


class NoAnswer(UserError):
    """The scheduler did not answer in time: whether it took the job is not known."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A submission that may have become a job: its launcher died before it wrote down the answer.

    `tag` was given to the script as its argument, so that the job can be told by it; `user` submitted it, at
    `since` (UTC, ISO 8601) or later.
    """

    tag: str
    script: Path
    user: str
    since: str


class Scheduler(Protocol):
    """Where jobs run."""

    def ignored_environment(self) -> list[str]:
        """Say which variables of the user's shell would have changed the submission, and do not."""

    def validate(self, script_text: str) -> str | None:
        """Show the script to the scheduler without submitting it.

        Returns
        -------
        str or None
            What would keep the job waiting, as the cluster is now.

        Raises
        ------
        UserError
            With the scheduler's own words, if it would refuse the script or cannot be reached.
        """

    def submit(self, script: Path, tag: str) -> str:
        """Submit a script that lies in its launch directory; return the job's id.

        Parameters
        ----------
        tag
            Given to the script as its argument: by it the job is found when this answer is lost.

        Raises
        ------
        UserError
            With the scheduler's own words, if it refuses.
        """

    def find(self, intent: Intent) -> str | None:
        """The id of the job that a submission became; ``None`` if the scheduler knows no such job.

        Raises
        ------
        UserError
            If the scheduler cannot be asked.
        """

    def statuses(self, tickets: Iterable[Ticket]) -> Mapping[str, JobStatus]:
        """The status of each job, by job id, in one question for all of them."""

    def cancel(self, job_id: str) -> None:
        """End a job."""
