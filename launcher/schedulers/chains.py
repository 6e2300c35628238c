"""Chains: what jobs that go on where the one before them stopped are together. Pure functions and marks.

What the next link waits for, and that it is cancelled when nothing is left to do, is no news.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.schedulers.base import JobStatus, Links, Ticket
from launcher.schedulers.states import ANOTHER_JOB, from_marks, of_life
from launcher.slurm.states import State
from supervisor.marks import ChainEnd, Life, chain_end, read_lives

# Who a job says it is in the mark that ends a chain.
_JOB = "job "
_LEFT = "it left without doing anything: the chain had ended"


def of_chain(ticket: Ticket, statuses: Sequence[JobStatus]) -> JobStatus:
    """What a chain is, by what its jobs are: of the first link first.

    It is what its current link is. That is the one that runs, or else the next one that waits; when the chain
    has ended it is the last one that did something.
    """
    if ticket.links == 1:
        return _unless_it_was_done(statuses[0], ticket)
    end = chain_end(ticket.launch_dir)
    links, lives = _own_links(ticket, statuses)
    jobs, numbers = list(links.jobs), links.numbers
    statuses = [
        _unless_it_left(_or_done(status, lives.get(job)), lives.get(job), end)
        for job, status in links.jobs.items()
    ]
    index = _current(jobs, statuses, lives, end)
    links = replace(links, current=numbers[index], jobs=dict(zip(jobs, statuses, strict=True)))
    status = replace(statuses[index], chain=links)
    if status.state is State.PENDING and index:
        before = statuses[index - 1]
        why = f" ({before.reasons})" if before.reasons else ""
        return _with(status, f"link {numbers[index - 1]} was {before.state.value}{why}")
    if end is not None and _ended_by_user_between(status, lives.get(links.job_id), end):
        return replace(status, state=State.CANCELLED, reason=f"by {end.by}", exit_code=None, why=None)
    if not status.state.is_final or status.state.is_good:
        return status
    if end is not None:
        says_all = status.state is State.CANCELLED or not end.by.startswith(_JOB)
        return status if says_all else _with(status, end.why)
    status = replace(status, reason=status.reasons)
    if status.state is State.CANCELLED and links.job_id not in lives:
        return status  # before it began, and so before it could submit the next one
    if links.current == ticket.links:
        return _with(status, f"the last of {ticket.links} links")
    return _with(status, f"link {links.current} of {ticket.links}, and the next one is not known")


def _own_links(ticket: Ticket, statuses: Sequence[JobStatus]) -> tuple[Links, dict[str, Life]]:
    """Return the jobs of a chain without those of another launch, and the last life of each that began.

    A run may have been removed while its chain waited, and launched anew: a job of the chain of old then has
    the directory of the new launch.
    """
    lives = read_lives(ticket.launch_dir)
    own = {life.job_id: life for life in lives if life.is_of(ticket.tags)}
    foreign = {life.job_id for life in lives}.difference(own)
    known = {
        number: (job, status)
        for number, job, status in zip(ticket.numbers, ticket.jobs, statuses, strict=True)
        if number == 1 or (job not in foreign and status.reason != ANOTHER_JOB)
    }
    return Links(1, ticket.links, dict(known.values()), tuple(known)), own


def _unless_it_was_done(status: JobStatus, ticket: Ticket) -> JobStatus:
    if status.state is not State.NODE_FAIL:
        return status
    lives = [life for life in read_lives(ticket.launch_dir, ticket.job_id) if life.is_of(ticket.tags)]
    return _or_done(status, lives[-1] if lives else None)


def _or_done(status: JobStatus, life: Life | None) -> JobStatus:
    """Return the status of a job; that of its mark if a node failed when all was done."""
    if status.state is State.NODE_FAIL and life is not None and life.verdict == "done":
        return replace(of_life(life), restarts=status.restarts)
    return status


def _unless_it_left(status: JobStatus, life: Life | None, end: ChainEnd | None) -> JobStatus:
    """Return the status of a link; if it left without doing anything, not what its exit code says to Slurm.

    Parameters
    ----------
    life
        The last one that left marks.
    """
    is_good = status.state.is_good
    left = end is not None and (is_good if life is None else life.number < status.restarts)
    if life is not None and (left or (is_good and life.verdict not in (None, "done"))):
        marked = of_life(life)
        if marked.state.is_final and status.state in (State.COMPLETED, State.FAILED):
            return replace(marked, restarts=status.restarts)
    return (
        replace(status, state=State.CANCELLED, reason=_LEFT, exit_code=None) if left and is_good else status
    )


def from_marks_alone(ticket: Ticket) -> JobStatus | None:
    """How a launch's job, or its chain, ended by what it left itself; ``None`` where that does not tell."""
    marked = [from_marks(ticket.launch_dir, job_id) for job_id in ticket.jobs]
    if ticket.links == 1:
        return marked[0]
    if not any(marked):
        return None
    unknown = JobStatus(State.UNKNOWN, "it left no mark")
    told = of_chain(ticket, [status or unknown for status in marked])
    ended = chain_end(ticket.launch_dir) is not None or ticket.numbers[-1] == ticket.links
    # Otherwise there may be a next link.
    return told if told.state.is_good or (told.state.is_final and ended) else None


def may_go_on(ticket: Ticket, status: JobStatus) -> bool:
    """Whether a chain that has come to an end may have a link that nobody has put on record."""
    is_over = status.state.is_final and not status.state.is_good
    return is_over and len(ticket.jobs) < ticket.links and chain_end(ticket.launch_dir) is None


def _current(
    jobs: Sequence[str], statuses: Sequence[JobStatus], lives: dict[str, Life], end: ChainEnd | None
) -> int:
    """The index of the link that counts now."""
    waits = [index for index, status in enumerate(statuses) if status.state is State.PENDING]
    alive = [index for index, told in enumerate(statuses) if told.state.is_live and index not in waits]
    began = [index for index, job_id in enumerate(jobs) if job_id in lives]
    good = [index for index in began if statuses[index].state.is_good]
    if alive:
        return alive[-1]
    if end is not None or good:
        return good[-1] if good else began[-1] if began else 0
    return waits[0] if waits else len(jobs) - 1


def _ended_by_user_between(status: JobStatus, life: Life | None, end: ChainEnd) -> bool:
    """Whether somebody ended a chain whose last link was over by then, and whose next one waited."""
    if end.by.startswith(_JOB) or not status.state.is_final or status.state.is_good:
        return False
    return life is None or life.ended is None or end.ended is None or life.ended < end.ended


def _with(status: JobStatus, told: str) -> JobStatus:
    return replace(status, reason=f"{status.reason}; {told}" if status.reason else told, why=None)
