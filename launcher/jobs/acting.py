"""Act on jobs: outcomes, waiting for ends, hold and release, with few questions to the schedulers."""

from __future__ import annotations

import enum
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.errors import DONE, MISTAKE, NOT_KNOWN, WENT_WRONG, UserError, worst_code
from launcher.jobs.asking import AskingTimes
from launcher.jobs.launches import group_jobs
from launcher.jobs.status import LaunchStatus, pick_task, poll
from launcher.runs.receipts import acts
from launcher.schedulers.base import NoAnswer, NotHeld
from launcher.slurm.commands import Unreachable
from launcher.slurm.states import Action, State
from slipway.common.node.marks import GIVEN_UP, claim

# The least seconds between two questions for the end of a job.
_SECONDS = 0.3
# The time limit for a scheduler that does not answer.
_PATIENCE_SECONDS = 60.0


class Effect(enum.Enum):
    """The effect of acting on a job."""

    CANCELLED = "cancelled"
    SAVING = "asked to save and exit"
    HELD = "held"
    RELEASED = "released"
    GIVEN_UP = "given up"  # a launch without a known job
    AS_ASKED = "as asked already"
    LEFT = "left alone"
    NOT_VALID = "not valid"  # asked for what cannot be
    REFUSED = "refused"
    UNKNOWN = "unknown"


_CODES = {Effect.NOT_VALID: MISTAKE, Effect.REFUSED: WENT_WRONG, Effect.UNKNOWN: NOT_KNOWN}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of acting on a job; `end` is how it ended, after waiting for that."""

    target: LaunchStatus
    effect: Effect
    message: str | None = None
    end: LaunchStatus | None = None


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code of a verb: the worst of its outcomes."""
    return worst_code(_CODES.get(outcome.effect, DONE) for outcome in outcomes)


def sort_targets(targets: Sequence[LaunchStatus]) -> list[LaunchStatus]:
    """Sort waiting jobs before running ones, the newest first: none starts where another ended."""
    return sorted(targets, key=lambda target: (target.runs, -(target.number or 0)))


