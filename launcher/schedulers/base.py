"""The interface of a scheduler, and the values that it takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from launcher.errors import NOT_KNOWN, UserError
from launcher.slurm.states import Action, State
from slipway.common.node.marks import JobAttempt, read_attempts


class ChainJobs(NamedTuple):
    """The statuses of the known jobs of a chain by their ids, in the order of their links.

    `numbers` are those of their links, from 1 on; the job of a link between them may be unknown. `current` is
    the number of the current link. With `is_repeated` the jobs are those of a repeatedly submitted stage; the
    first one comes last.
    """

    current: int
    max_links: int
    jobs: Mapping[str, JobStatus]
    numbers: Sequence[int]
    is_repeated: bool = False

    @property
    def job_id(self) -> str:
        return list(self.jobs)[self.numbers.index(self.current)]

    @property
    def waiting(self) -> list[str]:
        """Return the ids of the waiting jobs, the next one first."""
        return [job_id for job_id, status in self.jobs.items() if status.state is State.PENDING]

    @property
    def after_current(self) -> list[str]:
        if self.is_repeated:
            return [job_id for job_id in self.jobs if job_id != self.job_id]
        return list(self.jobs)[self.numbers.index(self.current) + 1 :]

    def __str__(self) -> str:
        return f"{self.current}" if self.is_repeated else f"{self.current}/{self.max_links}"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as its scheduler sees it.

    `reason` is the scheduler's word for the wait or the end of a job; `why` is the job's own judgement of its
    end, if it says more. `elapsed` is the time it ran, as ``[D-]HH:MM:SS``, `restarts` counts its requeues.
    `tasks` are the states of an array's tasks by their numbers, which the other fields summarize; of a
    `chain` they describe the current job. `ended` is the end in Unix seconds of a job without a mark of it,
    if the scheduler was asked.
    """

    state: State
    reason: str | None = None
    nodes: str | None = None
    elapsed: str | None = None
    exit_code: int | None = None
    restarts: int = 0
    tasks: Mapping[str, State] = field(default_factory=dict)
    chain: ChainJobs | None = None
    why: str | None = None
    ended: float | None = field(default=None, compare=False)

    @classmethod
    def extending(cls, status: JobStatus, **values: Any) -> Self:
        """Return a status of this class from another one, with further values."""
        return cls(**status.values() | values)

    def values(self) -> dict[str, Any]:
        """Return the values of the fields by their names."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def full_reason(self) -> str | None:
        """Return the reason and the job's judgement in one line."""
        return ": ".join(part for part in (self.reason, self.why) if part) or None

    @property
    def has_restarted(self) -> bool:
        """Return True if the trainer began more than once."""
        return self.restarts > 0 or (self.chain is not None and self.chain.current > 1)


@dataclass(frozen=True, slots=True)
class JobRef:
    """A job to ask about, or all known jobs of a chain, which leave their marks in `launch_dir`.

    `links` are their ids by the numbers of their links, ``{1: "17"}`` without a chain; a point of a sweep is
    one task of an array, ``17_2``. `tags` are those that the marks may have, first the launch's own. The last
    one is in the name of the submitted script: without it, a job of this id is another one, after Slurm reset
    its ids. Without a queue the job runs on `host`, from which it was submitted. A chain has `max_links` jobs
    at most; with `is_repeated` its further ones are those of a stage that is resubmitted while a training
    goes on. `marks` caches the attempts for one question.
    """

    links: Mapping[int, str]
    launch_dir: Path
    tags: Sequence[str]
    host: str = ""
    max_links: int = 1
    is_repeated: bool = False
    marks: dict[str | None, list[JobAttempt]] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        first: dict[str, int] = {}  # marks may name one job for several links
        for link, job_id in self.links.items():
            first.setdefault(job_id, link)
        object.__setattr__(self, "links", {link: job_id for job_id, link in first.items()})

    def attempts(self, job_id: str | None = None) -> list[JobAttempt]:
        """Return the attempts of a job or an array, by default of all; the `jobs` share one reading."""
        if self.marks is None:
            return read_attempts(self.launch_dir, job_id)
        if None not in self.marks:
            self.marks[None] = read_attempts(self.launch_dir)
            for attempt in self.marks[None]:
                for key in {attempt.job_id, attempt.job_id.partition("_")[0]}:
                    self.marks.setdefault(key, []).append(attempt)
        return self.marks.get(job_id, [])

    @property
    def job_id(self) -> str:
        """Return the id of the job, of a chain that of its first one."""
        return self.links[1]

    @property
    def jobs(self) -> list[JobRef]:
        """Return a reference to each job of a chain; their marks are read once for all of them."""
        marks: dict[str | None, list[JobAttempt]] = {}
        return [replace(self, links={1: job_id}, max_links=1, marks=marks) for job_id in self.links.values()]

    @property
    def parent_id(self) -> str:
        """Return the id of the job, or of the array that it is a task of."""
        return self.job_id.partition("_")[0]

    @property
    def task(self) -> int | None:
        """Return the number of an array's task."""
        number = self.job_id.partition("_")[2]
        return int(number) if number else None

    @property
    def submitted_tag(self) -> str:
        return self.tags[-1]


class Acceptance(NamedTuple):
    """The answer to an accepted script: the reason for which its job would wait, and the site's message."""

    waits: str | None = None
    notice: str | None = None


class NoAnswer(UserError):
    """The scheduler did not answer in time: it may have accepted the job."""

    exit_code = NOT_KNOWN


class NotHeld(UserError):
    """A job to release is not held."""


# The ids of jobs by the tags of their submissions and the numbers of their links, the oldest job first.
FoundJobs = Mapping[str, Mapping[int, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Submission:
    """A script in its launch directory to submit, or that was submitted, and may have become a job.

    The `tag` in the name that the script is submitted under identifies the job if the answer is lost; it is
    the script's last argument too, before which the second `link` of a chain and later ones get their number.
    `since` is the earliest time of the submission (UTC, ISO 8601). `after` is a dependency, such as
    ``afterok:17``, that replaces the header's: if it can never be satisfied, the job is cancelled. `exclude`
    are the nodes to avoid, in place of the header's.
    """

    tag: str
    script: Path
    user: str
    since: str
    link: int = 1
    after: str | None = None
    exclude: str | None = None


class Scheduler(Protocol):
    """The place where jobs run.

    All but `act`, which returns the errors, raise UserError if it refuses or cannot be asked. An error of the
    file system, in which jobs leave their marks, stays an OSError.
    """

    def ignored_environment(self) -> dict[str, str]:
        """Return the variables of the user's shell that the submission ignores."""

    def validate(self, script_text: str) -> Acceptance:
        """Return the scheduler's answer to a script; raise UserError if it would refuse the job."""

    def submit(self, submission: Submission) -> str:
        """Submit a script; return the job's id."""

    def find(self, submissions: Sequence[Submission]) -> FoundJobs:
        """Return the jobs that submissions became, those of all links of a chain, with one question."""

    def locate(self, job_id: str) -> Path | None:
        """Return the submitted script of a job; ``None`` for an unknown job."""

    def scripts(self) -> Sequence[Path]:
        """Return the scripts of this user's jobs that the scheduler still knows."""

    def statuses(self, refs: Sequence[JobRef]) -> Sequence[JobStatus]:
        """Return the status of each job, with one question for all of them."""

    def act(self, action: Action, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        """Act on jobs, in no order, with few questions; return the errors by job.

        SAVE makes jobs save and end, as before a time limit. A refusal of one job does not affect the others;
        releasing a job that is not held is `NotHeld`.
        """
