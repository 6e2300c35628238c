"""The interface of a scheduler, and the values that it takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from launcher.errors import NOT_KNOWN, UserError
from launcher.slurm.states import Action, State


@dataclass(frozen=True, slots=True)
class ChainJobs:
    """The statuses of the known jobs of a chain by their ids, in the order of their links.

    `current` is the number of the link that counts now, from 1 on; `link_numbers` are those of the jobs, if
    the job of a link between them is not known. With `is_repeated` the jobs are those of a stage that is
    submitted again and again; the first one comes last.
    """

    current: int
    max_links: int
    jobs: Mapping[str, JobStatus]
    link_numbers: tuple[int, ...] = ()
    is_repeated: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the number of each job's link."""
        return self.link_numbers or tuple(range(1, len(self.jobs) + 1))

    @property
    def job_id(self) -> str:
        """Return the id of the current job."""
        return list(self.jobs)[self._index]

    @property
    def waiting(self) -> list[str]:
        """Return the ids of the waiting jobs, the next one first."""
        return [job_id for job_id, status in self.jobs.items() if status.state is State.PENDING]

    @property
    def after_current(self) -> list[str]:
        """Return the ids of the jobs after the current one."""
        if self.is_repeated:
            return [job_id for job_id in self.jobs if job_id != self.job_id]
        return list(self.jobs)[self._index + 1 :]

    @property
    def _index(self) -> int:
        return self.numbers.index(self.current)

    def __str__(self) -> str:
        return f"{self.current}" if self.is_repeated else f"{self.current}/{self.max_links}"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as its scheduler sees it.

    Attributes
    ----------
    reason
        The scheduler's own word: why a job waits, how it ended.
    elapsed
        The time it ran, as ``[D-]HH:MM:SS``.
    restarts
        The number of times the job was requeued.
    tasks
        The state of each task of an array by its number; the other fields summarize them.
    chain
        The jobs of a chain; the other fields are about the current one.
    why
        The job's own judgement of its end, if it says more.
    ended
        When a job that left no mark of its end ended, in Unix seconds, if the scheduler was asked for that.
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

    @property
    def full_reason(self) -> str | None:
        """Return the reason and why the job ended so, in one line."""
        return ": ".join(part for part in (self.reason, self.why) if part) or None

    @property
    def has_restarted(self) -> bool:
        """Return True if the trainer began more than once."""
        return self.restarts > 0 or (self.chain is not None and self.chain.current > 1)


@dataclass(frozen=True, slots=True)
class JobRef:
    """A job to ask about, which leaves its marks in `launch_dir`; of a chain the first, with `later_jobs`.

    Attributes
    ----------
    job_id
        A point of a sweep is one task of an array, ``17_2``.
    tag, array_tag
        The tags of the launch and of its sweep's array, in the name of the submitted script: a job of the
        same id without it is another one, of a Slurm whose ids began again.
    host
        The host of the submission, on which the job runs if there is no queue.
    links, link_numbers
        The largest number of jobs of a chain, and the numbers of all known ones if one between is not known.
    tags
        All tags that the job's marks may have.
    is_repeated
        The further jobs are those of a stage that is submitted again and again while a training goes on.
    """

    job_id: str
    launch_dir: Path
    tag: str
    host: str
    array_tag: str | None = None
    later_jobs: tuple[str, ...] = ()
    links: int = 1
    link_numbers: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()
    is_repeated: bool = False

    @property
    def jobs(self) -> tuple[str, ...]:
        """Return the ids of all known jobs of a chain, or of the only job."""
        return (self.job_id, *self.later_jobs)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the number of each job's link."""
        return self.link_numbers or tuple(range(1, len(self.jobs) + 1))

    def with_links(self, links: Mapping[int, str]) -> JobRef:
        """Return a copy with the jobs of a chain by the numbers of their links; the first is its own."""
        later = {link: links[link] for link in sorted(links) if link > 1}
        return replace(self, later_jobs=tuple(later.values()), link_numbers=(1, *later))

    @property
    def link_refs(self) -> list[JobRef]:
        """Return a reference for each job of a chain."""
        return [replace(self, job_id=job_id, later_jobs=(), links=1, link_numbers=()) for job_id in self.jobs]

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
        """Return the tag in the name of the submitted script."""
        return self.array_tag or self.tag


class NoAnswer(UserError):
    """The scheduler did not answer in time: it may have accepted the job."""

    exit_code = NOT_KNOWN


# The ids of jobs by the tags of their submissions and the numbers of their links, the oldest job first.
FoundJobs = Mapping[str, Mapping[int, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class PendingSubmission:
    """A submission that may have become a job: its launcher died before it recorded the answer.

    The `tag` in the name of the submitted script identifies the job; `since` is the earliest time of the
    submission (UTC, ISO 8601); without a `link` all of a chain are meant. `after` and `exclude` are as in
    `Scheduler.submit`.
    """

    tag: str
    script: Path
    user: str
    since: str
    link: int | None = 1
    after: str | None = None
    exclude: str | None = None


class Scheduler(Protocol):
    """The place where jobs run.

    All but `act`, which returns the errors, raise UserError if it refuses or cannot be asked. An error of the
    file system, in which jobs leave their marks, stays an OSError.
    """

    def ignored_environment(self) -> list[str]:
        """Describe the variables of the user's shell that would have changed the submission, and do not."""

    def validate(self, script_text: str) -> str | None:
        """Show the script to the scheduler without submitting it; raise UserError if it would be refused.

        Return what would keep the job waiting, as the cluster is now.
        """

    def submit(
        self, script: Path, tag: str, *, link: int = 1, after: str | None = None, exclude: str | None = None
    ) -> str:
        """Submit a script that lies in its launch directory; return the job's id.

        Parameters
        ----------
        tag
            In the name that the script is submitted under, which identifies the job if this answer is lost;
            and the script's last argument.
        link
            The number of the job in its chain; from the second on the script gets it as an argument too.
        after
            A dependency, such as ``afterok:17``, that replaces the header's. If it can never be satisfied,
            the job is cancelled.
        exclude
            The nodes to avoid, in place of the header's.
        """

    def find(self, submissions: Sequence[PendingSubmission]) -> FoundJobs:
        """Return the jobs that submissions became, with one question for all."""

    def locate(self, job_id: str) -> Path | None:
        """Return the script that a job was submitted with; ``None`` for a job that is not known."""

    def scripts(self) -> Sequence[Path]:
        """Return the scripts of this user's jobs that the scheduler still knows."""

    def statuses(self, refs: Sequence[JobRef]) -> Mapping[str, JobStatus]:
        """Return the status of each job, by tag, with one question for all of them."""

    def act(self, action: Action, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        """Act on jobs, in no order, with few questions; return the errors by job.

        What is to save saves and leaves, as before a time limit. A refusal about one job keeps nothing from
        the others; a job to release that is not held is `NotHeld`.
        """
