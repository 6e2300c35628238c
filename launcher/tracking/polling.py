"""One question to each scheduler for all of its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import UserError
from launcher.schedulers.base import JobRef, JobStatus, Scheduler
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
    refs = {launch.paths.directory: launch.ref for launch in launches}
    for group in by_scheduler(launches):
        told.update(_ask_scheduler(group, [ref for one in group if (ref := refs[one.paths.directory])]))
    return [
        told.get(launch.paths.directory) or Answer(_without_job(launch), launch.unanswered)
        for launch in launches
    ]


def ask(launches: Sequence[Launch]) -> list[JobStatus]:
    """The same, without whether a scheduler answered."""
    return [answer.status for answer in poll(launches)]


def _ask_scheduler(launches: Sequence[Launch], refs: Sequence[JobRef]) -> Iterable[tuple[Path, Answer]]:
    if not refs:
        return []
    refs = _told_apart(refs)
    unanswered = None
    try:
        scheduler = scheduler_of(launches[0])
        statuses = {**scheduler.statuses(refs)}
        if found := _found_again(scheduler, launches, refs, statuses):
            statuses |= scheduler.statuses(found)
        blind = JobStatus(State.UNKNOWN, "the scheduler did not tell of this job")
    except UserError as error:
        unanswered = error.message.splitlines()[0]
        statuses, blind = {}, JobStatus(State.UNKNOWN, unanswered)
    return [
        (ref.launch_dir, Answer(statuses.get(ref.tag) or _marked(ref, blind), unanswered)) for ref in refs
    ]


def _told_apart(refs: Sequence[JobRef]) -> list[JobRef]:
    """Return tickets of which each has its own tag: a manifest may be a copy, or claim another's tag."""
    seen: set[str] = set()
    apart = []
    for number, ref in enumerate(refs):
        if ref.tag in seen:
            ref = replace(ref, tag=f"{ref.tag} {number}", array_tag=ref.submitted_tag)
        seen.add(ref.tag)
        apart.append(ref)
    return apart


def _found_again(
    scheduler: Scheduler,
    launches: Sequence[Launch],
    refs: Sequence[JobRef],
    statuses: Mapping[str, JobStatus],
) -> list[JobRef]:
    """Chains that seem to have ended, and have a further link: the answer to its submission was lost."""
    submissions = {launch.paths.directory: launch.submission for launch in launches}
    open_ended = [ref for ref in refs if (status := statuses.get(ref.tag)) and may_go_on(ref, status)]
    if not open_ended:
        return []
    # All of them: of several in a row the claims may be missing.
    found = scheduler.find_links([replace(submissions[ref.launch_dir], link=None) for ref in open_ended])
    again = []
    for ref in open_ended:
        links = dict(zip(ref.numbers, ref.jobs, strict=True))
        more = {link: jobs[0] for link, jobs in found.get(ref.tag, {}).items() if link not in links}
        if more:
            again.append(ref.with_links(links | more))
    return again


def _marked(ref: JobRef, blind: JobStatus) -> JobStatus:
    marked = from_marks_alone(ref)
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
