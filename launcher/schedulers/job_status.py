"""Derive the status of a job or job array from the queue, the accounting and the job's own marks.

A launch that is an array is one training several times, one task after another.
"""

from __future__ import annotations

import pwd
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from launcher.runs.paths import log_prefix_beside, scripts_in
from launcher.schedulers.base import JobRef, JobStatus
from launcher.secrecy import without_secrets
from launcher.slurm.notations import compress_tasks, expand_tasks, format_time_limit
from launcher.slurm.records import LAUNCH_FAILURE, Record
from launcher.slurm.states import State, why_waiting
from slipway.common.files import open_regular
from slipway.common.node.marks import JobAttempt, cancelled_by
from slipway.common.node.settings import EXIT_INTERRUPTED
from slipway.common.node.slurm_states import END_REASONS, FINAL, STATES, plain_word

_HEADER_BYTES = 1 << 16
# Slipway's own arrays have a run directory for every task.
_MAX_DECLARED = 100_000
_HEADER = re.compile(r"^#SBATCH --array=[\"']?([-0-9,:]+)", re.MULTILINE)

_IN_TURN = "JobArrayTaskLimit"

# The state of an array is the first of these that one of its tasks has.
_LIVE_STATES = (State.RUNNING, State.COMPLETING, State.SUSPENDED, State.PENDING)

INTERRUPTED_REASON = "saved before its end: launching again continues"
LEFT_REASON = "left before its end, with nothing new saved: launching again continues"

ANOTHER_JOB = "Slurm has reused this job id; the old job's state is unknown"
_FORGOTTEN = "the scheduler does not know this job"
# Why Slurm itself cancels a job (--kill-on-invalid-dep), such as a stage whose parent failed.
_NEVER = ("DependencyNeverSatisfied", "its dependency failed, or can no longer be satisfied")
# Slurm keeps no record of a task that was cancelled by its number before it began.
_CANCELLED_BEFORE = JobStatus(State.CANCELLED, "before it began")
_NOT_BEGUN = JobStatus(State.UNKNOWN, "it has not begun, by its marks")


def status_of(record: Record) -> JobStatus:
    state, code = record.state, record.exit_code
    if state is State.UNKNOWN:
        reason = f"Slurm says {record.word!r}"
        return JobStatus(state, reason, record.nodes, record.elapsed, restarts=record.restarts)
    if not state.is_final or state is State.DEADLINE:
        code = None
    elif code == 0 and not state.is_good:
        code = None  # Slurm has no exit code for a job that it ended itself, and prints a zero
    status = JobStatus(state, None, record.nodes, record.elapsed, code, record.restarts)
    if state is State.FAILED and code:
        return replace(status, **_failure(code))
    return replace(status, reason=_reason(state, record))


def read_marks(ref: JobRef, job_id: str | None = None) -> JobStatus | None:
    """Return a job's status by its own marks; ``None`` without marks.

    A job that began and recorded no end is UNKNOWN: it may run, and it may have been killed. So is an array's
    task that has not begun. With `job_id` the marks of other jobs, or tasks, are ignored.
    """
    marked = _read_marked(ref.attempts(job_id))
    if None in marked or not marked:
        return marked.get(None)
    task = (job_id or "").partition("_")[2]
    if task:
        return marked[int(task)]
    tasks = {number: status for number, status in marked.items() if number is not None}
    return sum_up({**dict.fromkeys(declared_tasks(ref.launch_dir), _NOT_BEGUN), **tasks})


def mark_cancelled(status: JobStatus, ref: JobRef) -> JobStatus:
    """Return CANCELLED for a gone job that Slipway cancelled: its own marks cannot show that."""
    user = cancelled_by(ref.launch_dir, ref.job_id)
    if user is None or status.state not in (State.UNKNOWN, State.FAILED, State.CANCELLED):
        return status
    return replace(status, state=State.CANCELLED, reason=f"by {user}")


