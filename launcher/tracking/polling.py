"""One question to each scheduler for all of its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError
from launcher.schedulers.base import JobStatus, State, Ticket
from launcher.schedulers.states import from_marks
from launcher.tracking.launches import Launch, by_scheduler, scheduler_of


@dataclass(frozen=True, slots=True)
class Answer:
    """How a launch's job is; `unanswered` says why its scheduler could not be asked, if it could not."""

    status: JobStatus
    unanswered: str | None = None


def poll(launches: Sequence[Launch]) -> list[Answer]:
    """Ask each scheduler once for all of its jobs; one answer for each launch, in their order.

    A scheduler that cannot be asked does not end the question: its jobs are told from the marks they left,
    or UNKNOWN with the reason.
    """
    told: dict[Path, Answer] = {}
    for group in by_scheduler([launch for launch in launches if launch.ticket]):
        told.update(_ask_scheduler(group))
    return [
        told.get(launch.paths.directory) or Answer(_without_job(launch), launch.unanswered)
        for launch in launches
    ]


def ask(launches: Sequence[Launch]) -> list[JobStatus]:
    """The same, without whether a scheduler answered."""
    return [answer.status for answer in poll(launches)]


def _ask_scheduler(launches: Sequence[Launch]) -> Iterable[tuple[Path, Answer]]:
    tickets = [launch.ticket for launch in launches if launch.ticket]
    unanswered = None
    try:
        statuses = scheduler_of(launches[0]).statuses(tickets)
        blind = JobStatus(State.UNKNOWN, "the scheduler did not tell of this job")
    except UserError as error:
        unanswered = error.message.splitlines()[0]
        statuses, blind = {}, JobStatus(State.UNKNOWN, unanswered)
    return [
        (ticket.launch_dir, Answer(statuses.get(ticket.tag) or _marked(ticket, blind), unanswered))
        for ticket in tickets
    ]


def _marked(ticket: Ticket, blind: JobStatus) -> JobStatus:
    marked = from_marks(ticket.launch_dir, ticket.job_id)
    return marked if marked and marked.state.is_final else blind


def _without_job(launch: Launch) -> JobStatus:
    if launch.unanswered:
        return JobStatus(State.UNKNOWN, f"whether it became a job cannot be asked: {launch.unanswered}")
    if launch.manifest.error:
        return JobStatus(State.NOT_SUBMITTED, launch.manifest.error.strip().splitlines()[0])
    if launch.is_without_job:
        why = launch.manifest.unanswered or "its launcher ended before it submitted"
        return JobStatus(State.NOT_SUBMITTED, why)
    why = launch.manifest.unanswered or "being submitted, or its launcher died"
    return JobStatus(State.UNKNOWN, f"{why}: no job of it is known yet")
