"""Act on jobs: outcomes, waiting for ends, hold and release, with few questions to the schedulers."""

from __future__ import annotations

import enum
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from launcher.errors import DONE, MISTAKE, NOT_KNOWN, WENT_WRONG, UserError
from launcher.jobs.status import LaunchStatus, poll, state_of_task
from launcher.runs.receipts import acts
from launcher.schedulers.base import JobStatus, NoAnswer, Scheduler
from launcher.slurm.commands import Unreachable
from launcher.slurm.job_actions import NotHeld
from launcher.slurm.states import State
from supervisor.marks import GIVEN_UP, claim

T = TypeVar("T")
_Many = Callable[[Sequence[str]], Mapping[str, UserError]]

# The seconds between two questions for the end of a job: the first, and the largest.
_SECONDS, _MAX_SECONDS = 0.3, 5.0
# The time limit for a scheduler that does not answer.
_PATIENCE_SECONDS = 60.0


class Effect(enum.Enum):
    """The effect of acting on a job."""

    CANCELLED = "cancelled"
    SAVING = "asked to save and leave"
    HELD = "held"
    RELEASED = "released"
    GIVEN_UP = "given up"  # a launch of which no job is known
    AS_ASKED = "as asked already"
    LEFT = "left alone"
    NOT_VALID = "not valid"  # asked for what cannot be
    REFUSED = "refused"
    UNKNOWN = "unknown"


