"""What the rest of the launcher knows of a scheduler: one small protocol and the states of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from launcher.errors import UserError
from launcher.exit_codes import NOT_KNOWN
from launcher.slurm.states import State


@dataclass(frozen=True, slots=True)
class Links:
    """The jobs of a chain that are known, by their ids, in the order of their numbers, which begin with 1.

    `current` is the number of the one that counts now; `most` of how many there are at most; `numbered`
    has the numbers of all, where nobody knows the job of one between them.
    """

    current: int
    most: int
    jobs: Mapping[str, JobStatus]
    numbered: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each job."""
        return self.numbered or tuple(range(1, len(self.jobs) + 1))

    @property
    def job_id(self) -> str:
        """The id of the job that counts now."""
        return list(self.jobs)[self._index]

    @property
    def waiting(self) -> list[str]:
        """The ids of those that wait, the next one first."""
        return [job_id for job_id, status in self.jobs.items() if status.state is State.PENDING]

    @property
    def beyond(self) -> list[str]:
        """The ids of those after the current one."""
        return list(self.jobs)[self._index + 1 :]

    @property
    def _index(self) -> int:
        return self.numbers.index(self.current)

    def __str__(self) -> str:
        return f"{self.current}/{self.most}"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as its scheduler sees it.

    `reason` is the scheduler's own word (why a job waits, how it ended); `nodes` its node list; `elapsed`
    the time it ran, as ``[D-]HH:MM:SS``; `exit_code` is ``None`` until it is known. `restarts` is how often
    the job was requeued. Of an array `tasks` has the state of each task by its number, and the other fields
    sum them up. Of a chain `chain` has all its jobs, and the other fields are about the current one. `why` is
    what the job itself found out about its end, where that says more. `ended` is when it ended, in Unix
    seconds, where the scheduler was asked for that: of a job that left no mark of its end.
    """

    state: State
    reason: str | None = None
    nodes: str | None = None
    elapsed: str | None = None
    exit_code: int | None = None
    restarts: int = 0
    tasks: Mapping[str, State] = field(default_factory=dict)
    chain: Links | None = None
    why: str | None = None
    ended: float | None = field(default=None, compare=False)

    @property
    def reasons(self) -> str | None:
        """The reason and why it ended so, in one line."""
        return ": ".join(part for part in (self.reason, self.why) if part) or None

    @property
    def began_again(self) -> bool:
        """Whether the trainer began more than once."""
        return self.restarts > 0 or (self.chain is not None and self.chain.current > 1)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job to ask about.

    `tag` is in the name that its script was submitted under: a job of the same id without it is another one,
    of a Slurm that counts anew. `launch_dir` is where the job leaves its own marks; `host` is where it was
    submitted, and where it runs if there is no queue. A point of a sweep is one task of an array, ``17_2``,
    whose script was submitted with another tag, its `argument`. Of a chain of at most `links` jobs `job_id`
    is the first, and `later` are the others that are known; `numbered` has the numbers of all, where one
    between them is not known. `tags` are all that its marks may tell.
    """

    job_id: str
    launch_dir: Path
    tag: str
    host: str
    argument: str | None = None
    later: tuple[str, ...] = ()
    links: int = 1
    numbered: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def jobs(self) -> tuple[str, ...]:
        """The ids of all jobs of a chain that are known; otherwise just the one."""
        return (self.job_id, *self.later)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each of these in the chain."""
        return self.numbered or tuple(range(1, len(self.jobs) + 1))

    def with_links(self, links: Mapping[int, str]) -> Ticket:
        """Return it with the jobs of a chain by the numbers of their links, of which the first is its own."""
        later = {link: links[link] for link in sorted(links) if link > 1}
        return replace(self, later=tuple(later.values()), numbered=(1, *later))

    @property
    def each(self) -> list[Ticket]:
        """The jobs of a chain, each as one of its own."""
        return [replace(self, job_id=job_id, later=(), links=1, numbered=()) for job_id in self.jobs]

    @property
    def of(self) -> str:
        """The id of the job, or of the array that it is a task of."""
        return self.job_id.partition("_")[0]

    @property
    def task(self) -> int | None:
        """Its number, if it is a task of an array."""
        number = self.job_id.partition("_")[2]
        return int(number) if number else None

    @property
    def submitted_with(self) -> str:
        """The tag in the name of the script that was submitted."""
        return self.argument or self.tag


class NoAnswer(UserError):
    """The scheduler did not answer in time: whether it took the job is not known."""

    exit_code = NOT_KNOWN


@dataclass(frozen=True, slots=True)
class Intent:
    """A submission that may have become a job: its launcher died before it wrote down the answer.

    `tag` is in the name that the script was submitted under, which tells the job; `user` submitted it, at
    `since` (UTC, ISO 8601) or later. Of a chain it is the `link` that is meant, all of them where that is
    ``None``; `after` is what it waits for besides its header's, as ``sbatch --dependency`` takes it, and
    `exclude` are the nodes to keep off in place of its header's, as ``sbatch --exclude`` takes them.
    """

    tag: str
    script: Path
    user: str
    since: str
    link: int | None = 1
    after: str | None = None
    exclude: str | None = None


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

    def submit(
        self, script: Path, tag: str, *, link: int = 1, after: str | None = None, exclude: str | None = None
    ) -> str:
        """Submit a script that lies in its launch directory; return the job's id.

        Parameters
        ----------
        tag
            In the name that the script is submitted under, by which the job is found when this answer is
            lost; and the script's last argument.
        link
            Which job of a chain it is; from the second on the script is given that too.
        after
            What it waits for, such as ``afterok:17``, in place of what its header says. Where that can never
            come true, the job is cancelled.
        exclude
            The nodes to keep off, in place of what its header says.

        Raises
        ------
        UserError
            With the scheduler's own words, if it refuses.
        """

    def find(self, intents: Sequence[Intent]) -> Mapping[str, Sequence[str]]:
        """The ids of the jobs that submissions became, by tag, in one question for all; the oldest job first.

        A tag without a job is left out.

        Raises
        ------
        UserError
            If the scheduler cannot be asked.
        """

    def find_links(self, intents: Sequence[Intent]) -> Mapping[str, Mapping[int, Sequence[str]]]:
        """`find` for the jobs of chains, by the numbers of their links.

        Raises
        ------
        UserError
            If the scheduler cannot be asked.
        """

    def locate(self, job_id: str) -> Path | None:
        """The script that a job was submitted with; ``None`` if the scheduler does not know the job.

        Raises
        ------
        UserError
            If the scheduler cannot be asked.
        """

    def scripts(self) -> Sequence[Path]:
        """The scripts of this user's own jobs that the scheduler still knows; others' are passed over.

        Raises
        ------
        UserError
            If the scheduler cannot be asked.
        """

    def statuses(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """The status of each job, by tag, in one question for all of them."""

    def cancel(self, job_id: str) -> None:
        """End a job.

        Raises
        ------
        UserError
            With the scheduler's own words, if it refuses; this goes for the next three too.
        """

    def cancel_all(self, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        """End many jobs, in no order, with few questions; return what went wrong, by job.

        One that is refused keeps none of the others.
        """

    def save_all(self, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        """`save` for many jobs, as `cancel_all` is `cancel` for many."""

    def hold_all(self, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        """`hold` for many jobs, as `cancel_all` is `cancel` for many."""

    def release_all(self, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        """`release` for many jobs, as `cancel_all` is `cancel` for many; `NotHeld` of one that is not."""

    def save(self, job_id: str) -> None:
        """Let a running job's payload save and leave, as its script does before a time limit."""

    def hold(self, job_id: str) -> None:
        """Keep a waiting job from starting."""

    def release(self, job_id: str) -> None:
        """Let a held job start; `NotHeld` if it is not held."""
