"""Acting on jobs of Slurm's: its commands say too little, or nothing, of a job that is over.

``scancel`` of a job that has ended exits 0; ``scontrol hold`` of a running one does, too, and holds it when
it is requeued. So the queue is asked first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from launcher.errors import UserError
from launcher.schedulers.base import NoAnswer, NotHeld, State, one_by_one
from launcher.schedulers.commands import Answer, Unreachable, words
from launcher.schedulers.records import Record
from launcher.schedulers.words import HELD_BY_ADMIN, HELD_BY_USER

Run = Callable[[Sequence[str]], Answer]
# What the queue has of jobs, by their ids.
Known = Mapping[str, Sequence[Record]]
Ask = Callable[[Sequence[str]], Known]

_HELD_WORDS = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
# In what scancel and scontrol complain of one job among many.
_ABOUT_JOB = re.compile(r"\bjob(?: id|id)? (\d+(?:_\d+)?)\b")
# Jobs that one command is about, so that it is answered in time and its arguments are not too long.
_AT_ONCE = 250
_DONE = Answer(0, "", "")
_NOT_ALLOWED = ("Access/permission denied", "Invalid user id")


def cancel(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """End a job, and all tasks of an array."""
    _living(job_id, known)
    _act(run, job_id, ["scancel", job_id], "cancelled", known)


def save(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """Send USR1 to the script of a job that runs; of an array, to that of the task that does."""
    running = [record for record in _living(job_id, known) if record.state is State.RUNNING]
    if not running:
        raise _nothing_runs(job_id, known)
    for record in running:
        # By the raw id: told to signal an array, scancel waits for minutes on its tasks that have not begun.
        command = ["scancel", "--batch", "--signal=USR1", record.raw_id]
        _act(run, job_id, command, "told to save", known, may_be_over=True)


def _nothing_runs(job_id: str, known: Sequence[Record]) -> UserError:
    return UserError(
        f"job {job_id} is {known[0].state.value}: nothing runs that could save",
        hint="to end it all the same: slipway cancel RUN",
    )


def hold(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """Hold what waits of a job."""
    waiting = list(filter(_waits, _living(job_id, known)))
    if not waiting:
        raise UserError(
            f"job {job_id} has begun: only a job that waits can be held", hint="to end it: slipway cancel RUN"
        )
    for record in waiting:
        # `uhold`, because `hold` by an operator is one that the job's owner cannot undo.
        _act(run, job_id, ["scontrol", "uhold", _for_scontrol(record)], "held", known)


def hold_many(run: Run, known: Known, ask: Ask) -> dict[str, UserError]:
    """Hold what waits of many jobs with one scontrol; what it did not hold and says nothing of, singly."""
    return _scontrol_many(run, known, ask, "uhold", lambda one: _waits(one) and not is_held(one), hold)


def release_many(run: Run, known: Known, ask: Ask) -> dict[str, UserError]:
    """Release what is held of many jobs with one scontrol; what it did not release, singly."""
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
    # Where nothing is to be done, `singly` says why.
    left = {job_id: known[job_id] for job_id, records in meant.items() if not records}
    wrong: dict[str, UserError] = {}
    if answer.code != 0:
        acted_on = {job_id: known[job_id] for job_id, records in meant.items() if records}
        wrong = _refused(answer, "held" if verb == "uhold" else "released", acted_on)
        now = ask([job_id for job_id in acted_on if job_id not in wrong])
        left |= {job_id: records for job_id, records in now.items() if any(map(is_meant, records))}
    return wrong | one_by_one(lambda job_id: singly(run, job_id, left[job_id]), list(left))


def _waits(record: Record) -> bool:
    return record.state is State.PENDING


def release(run: Run, job_id: str, known: Sequence[Record]) -> None:
    """Release what is held of a job."""
    held = [record for record in _living(job_id, known) if is_held(record)]
    if not held:
        raise NotHeld(f"job {job_id} is not held: it is {_summary(known)}")
    for record in held:
        _act(run, job_id, ["scontrol", "release", _for_scontrol(record)], "released", known)


def many(
    act: Callable[[Run, Known, Ask], dict[str, UserError]], run: Run, job_ids: Sequence[str], ask: Ask
) -> dict[str, UserError]:
    """Act on many jobs, a few hundred at a time; return what went wrong, by job."""
    wrong: dict[str, UserError] = {}
    for begin in range(0, len(job_ids), _AT_ONCE):
        part = job_ids[begin : begin + _AT_ONCE]
        try:
            known = ask(part)
            wrong |= _not_living(known)
            wrong |= act(run, {job_id: known[job_id] for job_id in part if job_id not in wrong}, ask)
        except (Unreachable, NoAnswer) as error:
            wrong |= {job_id: error for job_id in part if job_id not in wrong}
    return wrong


def cancel_many(run: Run, known: Known, ask: Ask) -> dict[str, UserError]:
    """End jobs that live with one scancel; those that it did not end and says nothing of, one by one."""
    answer = run(["scancel", *known]) if known else _DONE
    if answer.code == 0:
        return {}
    wrong = _refused(answer, "cancelled", known)
    now = ask([job_id for job_id in known if job_id not in wrong])
    # Of what scancel ended the queue says so at once.
    left = [
        job_id
        for job_id, records in now.items()
        if any(record.state.is_live and record.state is not State.COMPLETING for record in records)
    ]
    return wrong | one_by_one(lambda job_id: cancel(run, job_id, now[job_id]), left)


def save_many(run: Run, known: Known, ask: Ask) -> dict[str, UserError]:
    """Send USR1 to the scripts of the jobs that run with one scancel."""
    running: dict[str, list[str]] = {}
    wrong: dict[str, UserError] = {}
    for job_id, records in known.items():
        raw_ids = [record.raw_id for record in records if record.state is State.RUNNING]
        if raw_ids:
            running[job_id] = raw_ids
        else:
            wrong[job_id] = _nothing_runs(job_id, records)
    if not running:
        return wrong
    raw_ids = [raw_id for each in running.values() for raw_id in each]
    answer = run(["scancel", "--batch", "--signal=USR1", *raw_ids])
    if answer.code != 0:
        # A script is not sent the signal twice: of which nothing is said was sent it, or is over.
        told = _lines_of(answer)
        for job_id, each in running.items():
            if lines := [told[raw_id] for raw_id in each if raw_id in told]:
                wrong[job_id] = _refusal(job_id, "told to save", "\n".join(lines), known[job_id])
    return wrong


def _not_living(known: Known) -> dict[str, UserError]:
    def check(job_id: str) -> None:
        _living(job_id, known[job_id])

    return one_by_one(check, list(known))


def _refused(answer: Answer, done: str, known: Known) -> dict[str, UserError]:
    told = _lines_of(answer)
    return {
        job_id: _refusal(job_id, done, told[job_id], records)
        for job_id, records in known.items()
        if job_id in told
    }


def _lines_of(answer: Answer) -> dict[str, str]:
    """What scancel or scontrol complains of, by the job that it names."""
    return {found[1]: line for line in answer.stderr.splitlines() if (found := _ABOUT_JOB.search(line))}


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
    may_be_over: bool = False,
) -> None:
    answer = run(command)
    # scancel that is told to try later does so, and fails without a word where the job has ended by then.
    if answer.code == 0 or (may_be_over and not answer.stderr.strip()):
        return
    raise _refusal(job_id, done, answer.stderr, known)


def _refusal(job_id: str, done: str, stderr: str, known: Sequence[Record]) -> UserError:
    told = words(stderr)
    by_admin = done == "released" and any(_has_reason(record, HELD_BY_ADMIN) for record in known)
    hint = "an administrator held it" if by_admin else None
    if any(sign in told for sign in _NOT_ALLOWED):
        owner = known[0].user
        hint = hint or f"the job is {owner}'s: {owner} can, or an administrator"
    return UserError(f"job {job_id} was not {done}: {told}", hint=hint)
