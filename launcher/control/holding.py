"""Holding waiting jobs back and letting them go, with few questions to their schedulers."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from launcher.control.acting import Done, Outcome, again, by_scheduler, is_unanswered, over
from launcher.control.targets import Target
from launcher.errors import UserError
from launcher.runs.receipts import note_act
from launcher.schedulers.base import JobStatus, Scheduler
from launcher.slurm.job_actions import NotHeld
from launcher.slurm.states import State

_Many = Callable[[Sequence[str]], Mapping[str, UserError]]


def hold(targets: Sequence[Target]) -> list[Outcome]:
    """Keep what waits of jobs from starting."""
    return _act(targets, Done.HELD, lambda scheduler: scheduler.hold_all)


def release(targets: Sequence[Target]) -> list[Outcome]:
    """Let what is held of jobs start."""
    return _act(targets, Done.RELEASED, lambda scheduler: scheduler.release_all)


def _act(targets: Sequence[Target], done: Done, verb: Callable[[Scheduler], _Many]) -> list[Outcome]:
    # That one launch of a run does not wait is no mistake where another does.
    waiting = {target.tracked.run_dir for target in targets if target.waits}
    settled = [_settled(target, done, target.tracked.run_dir in waiting) for target in targets]
    acted_on = [target for target, outcome in zip(targets, settled, strict=True) if outcome is None]
    wrong: dict[int, UserError] = {}
    for group in by_scheduler(acted_on, lambda target: target):
        told = _tried(group, verb)
        for one in group:
            if one.waiting_id is not None and one.waiting_id not in told:
                note_act(f"{done.value} {{}}", one.waiting_id)
        wrong |= {id(one): told[job] for one in group if (job := one.waiting_id) is not None and job in told}
    outcomes = iter(_outcomes(acted_on, done, wrong))
    return [outcome or next(outcomes) for outcome in settled]


def _settled(target: Target, done: Done, others_wait: bool) -> Outcome | None:
    """Return the outcome of a target of which nothing can be held or released; ``None`` if something can."""
    if target.waits and target.waiting_id is not None:
        if done is Done.HELD and _is_held(target.waiting_status) and not target.tracked.status.tasks:
            return Outcome(target, Done.AS_ASKED, "it is held already")
        return None
    if target.may_live and not target.state.is_live:
        return Outcome(target, Done.UNKNOWN, target.tracked.status.reason)
    return Outcome(target, Done.LEFT if others_wait else Done.NOT_VALID, _why_not(target, done))


def _tried(group: Sequence[Target], verb: Callable[[Scheduler], _Many]) -> Mapping[str, UserError]:
    job_ids = [target.waiting_id for target in group if target.waiting_id is not None]
    try:
        return verb(group[0].scheduler())(job_ids)
    except UserError as error:
        return dict.fromkeys(job_ids, error)


def _outcomes(targets: Sequence[Target], done: Done, wrong: Mapping[int, UserError]) -> list[Outcome]:
    refused = [one for one in targets if id(one) in wrong and not _is_settled_by(wrong[id(one)])]
    # They may have ended, or begun, between the question and the act.
    now = {id(before): target for before, target in zip(refused, again(refused), strict=True)}
    return [_outcome(one, done, wrong.get(id(one)), now.get(id(one))) for one in targets]


def _is_settled_by(error: UserError) -> bool:
    return is_unanswered(error) or isinstance(error, NotHeld)


def _outcome(target: Target, done: Done, error: UserError | None, now: Target | None) -> Outcome:
    if error is None:
        return Outcome(target, done)
    if isinstance(error, NotHeld):
        return Outcome(target, Done.AS_ASKED, "it is not held")
    if now is None:
        return Outcome(target, Done.UNKNOWN, error.message)
    if not now.may_live or now.state is State.COMPLETING:
        return over(now)
    if done is Done.HELD and not now.waits:
        return Outcome(now, Done.NOT_VALID, _why_not(now, done))
    return Outcome(now, Done.REFUSED, str(error))


def _why_not(target: Target, done: Done) -> str:
    if target.state.is_live and target.launch and target.launch.manifest.scheduler != "slurm":
        return "without Slurm there is no queue to be held in"
    if not target.state.is_live or done is Done.RELEASED:
        return "only what waits can be held, or released"
    return f"to let it save and leave: slipway cancel --save {shlex.quote(target.run)}"


def _is_held(status: JobStatus) -> bool:
    # Slurm's words are JobHeldUser, JobHeldAdmin, REQUEUE_HOLD and "... requeued held".
    word = (status.reason or "").partition(":")[0].lower()
    return status.state is State.PENDING and ("hold" in word or "held" in word)
