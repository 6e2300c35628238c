"""What the queue, the accounting and the marks of a job tell, as one `JobStatus`. Pure functions."""

from __future__ import annotations

import pwd
import signal
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from launcher.schedulers.arrays import declared_tasks, sum_up
from launcher.schedulers.base import JobStatus, Ticket
from launcher.slurm.hostlists import expand_tasks
from launcher.slurm.records import LAUNCH_FAILURE, Record
from launcher.slurm.states import State, why_waiting
from supervisor.marks import Life, cancelled_by, read_lives
from supervisor.rules import EXIT_INTERRUPTED
from supervisor.slurm_states import END_REASONS, FINAL, STATES, plain_word

INTERRUPTED_REASON = "saved before its end: launching again continues"

ANOTHER_JOB = "Slurm has another job of this id now, and tells nothing of this one"
_FORGOTTEN = "the scheduler does not know this job"
# Why Slurm itself cancels a job (--kill-on-invalid-dep), such as a stage whose parent failed.
_NEVER = ("DependencyNeverSatisfied", "what it waited for failed, or cannot happen any more")
# Slurm keeps no record of a task that was cancelled by its number before it began.
_CANCELLED_BEFORE = JobStatus(State.CANCELLED, "before it began")
_NOT_BEGUN = JobStatus(State.UNKNOWN, "it has not begun, as far as its marks tell")


def status_of(record: Record) -> JobStatus:
    """One record as a status."""
    state, code = record.state, record.exit_code
    if state is State.UNKNOWN:
        told = f"Slurm says {record.word!r}"
        return JobStatus(state, told, record.nodes, record.elapsed, restarts=record.restarts)
    if not state.is_final or state is State.DEADLINE:
        code = None
    elif code == 0 and not state.is_good:
        code = None  # Slurm has no exit code for a job that it ended itself, and prints a zero
    state = _interrupted_if_saved(state, code)
    reason = _reason(state, record, code)
    return JobStatus(state, reason, record.nodes, record.elapsed, code, record.restarts)


def from_marks(launch_dir: Path, job_id: str | None = None) -> JobStatus | None:
    """What the job itself left in its launch directory; ``None`` where it left nothing.

    A job that began and recorded no end is UNKNOWN: it may run, and it may have been killed. So is the task
    of an array that has not begun.

    Parameters
    ----------
    job_id
        Marks of another job are passed over; that of an array's task is told as a job of its own.
    """
    marked = _marked(launch_dir, job_id)
    if None in marked or not marked:
        return marked.get(None)
    task = (job_id or "").partition("_")[2]
    if task:
        return marked[int(task)]
    tasks = {number: status for number, status in marked.items() if number is not None}
    return sum_up({**dict.fromkeys(declared_tasks(launch_dir), _NOT_BEGUN), **tasks})


def cancelled(status: JobStatus, ticket: Ticket) -> JobStatus:
    """A job that is gone, as one that was cancelled, if it was: its own marks cannot tell."""
    by = cancelled_by(ticket.launch_dir, ticket.job_id)
    if by is None or status.state not in (State.UNKNOWN, State.FAILED, State.CANCELLED):
        return status
    return replace(status, state=State.CANCELLED, reason=f"by {by}")


def of_ticket(
    ticket: Ticket, live: Sequence[Record], accounted: Sequence[Record], blind: str | None = None
) -> JobStatus:
    """What a job is, by all that Slurm tells of its id, and by its marks.

    A record without the ticket's tag is of another job: Slurm counts anew, or it is another Slurm.

    Parameters
    ----------
    live
        What squeue said of the id.
    accounted
        The same of sacct, each life of the job, in their order.
    blind
        Why the accounting could not be asked.
    """
    ours = [record for record in live if record.tag == ticket.submitted_with]
    # The accounting learns a job's command and directory late; before Slurm 21.08 it has no commands.
    accounted = [record for record in accounted if record.command or record.work_dir]
    past = [record for record in accounted if not record.command or record.tag == ticket.submitted_with]
    if ours or past:
        told = _of_job(ticket, ours, past)
        # The queue does not know by whom.
        is_by_nobody = told.state is State.CANCELLED and told.reason in (None, _CANCELLED_BEFORE.reason)
        is_lost = told.state is State.UNKNOWN and ticket.task is not None
        return cancelled(told, ticket) if is_by_nobody or is_lost else told
    is_another = bool(live or accounted)
    forgotten = f"not in the queue; {blind}" if blind else _FORGOTTEN
    marked = from_marks(ticket.launch_dir, ticket.job_id)
    return cancelled(marked or JobStatus(State.UNKNOWN, ANOTHER_JOB if is_another else forgotten), ticket)