def status_of_job(
    ref: JobRef, live: Sequence[Record], accounted: Sequence[Record], blind: str | None = None
) -> JobStatus:
    """Return the status of a job from its marks and Slurm's records of its id, from squeue and sacct.

    A record without the job's tag is of another job: Slurm reset its ids, or it is another Slurm. `blind`
    says why the accounting could not be asked.
    """
    ours = [record for record in live if record.tag == ref.submitted_tag]
    # The accounting learns a job's command and directory late; before Slurm 21.08 it has no commands.
    accounted = [record for record in accounted if record.command or record.work_dir]
    past = [record for record in accounted if not record.command or record.tag == ref.submitted_tag]
    if ours or past:
        status = _resolve_job(ref, ours, past)
        # The queue does not know who cancelled it.
        by_nobody = status.state is State.CANCELLED and status.reason in (None, _CANCELLED_BEFORE.reason)
        is_lost = status.state is State.UNKNOWN and ref.task is not None
        return mark_cancelled(status, ref) if by_nobody or is_lost else status
    is_another = bool(live or accounted)
    forgotten = f"not in the queue; {blind}" if blind else _FORGOTTEN
    marked = read_marks(ref, ref.job_id)
    unknown = JobStatus(State.UNKNOWN, ANOTHER_JOB if is_another else forgotten)
    return mark_cancelled(marked or unknown, ref)


def _resolve_job(ref: JobRef, live: Sequence[Record], past: Sequence[Record]) -> JobStatus:
    """Return the status of a job that Slurm knows."""
    # The queue has the whole record of a live job, but forgets ended tasks of an array.
    is_alive = any(record.state.is_live and record.task is None for record in live)
    marked = {} if is_alive else _read_marked(ref.attempts(ref.job_id))
    by_live, by_past = _group_by_task(live), _group_by_task(past)

    def resolved(number: int | None) -> JobStatus:
        own = marked.get(number)
        status = resolve(by_live.get(number), by_past.get(number), own)
        is_unmarked = status.state is State.FAILED and number is None and not (own and own.state.is_final)
        return replace(status, why=read_log_reason(ref)) if is_unmarked else status

    if (task := ref.task) is not None:
        # The accounting has one record for tasks that wait together, and does not learn that one is gone.
        is_past = task in by_past and not (by_live and by_past[task].state is State.PENDING)
        return resolved(task) if is_past or task in by_live or task in marked else _CANCELLED_BEFORE
    numbers = {*by_live, *by_past, *marked}
    if numbers == {None}:
        return resolved(None)
    tasks = {number: resolved(number) for number in numbers if number is not None}
    return sum_up({**dict.fromkeys(declared_tasks(ref.launch_dir), _CANCELLED_BEFORE), **tasks})


def resolve(live: JobStatus | None, accounted: JobStatus | None, marked: JobStatus | None) -> JobStatus:
    """Choose between the queue, the accounting and the job's own marks.

    The queue decides while the job waits or runs; then the accounting, then the queue's memory of jobs that
    ended lately (``MinJobAge``), then the marks. Otherwise the job is UNKNOWN.

    Each is ``None`` if it was not asked, or does not know the job.
    """
    if live and live.state.is_live:
        return live
    # A late source has an earlier attempt, before a requeue.
    newest = max((status.restarts for status in (live, accounted, marked) if status), default=0)
    for status in (accounted, live, marked):
        if status and status.state.is_final and status.restarts == newest:
            return _take_code(_fill(status, live, accounted, marked), marked, live)
    if accounted and accounted.state.is_live:
        # Slurm leaves "runaway" jobs behind that the accounting believes alive for ever; and it is late.
        word = accounted.state.value
        return replace(accounted, state=State.UNKNOWN, reason=f"accounted {word}, but not in the queue")
    if marked and marked.restarts == newest and not marked.state.is_final:
        return marked
    if newest:
        return JobStatus(State.UNKNOWN, "it was requeued, and not seen since", restarts=newest)
    return marked or live or accounted or JobStatus(State.UNKNOWN, _FORGOTTEN)


def read_log_reason(ref: JobRef) -> str | None:
    """Return the reason of a job's end by its log, if it left no mark, as on a full disk."""
    from slipway.common.node.evidence import evidence  # late, as the next: most jobs left a mark
    from slipway.common.node.judging import Facts, judge

    for script in scripts_in(ref.launch_dir):
        log = f"{log_prefix_beside(script)}{ref.job_id}"
        judgement = judge(Facts(), evidence([f"{log}.out", f"{log}.err"]))
        rule, match = judgement.rule, re.search(judgement.rule.pattern, judgement.line)
        said = match.groupdict().get("said") if match else None
        return rule.means + (f": {without_secrets(said)}" if said else "") if rule.of == "log" else None
    return None


