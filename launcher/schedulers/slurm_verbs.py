"""Acting on one job of Slurm's: its commands say too little, or nothing, of a job that is over.

``scancel`` of a job that has ended exits 0; ``scontrol hold`` of a running one does, too, and holds it when
it is requeued. So the queue is asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.errors import UserError
from launcher.schedulers.base import NotHeld, State
from launcher.schedulers.commands import Answer, words
from launcher.schedulers.records import Record
from launcher.schedulers.words import HELD_BY_ADMIN, HELD_BY_USER

Run = Callable[[Sequence[str]], Answer]

_HELD_WORDS = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_NOT_ALLOWED = ("Access/permission denied", "Invalid user id")


def cancel(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """End a job, and all tasks of an array."""
    _living(job_id, known)
    _act(run, job_id, ["scancel", job_id], "cancelled", known)


def save(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """Send USR1 to the script of a job that runs; of an array, to that of the task that does."""
    running = [record for record in _living(job_id, known) if record.state is State.RUNNING]
    if not running:
        raise UserError(
            f"job {job_id} is {known[0].state.value}: nothing runs that could save",
            hint="to end it all the same: slipway cancel RUN",
        )
    for record in running:
        # By the raw id: told to signal an array, scancel waits for minutes on its tasks that have not begun.
        command = ["scancel", "--batch", "--signal=USR1", record.raw_id]
        _act(run, job_id, command, "told to save", known, may_be_over=True)


def hold(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """Hold what waits of a job."""
    waiting = [record for record in _living(job_id, known) if record.state is State.PENDING]
    if not waiting:
        raise UserError(
            f"job {job_id} has begun: only a job that waits can be held", hint="to end it: slipway cancel RUN"
        )
    for record in waiting:
        # `uhold`, because `hold` by an operator is one that the job's owner cannot undo.
        _act(run, job_id, ["scontrol", "uhold", _for_scontrol(record)], "held", known)


def release(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """Release what is held of a job."""
    held = [record for record in _living(job_id, known) if is_held(record)]
    if not held:
        raise NotHeld(f"job {job_id} is not held: it is {_summary(known)}")
    for record in held:
        hint = "an administrator held it" if _has_reason(record, HELD_BY_ADMIN) else None
        _act(run, job_id, ["scontrol", "release", _for_scontrol(record)], "released", known, hint)


def is_held(record: Record) -> bool:
    """Whether a job waits until somebody releases it."""
    if record.state is not State.PENDING:
        return False
    reason = record.reason or ""
    return _has_reason(record, HELD_BY_ADMIN + HELD_BY_USER) or "held" in reason or record.word in _HELD_WORDS


def _has_reason(record: Record, names: Sequence[str]) -> bool:
    # Of tasks that wait together there may be several.
    return not set(names).isdisjoint((record.reason or "").split(","))


def _for_scontrol(record: Record) -> str:
    """The id of what waits; scontrol understands ``9_[3-5]`` and not the ``%1`` that squeue adds."""
    head, percent, _ = record.job_id.partition("%")
    return f"{head}]" if percent else record.job_id


def _living(job_id: str, known: Sequence[Record]) -> list[Record]:
    living = [record for record in known if record.state.is_live or record.state is State.UNKNOWN]
    if not known:
        raise UserError(f"Slurm's queue does not have job {job_id}: it is over, or never was")
    if not living:
        raise UserError(f"job {job_id} is over already: {_summary(known)}")
    return living


def _summary(known: Sequence[Record]) -> str:
    words_ = dict.fromkeys(record.word for record in known)
    return ", ".join(words_)


def _act(
    run: Run,
    job_id: str,
    command: Sequence[str],
    done: str,
    known: Sequence[Record],
    hint: str | None = None,
    may_be_over: bool = False,
) -> None:
    answer = run(command)
    # scancel that is told to try later does so, and fails without a word where the job has ended by then.
    if answer.code == 0 or (may_be_over and not answer.stderr.strip()):
        return
    told = words(answer.stderr)
    if any(sign in told for sign in _NOT_ALLOWED):
        owner = known[0].user
        hint = hint or f"the job is {owner}'s: {owner} can, or an administrator"
    raise UserError(f"job {job_id} was not {done}: {told}", hint=hint)
