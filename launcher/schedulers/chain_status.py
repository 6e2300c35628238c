"""Derive the status of a chain of jobs from the statuses of its jobs and their marks.

Successors that are pending or cancelled do not change the state of a chain whose work is done, or that
has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.schedulers.base import ChainJobs, JobRef, JobStatus
from launcher.schedulers.job_status import ANOTHER_JOB, read_marks, status_of_attempt
from launcher.slurm.states import State
from slipway.common.node.marks import ChainEnd, JobAttempt, chain_end

# The prefix of a job's id in the mark that ends a chain.
_JOB = "job "
_LEFT = "it left without doing anything: the chain had ended"


def status_of_chain(ref: JobRef, statuses: Sequence[JobStatus]) -> JobStatus:
    """Return the status of a chain from those of its jobs, the first link first.

    It is that of the current link: the running one, else the next waiting one; of a chain that has ended, the
    last one that trained.
    """
    if ref.is_repeated and len(ref.links) > 1:
        return _status_of_repeated(ref, statuses)
    if ref.max_links == 1:
        # Its marks are read only if they may count.
        marked = ref.attempts(ref.job_id) if statuses[0].state is State.NODE_FAIL else []
        own = [attempt for attempt in marked if attempt.is_of(ref.tags)]
        return _apply_done_mark(statuses[0], own[-1] if own else None)
    end = chain_end(ref.launch_dir)
    links, attempts = _select_own_links(ref, statuses)
    jobs, numbers = list(links.jobs), links.numbers
    statuses = [
        _apply_left_mark(_apply_done_mark(status, attempts.get(job)), attempts.get(job), end)
        for job, status in links.jobs.items()
    ]
    index = _find_current(jobs, statuses, attempts, end)
    links = links._replace(current=numbers[index], jobs=dict(zip(jobs, statuses, strict=True)))
    status = replace(statuses[index], chain=links)
    if status.state is State.PENDING and index:
        before = statuses[index - 1]
        why = f" ({before.full_reason})" if before.full_reason else ""
        return _add_reason(status, f"link {numbers[index - 1]} was {before.state.value}{why}")
    if end is not None and _is_ended_by_user(status, attempts.get(links.job_id), end):
        return replace(status, state=State.CANCELLED, reason=f"by {end.by}", exit_code=None, why=None)
    if not status.state.is_final or status.state.is_good:
        return status
    if end is not None:
        says_all = status.state is State.CANCELLED or not end.by.startswith(_JOB)
        return status if says_all else _add_reason(status, end.why)
    status = replace(status, reason=status.full_reason)
    if status.state is State.CANCELLED and links.job_id not in attempts:
        return status  # before it began, and so before it could submit the next one
    if links.current == ref.max_links:
        return _add_reason(status, f"the last of {ref.max_links} links")
    return _add_reason(status, f"link {links.current} of {ref.max_links}, and the next one is not known")


def _status_of_repeated(ref: JobRef, statuses: Sequence[JobStatus]) -> JobStatus:
    """Return the status of the running job, or of the first, which waits for the end of the training."""
    runs = [index for index, status in enumerate(statuses) if status.state.is_live]
    running = [index for index in runs if statuses[index].state is not State.PENDING]
    index = running[-1] if running else 0
    jobs, numbers = dict(zip(ref.links.values(), statuses, strict=True)), list(ref.links)
    links = ChainJobs(numbers[index], len(jobs), jobs, numbers, is_repeated=True)
    return replace(statuses[index], chain=links)


def _select_own_links(ref: JobRef, statuses: Sequence[JobStatus]) -> tuple[ChainJobs, dict[str, JobAttempt]]:
    """Return the jobs of a chain without those of another launch, and the last attempt of each that began.

    A run may have been removed while its chain waited, and launched again: a job of the old chain then has
    the directory of the new launch.
    """
    attempts = ref.attempts()
    own = {attempt.job_id: attempt for attempt in attempts if attempt.is_of(ref.tags)}
    foreign = {attempt.job_id for attempt in attempts}.difference(own)
    known = {
        number: (job, status)
        for (number, job), status in zip(ref.links.items(), statuses, strict=True)
        if number == 1 or (job not in foreign and status.reason != ANOTHER_JOB)
    }
    return ChainJobs(1, ref.max_links, dict(known.values()), list(known)), own


def _apply_done_mark(status: JobStatus, attempt: JobAttempt | None) -> JobStatus:
    """Return the status of a job, or of its mark if its node or supervisor died after the training's end."""
    if status.state in (State.NODE_FAIL, State.FAILED) and attempt is not None and attempt.verdict == "done":
        return replace(status_of_attempt(attempt), restarts=status.restarts)
    return status


def _apply_left_mark(status: JobStatus, attempt: JobAttempt | None, end: ChainEnd | None) -> JobStatus:
    """Return the status of a link, by its last attempt; CANCELLED if it left without doing anything."""
    is_good = status.state.is_good
    left = end is not None and (is_good if attempt is None else attempt.number < status.restarts)
    if attempt is not None and (left or (is_good and attempt.verdict not in (None, "done"))):
        marked = status_of_attempt(attempt)
        if marked.state.is_final and status.state in (State.COMPLETED, State.FAILED):
            return replace(marked, restarts=status.restarts)
    return (
        replace(status, state=State.CANCELLED, reason=_LEFT, exit_code=None) if left and is_good else status
    )


def read_marks_alone(ref: JobRef) -> JobStatus | None:
    """Return the final status of a launch's job or chain by its marks alone; ``None`` if unknown."""
    marked = [read_marks(job, job.job_id) for job in ref.jobs]
    if ref.max_links == 1:
        return marked[0]  # of a repeated stage, the one after the training
    if not any(marked):
        return None
    unknown = JobStatus(State.UNKNOWN, "it left no mark")
    chain = status_of_chain(ref, [status or unknown for status in marked])
    ended = chain_end(ref.launch_dir) is not None or max(ref.links) == ref.max_links
    # Otherwise there may be a next link.
    return chain if chain.state.is_good or (chain.state.is_final and ended) else None


def may_go_on(ref: JobRef, status: JobStatus) -> bool:
    """Return True if a chain that has ended may have an unrecorded link."""
    is_over = status.state.is_final and not status.state.is_good
    return is_over and len(ref.links) < ref.max_links and chain_end(ref.launch_dir) is None


def _find_current(
    jobs: Sequence[str], statuses: Sequence[JobStatus], attempts: dict[str, JobAttempt], end: ChainEnd | None
) -> int:
    waits = [index for index, status in enumerate(statuses) if status.state is State.PENDING]
    alive = [index for index, status in enumerate(statuses) if status.state.is_live and index not in waits]
    began = [index for index, job_id in enumerate(jobs) if job_id in attempts]
    good = [index for index in began if statuses[index].state.is_good]
    if alive:
        return alive[-1]
    if end is not None or good:
        return good[-1] if good else began[-1] if began else 0
    return waits[0] if waits else len(jobs) - 1


def _is_ended_by_user(status: JobStatus, attempt: JobAttempt | None, end: ChainEnd) -> bool:
    """Return True if a user ended a chain while its next link waited and no link ran."""
    if end.by.startswith(_JOB) or not status.state.is_final or status.state.is_good:
        return False
    return attempt is None or attempt.ended is None or end.ended is None or attempt.ended < end.ended


def _add_reason(status: JobStatus, addition: str) -> JobStatus:
    return replace(status, reason=f"{status.reason}; {addition}" if status.reason else addition, why=None)