def _group_by_task(records: Sequence[Record]) -> dict[int | None, JobStatus]:
    """Return the last attempt of each task; of a job without tasks, under ``None``."""
    statuses: dict[int | None, JobStatus] = {}
    attempts: dict[int | None, int] = {}
    for record in records:
        numbers: list[int | None] = [None] if record.task is None else [*expand_tasks(record.task)]
        for number in numbers:
            attempts[number] = attempts.get(number, -1) + 1
            status = status_of(record)
            statuses[number] = replace(status, restarts=max(status.restarts, attempts[number]))
    return statuses


def _read_marked(attempts: Sequence[JobAttempt]) -> dict[int | None, JobStatus]:
    """Return the last attempt of each task of the last job by its marks."""
    last = attempts[-1].job_id.partition("_")[0] if attempts else None
    statuses: dict[int | None, JobStatus] = {}
    for attempt in attempts:
        if attempt.job_id.partition("_")[0] == last and (attempt.task is None or attempt.task.isdigit()):
            statuses[int(attempt.task) if attempt.task else None] = status_of_attempt(attempt)
    return statuses


def _fill(status: JobStatus, *others: JobStatus | None) -> JobStatus:
    """Fill missing fields from other sources with the same ending."""
    for other in others:
        if other and (other.state, other.restarts) == (status.state, status.restarts):
            missing = {f.name for f in fields(JobStatus) if getattr(status, f.name) is None}
            status = replace(status, **{name: getattr(other, name) for name in missing})
    return status


def _take_code(status: JobStatus, *better: JobStatus | None) -> JobStatus:
    """Take the exit code from the job itself or the queue: sacct subtracts 128 from codes above that."""
    if status.state not in (State.FAILED, State.INTERRUPTED):
        return status
    for other in better:
        if other and other.exit_code and other.restarts == status.restarts:
            return replace(status, **_failure(other.exit_code, has_saved=other.reason != LEFT_REASON))
    return status


def _reason(state: State, record: Record) -> str | None:
    word = plain_word(record.word)
    other = None if word == state.value else word  # Slurm's own, if the state does not say it
    if state is State.CANCELLED:
        # Other reasons in the queue are why the job waited before it was cancelled.
        by_slurm = _NEVER[1] if record.reason == _NEVER[0] else None
        return _who(record.word.partition(" ")[2]) or by_slurm or other
    if state is State.PENDING:
        return why_waiting(record.word, record.reason)
    if state is State.FAILED and record.reason == LAUNCH_FAILURE:
        return f"{LAUNCH_FAILURE}: Slurm could not start the script; is the directory of its log there?"
    if state.is_live or record.work_dir is not None:
        return other  # sacct's reason is that of the wait, not of the end
    return record.reason or other


def _who(word: str) -> str | None:
    """Return ``by alice`` for Slurm's ``by 1000``."""
    preposition, _, uid = word.partition(" ")
    if preposition != "by" or not uid.isdigit():
        return word or None
    try:
        return f"by {pwd.getpwuid(int(uid)).pw_name}"
    except (KeyError, OverflowError):
        return word


def _failure(code: int, *, has_saved: bool = True) -> dict[str, Any]:
    """Return the fields of the status of an exit code other than 0."""
    if code == EXIT_INTERRUPTED:
        reason = INTERRUPTED_REASON if has_saved else LEFT_REASON
        return {"state": State.INTERRUPTED, "reason": reason, "exit_code": code}
    return {"state": State.FAILED, "reason": exit_reason(code), "exit_code": code}


def exit_reason(code: int) -> str:
    """Describe an exit code: ``exit code 137 (SIGKILL)``."""
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"exit code {code}"