_CODES = {Effect.NOT_VALID: MISTAKE, Effect.REFUSED: WENT_WRONG, Effect.UNKNOWN: NOT_KNOWN}
_WORST_FIRST = (WENT_WRONG, NOT_KNOWN, MISTAKE, DONE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of acting on a job; `end` is how it ended, after waiting for that."""

    target: LaunchStatus
    effect: Effect
    message: str | None = None
    end: JobStatus | None = None


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code of a verb: the worst of its outcomes."""
    codes = {_CODES.get(outcome.effect, DONE) for outcome in outcomes}
    return next((code for code in _WORST_FIRST if code in codes), DONE)


def in_order(targets: Sequence[LaunchStatus]) -> list[LaunchStatus]:
    """Sort waiting jobs before running ones, the newest first: none starts where another ended."""
    return sorted(targets, key=lambda target: (target.runs, -(target.number or 0)))


def wait_for_ends(outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """Yield each outcome as soon as the scheduler confirms the end of its job."""
    left = [outcome for outcome in outcomes if _is_ending(outcome)]
    seconds, answered = _SECONDS, time.monotonic()
    while left:
        statuses = poll([outcome.target.launch for outcome in left if outcome.target.launch])
        if not all(answer.unanswered for answer in statuses):
            answered = time.monotonic()
        waiting = []
        for outcome, answer in zip(left, statuses, strict=True):
            state = state_of_task(answer.status, outcome.target.task)
            if state.is_final:
                yield replace(outcome, end=replace(answer.status, state=state))
            elif time.monotonic() - answered > _PATIENCE_SECONDS:
                yield replace(
                    outcome, effect=Effect.UNKNOWN, message=answer.unanswered or answer.status.reason
                )
            else:
                waiting.append(outcome)
        left = waiting
        if left:
            time.sleep(seconds)
            seconds = min(seconds * 1.5, _MAX_SECONDS)


def _is_ending(outcome: Outcome) -> bool:
    is_ending_already = outcome.effect is Effect.AS_ASKED and outcome.target.state.is_live
    return is_ending_already or outcome.effect in (Effect.CANCELLED, Effect.SAVING)


def by_scheduler(items: Sequence[T], target_of: Callable[[T], LaunchStatus]) -> list[list[T]]:
    """Group items by the schedulers of their targets, whose launches can be read."""
    groups: dict[tuple[str | None, ...], list[T]] = defaultdict(list)
    for item in items:
        launch = target_of(item).launch
        assert launch is not None
        manifest = launch.manifest
        where = (None,) if manifest.scheduler == "slurm" else (manifest.host,)
        groups[manifest.scheduler, launch.slurm_conf, *where].append(item)
    return list(groups.values())


def is_unanswered(error: UserError) -> bool:
    """Return True if an action failed because the scheduler was silent: its outcome is not known."""
    return isinstance(error, Unreachable | NoAnswer)


def refreshed(targets: Sequence[LaunchStatus]) -> list[LaunchStatus]:
    """Return new statuses of targets, with one question for all of them."""
    statuses = iter(poll([target.launch for target in targets if target.launch]))
    return [replace(next(statuses), task=target.task) if target.launch else target for target in targets]


def over(target: LaunchStatus) -> Outcome:
    """Return the outcome of a target that has ended, or is ending."""
    if target.state is State.UNKNOWN:
        return Outcome(target, Effect.UNKNOWN, target.status.reason)
    return Outcome(target, Effect.AS_ASKED, "it is ending" if target.state.is_live else "it is over")


def give_up(target: LaunchStatus) -> Outcome:
    """Keep any job of a launch whose answer was lost from doing anything."""
    launch, unanswered = target.launch, target.unanswered
    if launch is None:
        return Outcome(target, Effect.UNKNOWN, target.status.reason)
    if claim(launch.paths.directory, GIVEN_UP) != GIVEN_UP:
        return Outcome(target, Effect.UNKNOWN, "it became a job just now: try again")
    if unanswered is not None:
        return Outcome(
            target, Effect.UNKNOWN, f"{unanswered}; should there be a job, it leaves when it begins"
        )
    return Outcome(
        target, Effect.GIVEN_UP, "no job of it is known; should one come yet, it leaves when it begins"
    )


def hold(targets: Sequence[LaunchStatus]) -> list[Outcome]:
    """Keep waiting jobs from starting."""
    return _hold_or_release(targets, Effect.HELD, lambda scheduler: scheduler.hold_all)


def release(targets: Sequence[LaunchStatus]) -> list[Outcome]:
    """Let held jobs start."""
    return _hold_or_release(targets, Effect.RELEASED, lambda scheduler: scheduler.release_all)


def _hold_or_release(
    targets: Sequence[LaunchStatus], effect: Effect, verb: Callable[[Scheduler], _Many]
) -> list[Outcome]:
    # A launch of a run that does not wait is no mistake if another one does.
    waiting = {target.run_dir for target in targets if target.waits}
    decided = [_without_waiting_job(target, effect, target.run_dir in waiting) for target in targets]
    acted_on = [target for target, outcome in zip(targets, decided, strict=True) if outcome is None]
    errors: dict[int, UserError] = {}
    for group in by_scheduler(acted_on, lambda target: target):
        by_job = _try_group(group, verb)
        for target in group:
            job_id = target.waiting_id
            if job_id is not None and job_id in by_job:
                errors[id(target)] = by_job[job_id]
            elif job_id is not None:
                acts[f"{effect.value} {{}}"].append(job_id)
    outcomes = iter(_hold_outcomes(acted_on, effect, errors))
    return [outcome or next(outcomes) for outcome in decided]


def _without_waiting_job(target: LaunchStatus, effect: Effect, others_wait: bool) -> Outcome | None:
    """Return the outcome of a target without a job to hold or release; ``None`` if it has one."""
    if target.waits and target.waiting_id is not None:
        if effect is Effect.HELD and _has_held_status(target.waiting_status) and not target.status.tasks:
            return Outcome(target, Effect.AS_ASKED, "it is held already")
        return None
    if target.may_live and not target.state.is_live:
        return Outcome(target, Effect.UNKNOWN, target.status.reason)
    return Outcome(target, Effect.LEFT if others_wait else Effect.NOT_VALID, _why_not(target, effect))


def _try_group(group: Sequence[LaunchStatus], verb: Callable[[Scheduler], _Many]) -> Mapping[str, UserError]:
    job_ids = [target.waiting_id for target in group if target.waiting_id is not None]
    try:
        return verb(group[0].scheduler())(job_ids)
    except UserError as error:
        return dict.fromkeys(job_ids, error)


def _hold_outcomes(
    targets: Sequence[LaunchStatus], effect: Effect, errors: Mapping[int, UserError]
) -> list[Outcome]:
    refused = [item for item in targets if id(item) in errors and not _is_explained_by(errors[id(item)])]
    # They may have ended, or begun, between the question and the action.
    now = {id(before): target for before, target in zip(refused, refreshed(refused), strict=True)}
    return [_hold_outcome(item, effect, errors.get(id(item)), now.get(id(item))) for item in targets]


def _is_explained_by(error: UserError) -> bool:
    return is_unanswered(error) or isinstance(error, NotHeld)


def _hold_outcome(
    target: LaunchStatus, effect: Effect, error: UserError | None, now: LaunchStatus | None
) -> Outcome:
    if error is None:
        return Outcome(target, effect)
    if isinstance(error, NotHeld):
        return Outcome(target, Effect.AS_ASKED, "it is not held")
    if now is None:
        return Outcome(target, Effect.UNKNOWN, error.message)
    if not now.may_live or now.state is State.COMPLETING:
        return over(now)
    if effect is Effect.HELD and not now.waits:
        return Outcome(now, Effect.NOT_VALID, _why_not(now, effect))
    return Outcome(now, Effect.REFUSED, str(error))


def _why_not(target: LaunchStatus, effect: Effect) -> str:
    if target.state.is_live and target.launch and target.launch.manifest.scheduler != "slurm":
        return "without Slurm there is no queue to be held in"
    if not target.state.is_live or effect is Effect.RELEASED:
        return "only what waits can be held, or released"
    return f"to let it save and leave: slipway cancel --save {shlex.quote(target.run)}"


def _has_held_status(status: JobStatus) -> bool:
    # Slurm's words are JobHeldUser, JobHeldAdmin, REQUEUE_HOLD and "... requeued held".
    word = (status.reason or "").partition(":")[0].lower()
    return status.state is State.PENDING and ("hold" in word or "held" in word)