def wait_for_ends(outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """Yield each outcome as soon as the scheduler confirms the end of its job."""
    ending = (Effect.CANCELLED, Effect.SAVING)
    left = [
        outcome
        for outcome in outcomes
        if outcome.effect in ending or (outcome.effect is Effect.AS_ASKED and outcome.target.state.is_live)
    ]
    times, answered = AskingTimes(least=_SECONDS), time.monotonic()
    while left:
        statuses = poll([outcome.target.launch for outcome in left if outcome.target.launch])
        times.note_answer(statuses)
        if not all(answer.unanswered for answer in statuses):
            answered = time.monotonic()
        waiting = []
        for outcome, answer in zip(left, statuses, strict=True):
            if (end := pick_task(answer, outcome.target.task)).state.is_final:
                yield replace(outcome, end=end)
            elif time.monotonic() - answered > _PATIENCE_SECONDS:
                yield replace(outcome, effect=Effect.UNKNOWN, message=answer.unanswered or answer.reason)
            else:
                waiting.append(outcome)
        left = waiting
        while left and not times.is_due():
            time.sleep(_SECONDS)


def is_unanswered(error: UserError) -> bool:
    """Return True if an action failed because the scheduler was silent: its outcome is not known."""
    return isinstance(error, Unreachable | NoAnswer)


def failures(refused: Sequence[tuple[LaunchStatus, UserError]]) -> list[Outcome]:
    """Return the outcomes of actions that failed: the jobs may have moved on since they were asked about."""
    answered = [target for target, error in refused if not is_unanswered(error)]
    statuses = poll([target.launch for target in answered if target.launch])
    now = {
        id(target): pick_task(status, target.task) for target, status in zip(answered, statuses, strict=True)
    }
    outcomes = []
    for target, error in refused:
        current = now.get(id(target))
        if current is None:
            outcomes.append(Outcome(target, Effect.UNKNOWN, error.message))
        elif not current.may_live or current.state is State.COMPLETING:
            outcomes.append(make_ended_outcome(current))
        else:
            outcomes.append(Outcome(current, Effect.REFUSED, str(error)))
    return outcomes


def make_ended_outcome(target: LaunchStatus) -> Outcome:
    """Return the outcome of a target that has ended, or is ending."""
    if target.state is State.UNKNOWN:
        return Outcome(target, Effect.UNKNOWN, target.reason)
    return Outcome(target, Effect.AS_ASKED, "it is ending" if target.state.is_live else "it is over")


def give_up(target: LaunchStatus) -> Outcome:
    """Stop any job of a launch whose submission was not answered."""
    launch, unanswered = target.launch, target.unanswered
    if launch is None:
        return Outcome(target, Effect.UNKNOWN, target.reason)
    if claim(launch.paths.directory, GIVEN_UP) != GIVEN_UP:
        return Outcome(target, Effect.UNKNOWN, "it became a job just now: try again")
    if unanswered is not None:
        message = f"{unanswered}; if there is a job, it exits as soon as it starts"
        return Outcome(target, Effect.UNKNOWN, message)
    message = "no job of it is known; if one appears, it exits as soon as it starts"
    return Outcome(target, Effect.GIVEN_UP, message)


def act_on_waiting(targets: Sequence[LaunchStatus], action: Action) -> list[Outcome]:
    """Hold waiting jobs, so that they do not start, or release held ones."""
    effect = Effect(action.value)
    # A launch of a run that does not wait is no mistake if another one does.
    waiting = {target.run_dir for target in targets if target.waits}
    outcomes = {
        id(target): _check_waiting_job(target, effect, target.run_dir in waiting) for target in targets
    }
    acted_on = [target for target in targets if outcomes[id(target)] is None]
    refused: list[tuple[LaunchStatus, UserError]] = []
    for group in group_jobs(acted_on, lambda target: target.launch):
        job_ids = [str(target.waiting_id) for target in group]
        try:
            errors = group[0].scheduler().act(action, job_ids)
        except UserError as error:
            errors = dict.fromkeys(job_ids, error)
        for target, job_id in zip(group, job_ids, strict=True):
            refusal = errors.get(job_id)
            if isinstance(refusal, NotHeld):
                outcomes[id(target)] = Outcome(target, Effect.AS_ASKED, "it is not held")
            elif refusal is not None:
                refused.append((target, refusal))
            else:
                acts[f"{action.value} {{}}"].append(job_id)
                outcomes[id(target)] = Outcome(target, effect)
    for (target, _), failure in zip(refused, failures(refused), strict=True):
        current, began = failure.target, action is Action.HOLD and not failure.target.waits
        is_late = began and failure.effect is Effect.REFUSED
        outcomes[id(target)] = (
            Outcome(current, Effect.NOT_VALID, _why_not(current, effect)) if is_late else failure
        )
    return [outcome for target in targets if (outcome := outcomes[id(target)])]


def _check_waiting_job(target: LaunchStatus, effect: Effect, others_wait: bool) -> Outcome | None:
    """Return the outcome of a target without a job to hold or release; ``None`` if it has one."""
    if target.waits and target.waiting_id is not None:
        status = target.waiting_status
        # Slurm's words are JobHeldUser, JobHeldAdmin, REQUEUE_HOLD and "... requeued held".
        word = (status.reason or "").partition(":")[0].lower()
        is_held = status.state is State.PENDING and ("hold" in word or "held" in word)
        if effect is Effect.HELD and is_held and not target.tasks:
            return Outcome(target, Effect.AS_ASKED, "it is held already")
        return None
    if target.may_live and not target.state.is_live:
        return Outcome(target, Effect.UNKNOWN, target.reason)
    return Outcome(target, Effect.LEFT if others_wait else Effect.NOT_VALID, _why_not(target, effect))


def _why_not(target: LaunchStatus, effect: Effect) -> str:
    if target.state.is_live and target.launch and target.launch.manifest.scheduler != "slurm":
        return "without Slurm there is no queue to be held in"
    if not target.state.is_live or effect is Effect.RELEASED:
        return "only what waits can be held, or released"
    return f"to let it save and exit: slipway cancel --save {shlex.quote(target.run)}"
