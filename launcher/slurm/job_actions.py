"""Act on jobs with scancel and scontrol, which say too little about a job that is over.

``scancel`` of a job that has ended exits 0; so does ``scontrol hold`` of a running one, which is then held
when it is requeued. The queue is therefore asked first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from launcher.errors import UserError
from launcher.slurm.commands import Answer, Unreachable, error_text
from launcher.slurm.records import Record
from launcher.slurm.states import HELD_STATES, Action, State

# The records of jobs in the queue, by their ids.
Known = Mapping[str, Sequence[Record]]
Ask = Callable[[Sequence[str]], Known]
Run = Callable[[Sequence[str]], Answer]

_COMMANDS = {
    Action.CANCEL: ("scancel",),
    Action.SAVE: ("scancel", "--batch", "--signal=USR1"),
    # `uhold`, because the job's owner cannot undo a `hold` by an operator.
    Action.HOLD: ("scontrol", "uhold"),
    Action.RELEASE: ("scontrol", "release"),
}
# The job in a message of scancel or scontrol about one of many.
_ABOUT_JOB = re.compile(r"\bjob(?: id|id)? (\d+(?:_\d+)?)\b")
# Jobs per command, so that it is answered in time and its arguments are not too long.
_AT_ONCE = 250
_NOT_ALLOWED = ("Access/permission denied", "Invalid user id")


class NotHeld(UserError):
    """A job to release is not held."""


def act(action: Action, job_ids: Sequence[str], run: Run, ask: Ask) -> dict[str, UserError]:
    """Act on jobs, a few hundred at a time; return the errors by job."""
    errors: dict[str, UserError] = {}
    for begin in range(0, len(job_ids), _AT_ONCE):
        part = job_ids[begin : begin + _AT_ONCE]
        try:
            known = ask(part)
        except Unreachable as error:
            errors |= dict.fromkeys(part, error)
        else:
            errors |= _act_at_once(action, {job_id: known[job_id] for job_id in part}, run, ask)
    return errors


def _act_at_once(action: Action, known: Known, run: Run, ask: Ask | None) -> dict[str, UserError]:
    """Act with one command; then, if `ask` is given, singly on jobs that it left without a complaint."""
    errors: dict[str, UserError] = {}
    ids_of: dict[str, list[str]] = {}
    for job_id, records in known.items():
        try:
            ids_of[job_id] = _ids_to_act_on(action, job_id, records)
        except UserError as error:
            errors[job_id] = error
    if not ids_of:
        return errors
    left: Known = {}
    try:
        answer = run([*_COMMANDS[action], *(name for ids in ids_of.values() for name in ids)])
        if answer.code == 0:
            return errors
        complaints = _complaints(answer, ids_of)
        if ask is None or (action is Action.SAVE and not complaints and answer.stderr.strip()):
            complaints = dict.fromkeys(ids_of, answer.stderr)
        # No script gets the signal twice: a job without a complaint got it, or is over.
        elif action is not Action.SAVE:
            left = ask([job_id for job_id in ids_of if job_id not in complaints])
    except Unreachable as error:
        return errors | dict.fromkeys(ids_of, error)
    errors |= {job_id: _refusal(action, job_id, text, known[job_id]) for job_id, text in complaints.items()}
    for job_id, records in left.items():
        # That a job is held now does not say that it was held again, if it was held before.
        was_held = action is Action.HOLD and not any(_is_to_do(action, record) for record in known[job_id])
        if was_held or any(_is_to_do(action, record) for record in records):
            errors |= _act_at_once(action, {job_id: records}, run, None)
    return errors


def _ids_to_act_on(action: Action, job_id: str, known: Sequence[Record]) -> list[str]:
    """Return the ids of a job, or of its tasks, for the command; raise UserError if it would do nothing."""
    living = [record for record in known if record.state.is_live or record.state is State.UNKNOWN]
    words = ", ".join(dict.fromkeys(record.word for record in known))
    if not known:
        raise UserError(f"Slurm's queue does not have job {job_id}: it is over, or never was")
    if not living:
        raise UserError(f"job {job_id} is over already: {words}")
    if action is Action.CANCEL:
        return [job_id]
    if action is Action.SAVE:
        # By the raw id: to signal an array, scancel waits for minutes on the tasks that have not begun.
        if running := [record.raw_id for record in living if record.state is State.RUNNING]:
            return running
        message = f"job {job_id} is {known[0].state.value}: nothing runs that could save"
        raise UserError(message, hint="to end it all the same: slipway cancel RUN")
    meant = [record for record in living if _is_to_do(action, record)]
    if not meant and action is Action.RELEASE:
        raise NotHeld(f"job {job_id} is not held: it is {words}")
    # A job that is held already is held again.
    meant = meant or [record for record in living if record.state is State.PENDING]
    if not meant:
        message = f"job {job_id} has begun: only a job that waits can be held"
        raise UserError(message, hint="to end it: slipway cancel RUN")
    return [_for_scontrol(record) for record in meant]


def _is_to_do(action: Action, record: Record) -> bool:
    if action is Action.CANCEL:  # the queue shows at once what scancel has ended
        return record.state.is_live and record.state is not State.COMPLETING
    if action is Action.HOLD:
        return record.state is State.PENDING and not is_held(record)
    return is_held(record)


def _complaints(answer: Answer, ids_of: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the messages of scancel or scontrol by the jobs that they name."""
    lines = {match[1]: line for line in answer.stderr.splitlines() if (match := _ABOUT_JOB.search(line))}
    named = {job_id: lines.keys() & {job_id, *ids} for job_id, ids in ids_of.items()}
    return {
        job_id: "\n".join(lines[name] for name in sorted(names)) for job_id, names in named.items() if names
    }


def is_held(record: Record) -> bool:
    """Return True if a job waits until somebody releases it."""
    if record.state is not State.PENDING:
        return False
    return "held" in (record.reason or "").lower() or record.word in HELD_STATES


def _for_scontrol(record: Record) -> str:
    """Return the id of waiting tasks for scontrol, which does not understand the ``%1`` that squeue adds."""
    head, percent, _ = record.job_id.partition("%")
    return f"{head}]" if percent else record.job_id


def _refusal(action: Action, job_id: str, stderr: str, known: Sequence[Record]) -> UserError:
    message = error_text(stderr)
    # Tasks that wait together may have several reasons.
    by_admin = action is Action.RELEASE and any("JobHeldAdmin" in (record.reason or "") for record in known)
    hint = "an administrator held it" if by_admin else None
    if any(words in message for words in _NOT_ALLOWED):
        owner = known[0].user
        hint = hint or f"the job is {owner}'s: {owner} can, or an administrator"
    return UserError(f"job {job_id} was not {action.value}: {message}", hint=hint)