def status_of_attempt(attempt: JobAttempt) -> JobStatus:
    """Return the status of one attempt of a job by its marks."""
    code, ended_by_slurm = attempt.exit_code, _read_slurm_ending(attempt.state)
    # The job's own judgement of its end.
    says_nothing = attempt.rule in (None, *_SAY_NOTHING) or attempt.why == _FAILED
    why = None if says_nothing else attempt.why
    status = JobStatus(State.UNKNOWN, nodes=attempt.nodes, restarts=attempt.number)
    if code is not None and attempt.started is not None and attempt.ended is not None:
        status = replace(status, elapsed=format_time_limit(int(attempt.ended - attempt.started)))
    if ended_by_slurm and code not in (0, EXIT_INTERRUPTED):
        # Without a code its node failed, and the next link of its chain found that.
        return replace(status, state=ended_by_slurm, why=why)
    if code is None:
        return replace(status, reason="it started, and recorded no end")
    if code == 0:
        return replace(status, state=State.COMPLETED, exit_code=code)
    if code != EXIT_INTERRUPTED and attempt.rule == _ENDED_BY_USER:
        # It was cancelled: a requeued job would have a record of Slurm's, or a later attempt.
        return replace(status, state=State.CANCELLED, reason=attempt.why)
    failure = _failure(code, has_saved=attempt.rule != "left")
    return replace(status, **failure, why=None if code == EXIT_INTERRUPTED else why)


def _read_slurm_ending(word: str | None) -> State | None:
    """Return the state of a job that Slurm ended, from its word for the state or for the reason."""
    state = END_REASONS.get(word or "") or STATES.get(word or "")
    return State(state) if state in FINAL and state not in ("COMPLETED", "FAILED") else None


# Rules that say no more than the state and the exit code.
_SAY_NOTHING = ("cancelled", "done", "preempted", "saved")
_FAILED = "its tasks failed"
# The rule of a cancelled or requeued job, which cannot distinguish the two.
_ENDED_BY_USER = "ended_by_user"


def declared_tasks(launch_dir: Path) -> list[int]:
    """Return the numbers of the tasks that a launch's script requests; empty without an array."""
    for script in scripts_in(launch_dir):
        try:
            with open_regular(script) as stream:
                match = _HEADER.search(stream.read(_HEADER_BYTES).decode("utf-8", "replace"))
        except OSError:
            continue
        if match:
            return expand_tasks(match[1], _MAX_DECLARED)
    return []


def sum_up(tasks: Mapping[int, JobStatus]) -> JobStatus:
    """Return the status of an array from the statuses of its tasks.

    It runs or waits while one of them does. Otherwise it is UNKNOWN if one of them is, because it may run;
    then the first failed task decides. A task continues from an earlier one's checkpoint.
    """
    ordered = dict(sorted(tasks.items()))
    decisive = ordered[_decisive(ordered)]
    counted = Counter(status.state.value for status in ordered.values())
    reason = "tasks: " + ", ".join(f"{count} {state}" for state, count in counted.items())
    waiting = next((status for status in ordered.values() if status.state is State.PENDING), None)
    # The tasks of such an array wait for each other on purpose.
    is_held_up = waiting is not None and not (waiting.reason or "").startswith(_IN_TURN)
    explaining = waiting if is_held_up and decisive.state.is_live else decisive
    if explaining and explaining.reason and not explaining.state.is_good:
        numbers = [number for number, status in ordered.items() if status == explaining]
        reason += f"; {compress_tasks(numbers)}: {explaining.reason}"
    states = {str(number): status.state for number, status in ordered.items()}
    if not decisive.state.is_live and decisive.nodes is None:
        # It was cancelled before it began, say: nodes and time are those of another task.
        ran = next((status for status in reversed(ordered.values()) if status.nodes), decisive)
        decisive = replace(decisive, nodes=ran.nodes, elapsed=ran.elapsed)
    return replace(decisive, reason=reason, tasks=states)


def _decisive(tasks: Mapping[int, JobStatus]) -> int:
    """Return the number of the task that decides the state of the array."""
    for state in (*_LIVE_STATES, State.UNKNOWN):
        for number, status in tasks.items():
            if status.state is state:
                return number
    bad = [number for number, status in tasks.items() if not status.state.is_good]
    worse = [number for number in bad if tasks[number].state is not State.INTERRUPTED]
    if worse:
        return worse[0]
    last = list(tasks)[-1]
    # A later task continues from an earlier one's checkpoint.
    completed = [number for number in tasks if number not in bad]
    return completed[-1] if completed and (not bad or completed[-1] > bad[-1]) else last
