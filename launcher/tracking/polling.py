"""One question to each scheduler for all of its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import UserError
from launcher.schedulers.base import JobStatus, Scheduler, Ticket
from launcher.schedulers.chains import from_marks_alone, may_go_on
from launcher.slurm.states import State
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
    # Read anew each time: a chain gets further links while it is watched.
    tickets = {launch.paths.directory: launch.ticket for launch in launches}
    for group in by_scheduler(launches):
        told.update(
            _ask_scheduler(group, [ticket for one in group if (ticket := tickets[one.paths.directory])])
        )
    return [
        told.get(launch.paths.directory) or Answer(_without_job(launch), launch.unanswered)
        for launch in launches
    ]


def ask(launches: Sequence[Launch]) -> list[JobStatus]:
    """The same, without whether a scheduler answered."""
    return [answer.status for answer in poll(launches)]


def _ask_scheduler(launches: Sequence[Launch], tickets: Sequence[Ticket]) -> Iterable[tuple[Path, Answer]]:
    if not tickets:
        return []
    tickets = _told_apart(tickets)
    unanswered = None
    try:
        scheduler = scheduler_of(launches[0])
        statuses = {**scheduler.statuses(tickets)}
        if found := _found_again(scheduler, launches, tickets, statuses):
            statuses |= scheduler.statuses(found)
        blind = JobStatus(State.UNKNOWN, "the scheduler did not tell of this job")
    except UserError as error:
        unanswered = error.message.splitlines()[0]
        statuses, blind = {}, JobStatus(State.UNKNOWN, unanswered)
    return [
        (ticket.launch_dir, Answer(statuses.get(ticket.tag) or _marked(ticket, blind), unanswered))
        for ticket in tickets
    ]


def _told_apart(tickets: Sequence[Ticket]) -> list[Ticket]:
    """Return tickets of which each has its own tag: a manifest may be a copy, or claim another's tag."""
    seen: set[str] = set()
    apart = []
    for number, ticket in enumerate(tickets):
        if ticket.tag in seen:
            ticket = replace(ticket, tag=f"{ticket.tag} {number}", argument=ticket.submitted_with)
        seen.add(ticket.tag)
        apart.append(ticket)
    return apart


def _found_again(
    scheduler: Scheduler,
    launches: Sequence[Launch],
    tickets: Sequence[Ticket],
    statuses: Mapping[str, JobStatus],
) -> list[Ticket]:
    """Chains that seem to have ended, and have a further link: the answer to its submission was lost."""
    intents = {launch.paths.directory: launch.intent for launch in launches}
    open_ended = [
        ticket for ticket in tickets if (status := statuses.get(ticket.tag)) and may_go_on(ticket, status)
    ]
    if not open_ended:
        return []
    # All of them: of several in a row the claims may be missing.
    found = scheduler.find_links([replace(intents[ticket.launch_dir], link=None) for ticket in open_ended])
    again = []
    for ticket in open_ended:
        links = dict(zip(ticket.numbers, ticket.jobs, strict=True))
        more = {link: jobs[0] for link, jobs in found.get(ticket.tag, {}).items() if link not in links}
        if more:
            again.append(ticket.with_links(links | more))
    return again


def _marked(ticket: Ticket, blind: JobStatus) -> JobStatus:
    marked = from_marks_alone(ticket)
    return marked if marked and marked.state.is_final else blind


def _without_job(launch: Launch) -> JobStatus:
    if launch.unanswered:
        return JobStatus(State.UNKNOWN, f"whether it became a job cannot be asked: {launch.unanswered}")
    if launch.manifest.error:
        return JobStatus(State.NOT_SUBMITTED, launch.manifest.error.strip().partition("\n")[0])
    if launch.is_without_job:
        why = launch.manifest.unanswered or "its launcher ended before it submitted"
        return JobStatus(State.NOT_SUBMITTED, why)
    why = launch.manifest.unanswered or "being submitted, or its launcher died"
    return JobStatus(State.UNKNOWN, f"{why}: no job of it is known yet")
