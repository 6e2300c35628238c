"""Act on jobs with scancel and scontrol, which say too little about a job that is over.

``scancel`` of a job that has ended exits 0; so does ``scontrol hold`` of a running one, which is then held
when it is requeued. The queue is therefore asked first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from launcher.errors import UserError
from launcher.slurm.commands import Answer, Unreachable, error_text
from launcher.slurm.records import Record
from launcher.slurm.states import HELD_BY_ADMIN, HELD_BY_USER, HELD_STATES, State

Run = Callable[[Sequence[str]], Answer]
# The records of jobs in the queue, by their ids.
Known = Mapping[str, Sequence[Record]]
Ask = Callable[[Sequence[str]], Known]

# The job in a message of scancel or scontrol about one of many.
_ABOUT_JOB = re.compile(r"\bjob(?: id|id)? (\d+(?:_\d+)?)\b")
# Jobs per command, so that it is answered in time and its arguments are not too long.
_AT_ONCE = 250
_DONE = Answer(0, "", "")
_NOT_ALLOWED = ("Access/permission denied", "Invalid user id")


class NotHeld(UserError):
    """A job to release is not held."""


def one_by_one(act: Callable[[str], None], job_ids: Iterable[str]) -> dict[str, UserError]:
    """Act on one job after the other; return the errors by job."""
    errors: dict[str, UserError] = {}
    for job_id in job_ids:
        try:
            act(job_id)
        except UserError as error:
            errors[job_id] = error
    return errors


def cancel(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """Cancel a job, or all tasks of an array."""
    _living(job_id, known)
    _act(run, job_id, ["scancel", job_id], "cancelled", known)


def save(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """Send USR1 to the script of a running job, or of the running task of an array."""
    running = [record for record in _living(job_id, known) if record.state is State.RUNNING]
    if not running:
        raise _nothing_runs(job_id, known)
    for record in running:
        # By the raw id: to signal an array, scancel waits for minutes on the tasks that have not begun.
        command = ["scancel", "--batch", "--signal=USR1", record.raw_id]
        _act(run, job_id, command, "told to save", known, may_be_over=True)


def _nothing_runs(job_id: str, known: Sequence[Record]) -> UserError:
    return UserError(
        f"job {job_id} is {known[0].state.value}: nothing runs that could save",
        hint="to end it all the same: slipway cancel RUN",
    )


def hold(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """Hold a waiting job, or the waiting tasks of an array."""
    waiting = list(filter(_waits, _living(job_id, known)))
    if not waiting:
        raise UserError(
            f"job {job_id} has begun: only a job that waits can be held", hint="to end it: slipway cancel RUN"
        )
    for record in waiting:
        # `uhold`, because the job's owner cannot undo a `hold` by an operator.
        _act(run, job_id, ["scontrol", "uhold", _for_scontrol(record)], "held", known)


def hold_many(run: Run, known: Known, ask: Ask) -> dict[str, UserError]:
    """Hold many jobs with one scontrol; then singly those that it left without a complaint."""
    return _scontrol_many(
        run, known, ask, "uhold", lambda record: _waits(record) and not is_held(record), hold
    )


def release_many(run: Run, known: Known, ask: Ask) -> dict[str, UserError]:
    """Release many jobs with one scontrol; then singly those that it left without a complaint."""
    return _scontrol_many(run, known, ask, "release", is_held, release)


def _scontrol_many(
    run: Run,
    known: Known,
    ask: Ask,
    verb: str,
    is_meant: Callable[[Record], bool],
    singly: Callable[[Run, str, Sequence[Record]], None],
) -> dict[str, UserError]:
    meant = {job_id: list(filter(is_meant, records)) for job_id, records in known.items()}
    arguments = [_for_scontrol(record) for records in meant.values() for record in records]
    answer = run(["scontrol", verb, *arguments]) if arguments else _DONE
    # `singly` says why there is nothing to do.
    left = {job_id: known[job_id] for job_id, records in meant.items() if not records}
    errors: dict[str, UserError] = {}
    if answer.code != 0:
        acted_on = {job_id: known[job_id] for job_id, records in meant.items() if records}
        errors = _refused(answer, "held" if verb == "uhold" else "released", acted_on)
        now = ask([job_id for job_id in acted_on if job_id not in errors])
        left |= {job_id: records for job_id, records in now.items() if any(map(is_meant, records))}
    return errors | one_by_one(lambda job_id: singly(run, job_id, left[job_id]), list(left))


def _waits(record: Record) -> bool:
    return record.state is State.PENDING


def release(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """Release a held job, or the held tasks of an array."""
    held = [record for record in _living(job_id, known) if is_held(record)]
    if not held:
        raise NotHeld(f"job {job_id} is not held: it is {_summary(known)}")
    for record in held:
        _act(run, job_id, ["scontrol", "release", _for_scontrol(record)], "released", known)


def many(
    act: Callable[[Run, Known, Ask], dict[str, UserError]], run: Run, job_ids: Sequence[str], ask: Ask
) -> dict[str, UserError]:
    """Act on many jobs, a few hundred at a time; return the errors by job."""
    errors: dict[str, UserError] = {}
    for begin in range(0, len(job_ids), _AT_ONCE):
        part = job_ids[begin : begin + _AT_ONCE]
        try:
            known = ask(part)
            errors |= _not_living(known)
            errors |= act(run, {job_id: known[job_id] for job_id in part if job_id not in errors}, ask)
        except Unreachable as error:
            errors |= {job_id: error for job_id in part if job_id not in errors}
    return errors


def cancel_many(run: Run, known: Known, ask: Ask) -> dict[str, UserError]:
    """Cancel live jobs with one scancel; then singly those that it left without a complaint."""
    answer = run(["scancel", *known]) if known else _DONE
    if answer.code == 0:
        return {}
    errors = _refused(answer, "cancelled", known)
    now = ask([job_id for job_id in known if job_id not in errors])
    # The queue shows at once what scancel has ended.
    left = [
        job_id
        for job_id, records in now.items()
        if any(record.state.is_live and record.state is not State.COMPLETING for record in records)
    ]
    return errors | one_by_one(lambda job_id: cancel(run, job_id, now[job_id]), left)


def save_many(run: Run, known: Known, ask: Ask) -> dict[str, UserError]:
    """Send USR1 to the scripts of running jobs with one scancel."""
    running: dict[str, list[str]] = {}
    errors: dict[str, UserError] = {}
    for job_id, records in known.items():
        raw_ids = [record.raw_id for record in records if record.state is State.RUNNING]
        if raw_ids:
            running[job_id] = raw_ids
        else:
            errors[job_id] = _nothing_runs(job_id, records)
    if not running:
        return errors
    raw_ids = [raw_id for ids in running.values() for raw_id in ids]
    answer = run(["scancel", "--batch", "--signal=USR1", *raw_ids])
    if answer.code != 0:
        # No script gets the signal twice: a job without a complaint got it, or is over.
        complaints = _complaints(answer)
        for job_id, ids in running.items():
            if lines := [complaints[raw_id] for raw_id in ids if raw_id in complaints]:
                errors[job_id] = _refusal(job_id, "told to save", "\n".join(lines), known[job_id])
    return errors


def _not_living(known: Known) -> dict[str, UserError]:
    def check(job_id: str) -> None:
        _living(job_id, known[job_id])

    return one_by_one(check, list(known))


def _refused(answer: Answer, done: str, known: Known) -> dict[str, UserError]:
    complaints = _complaints(answer)
    return {
        job_id: _refusal(job_id, done, complaints[job_id], records)
        for job_id, records in known.items()
        if job_id in complaints
    }


def _complaints(answer: Answer) -> dict[str, str]:
    """Return the messages of scancel or scontrol by the jobs that they name."""
    return {match[1]: line for line in answer.stderr.splitlines() if (match := _ABOUT_JOB.search(line))}


def is_held(record: Record) -> bool:
    """Return True if a job waits until somebody releases it."""
    if record.state is not State.PENDING:
        return False
    reason = record.reason or ""
    return _has_reason(record, HELD_BY_ADMIN + HELD_BY_USER) or "held" in reason or record.word in HELD_STATES


def _has_reason(record: Record, names: Sequence[str]) -> bool:
    # Tasks that wait together may have several reasons.
    return not set(names).isdisjoint((record.reason or "").split(","))


def _for_scontrol(record: Record) -> str:
    """Return the id of waiting tasks for scontrol, which does not understand the ``%1`` that squeue adds."""
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
    return ", ".join(dict.fromkeys(record.word for record in known))


def _act(
    run: Run,
    job_id: str,
    command: Sequence[str],
    done: str,
    known: Sequence[Record],
    may_be_over: bool = False,
) -> None:
    answer = run(command)
    # scancel may be asked to try later, and fails without a message if the job has ended by then.
    if answer.code == 0 or (may_be_over and not answer.stderr.strip()):
        return
    raise _refusal(job_id, done, answer.stderr, known)


def _refusal(job_id: str, done: str, stderr: str, known: Sequence[Record]) -> UserError:
    message = error_text(stderr)
    by_admin = done == "released" and any(_has_reason(record, HELD_BY_ADMIN) for record in known)
    hint = "an administrator held it" if by_admin else None
    if any(words in message for words in _NOT_ALLOWED):
        owner = known[0].user
        hint = hint or f"the job is {owner}'s: {owner} can, or an administrator"
    return UserError(f"job {job_id} was not {done}: {message}", hint=hint)