def _of_job(ticket: Ticket, live: Sequence[Record], past: Sequence[Record]) -> JobStatus:
    """What a job is that Slurm knows."""
    marked = _marked(ticket.launch_dir, ticket.job_id) if not _is_alive(live) else {}
    by_live, by_past = _by_task(live), _by_task(past)
    if ticket.task is not None:
        return _of_task(ticket.task, by_live, by_past, marked)
    numbers = {*by_live, *by_past, *marked}
    if numbers == {None}:
        return resolve(by_live.get(None), by_past.get(None), marked.get(None))
    tasks = {
        number: resolve(by_live.get(number), by_past.get(number), marked.get(number))
        for number in numbers
        if number is not None
    }
    return sum_up({**dict.fromkeys(declared_tasks(ticket.launch_dir), _CANCELLED_BEFORE), **tasks})


def _of_task(
    number: int,
    live: Mapping[int | None, JobStatus],
    past: Mapping[int | None, JobStatus],
    marked: Mapping[int | None, JobStatus],
) -> JobStatus:
    """What one task of an array is that Slurm knows."""
    waits = number in past and past[number].state is State.PENDING
    # Of tasks that wait together the accounting has one record, and does not learn that one of them is gone.
    if number not in live and number not in marked and (number not in past or (live and waits)):
        return _CANCELLED_BEFORE
    return resolve(live.get(number), past.get(number), marked.get(number))


def resolve(live: JobStatus | None, accounted: JobStatus | None, marked: JobStatus | None) -> JobStatus:
    """Decide between the queue, the accounting and the job's own marks.

    The queue is believed while it says that the job waits or runs; then the accounting, then the queue's
    memory of jobs that ended lately (``MinJobAge``), then the marks. What nobody can tell is UNKNOWN.

    Each is ``None`` where it was not asked, or does not know the job.
    """
    if live and live.state.is_live:
        return live
    # Who is late tells of an earlier life, before a requeue.
    newest = max((told.restarts for told in (live, accounted, marked) if told), default=0)
    for told in (accounted, live, marked):
        if told and told.state.is_final and told.restarts == newest:
            return _with_code(_filled(told, live, accounted, marked), marked, live)
    if accounted and accounted.state.is_live:
        # Slurm leaves "runaway" jobs behind that the accounting believes alive for ever; and it is late.
        word = accounted.state.value
        return replace(accounted, state=State.UNKNOWN, reason=f"accounted {word}, but not in the queue")
    if marked and marked.restarts == newest and not marked.state.is_final:
        return marked
    if newest:
        return JobStatus(State.UNKNOWN, "it was requeued, and not seen since", restarts=newest)
    return marked or live or accounted or JobStatus(State.UNKNOWN, _FORGOTTEN)


def _is_alive(records: Sequence[Record]) -> bool:
    """Whether the queue tells all: of an array that is not so, because it forgets tasks that have ended."""
    return any(record.state.is_live and record.task is None for record in records)


def _by_task(records: Sequence[Record]) -> dict[int | None, JobStatus]:
    """The last life of each task, under ``None`` that of a job without tasks."""
    found: dict[int | None, JobStatus] = {}
    lives: dict[int | None, int] = {}
    for record in records:
        numbers: list[int | None] = [None] if record.task is None else [*expand_tasks(record.task)]
        for number in numbers:
            lives[number] = lives.get(number, -1) + 1
            status = status_of(record)
            found[number] = replace(status, restarts=max(status.restarts, lives[number]))
    return found


def _marked(launch_dir: Path, job_id: str | None) -> dict[int | None, JobStatus]:
    """The last life of each task by its marks; of several jobs' that of the last one."""
    lives = read_lives(launch_dir, job_id)
    last = lives[-1].job_id.partition("_")[0] if lives else None
    found: dict[int | None, JobStatus] = {}
    for life in lives:
        if life.job_id.partition("_")[0] == last and (life.task is None or life.task.isdigit()):
            found[int(life.task) if life.task else None] = of_life(life)
    return found


def _filled(status: JobStatus, *others: JobStatus | None) -> JobStatus:
    """Fill what one source does not tell from the others, unless they tell of another ending."""
    for other in others:
        if other and (other.state, other.restarts) == (status.state, status.restarts):
            missing = {f.name for f in fields(JobStatus) if getattr(status, f.name) is None}
            status = replace(status, **{name: getattr(other, name) for name in missing})
    return status


def _with_code(status: JobStatus, *better: JobStatus | None) -> JobStatus:
    """The exit code as the job itself or the queue has it: sacct takes 128 from those above."""
    if status.state not in (State.FAILED, State.INTERRUPTED):
        return status
    for other in better:
        if other and other.exit_code and other.restarts == status.restarts:
            state = _interrupted_if_saved(State.FAILED, other.exit_code)
            reason = INTERRUPTED_REASON if state is State.INTERRUPTED else exit_reason(other.exit_code)
            return replace(status, state=state, reason=reason, exit_code=other.exit_code)
    return status


def _reason(state: State, record: Record, code: int | None) -> str | None:
    word = plain_word(record.word)
    other = None if word == state.value else word  # Slurm's own, where the state does not say it
    if state is State.CANCELLED:
        # What else the queue still shows is why the job waited before it was cancelled.
        by_slurm = _NEVER[1] if record.reason == _NEVER[0] else None
        return _who(record.word.partition(" ")[2]) or by_slurm or other
    if state is State.PENDING:
        return why_waiting(record.word, record.reason)
    if state is State.INTERRUPTED:
        return INTERRUPTED_REASON
    if state is State.FAILED and code:
        return exit_reason(code)
    if state is State.FAILED and record.reason == LAUNCH_FAILURE:
        return f"{LAUNCH_FAILURE}: Slurm could not start the script; is the directory of its log there?"
    if state.is_live or record.work_dir is not None:
        return other  # sacct's reason is why the job once waited; it says nothing about how it ended
    return record.reason or other


def _who(word: str) -> str | None:
    """Name the user in ``by 1000``."""
    by, _, uid = word.partition(" ")
    if by != "by" or not uid.isdigit():
        return word or None
    try:
        return f"by {pwd.getpwuid(int(uid)).pw_name}"
    except (KeyError, OverflowError):
        return word


def _interrupted_if_saved(state: State, code: int | None) -> State:
    return State.INTERRUPTED if state is State.FAILED and code == EXIT_INTERRUPTED else state


def exit_reason(code: int) -> str:
    """Say an exit code in words: ``exit code 137 (SIGKILL)``."""
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"exit code {code}"


def of_life(life: Life) -> JobStatus:
    """Return what one life of a job is by the marks that it left."""
    code = life.exit_code
    ended_by_slurm = _ended_by_slurm(life.state)
    if code is None and ended_by_slurm:  # its node failed, and the next link of its chain judged it
        return JobStatus(ended_by_slurm, None, life.nodes, restarts=life.number, why=_why(life))
    if code is None:
        return JobStatus(State.UNKNOWN, "it started, and recorded no end", life.nodes, restarts=life.number)
    elapsed = None
    if life.started is not None and life.ended is not None:
        days, seconds = divmod(int(life.ended - life.started), 86400)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        elapsed = f"{days}-{clock}" if days else clock
    state = _interrupted_if_saved(State.FAILED if code else State.COMPLETED, code)
    if state is State.FAILED and ended_by_slurm:
        return JobStatus(ended_by_slurm, None, life.nodes, elapsed, None, life.number, why=_why(life))
    if state is State.FAILED and life.rule == _ENDED_BY_USER:
        # It was cancelled: of one that was requeued Slurm, or a later life, would tell.
        return JobStatus(State.CANCELLED, life.why, life.nodes, elapsed, None, life.number)
    reason = exit_reason(code) if state is State.FAILED else None
    reason = INTERRUPTED_REASON if state is State.INTERRUPTED else reason
    why = _why(life) if state is State.FAILED else None
    return JobStatus(state, reason, life.nodes, elapsed, code, life.number, why=why)


def _ended_by_slurm(word: str | None) -> State | None:
    """Return the state of a job that Slurm ended, by its word for that or for why."""
    state = END_REASONS.get(word or "") or STATES.get(word or "")
    return State(state) if state in FINAL and state not in ("COMPLETED", "FAILED") else None


# Rules that say no more than the state and the exit code.
_SAY_NOTHING = ("cancelled", "done", "failed", "preempted", "saved")
# That of a job that somebody cancelled or requeued: it could not tell which.
_ENDED_BY_USER = "ended_by_user"


def _why(life: Life) -> str | None:
    """What the job found out about its end."""
    return life.why if life.rule not in (None, *_SAY_NOTHING) else None
