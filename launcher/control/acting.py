"""Holding jobs back and letting them go, one after the other, and what came of acting on jobs."""

from __future__ import annotations

import enum
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.control.targets import Target, state_of
from launcher.errors import UserError
from launcher.runs.marks import GIVEN_UP, claim
from launcher.schedulers.base import JobStatus, NoAnswer, NotHeld, Scheduler, State
from launcher.schedulers.commands import Unreachable
from launcher.tracking.exit_codes import DONE, MISTAKE, NOT_KNOWN, WENT_WRONG
from launcher.tracking.polling import poll

# Between two questions whether a job has ended: at first, and at most.
_SECONDS, _MOST_SECONDS = 0.3, 5.0
# For how long a scheduler that does not answer is waited for.
_PATIENCE_SECONDS = 60.0


_Act = Callable[[Scheduler, str, Target], None]


class Done(enum.Enum):
    """What came of acting on a job."""

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


_CODES = {Done.NOT_VALID: MISTAKE, Done.REFUSED: WENT_WRONG, Done.UNKNOWN: NOT_KNOWN}
_WORST_FIRST = (WENT_WRONG, NOT_KNOWN, MISTAKE, DONE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of acting on a target; `end` is how it ended, once that was waited for."""

    target: Target
    done: Done
    words: str | None = None
    end: JobStatus | None = None


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """What a verb exits with: the worst of what came of it."""
    codes = {_CODES.get(outcome.done, DONE) for outcome in outcomes}
    return next((code for code in _WORST_FIRST if code in codes), DONE)


def in_order(targets: Sequence[Target]) -> list[Target]:
    """Those that wait before those that run, the newest first: so that none starts where another ended."""
    return sorted(targets, key=lambda target: (target.runs, -(target.number or 0)))


def hold(target: Target, others_wait: bool = False) -> Outcome:
    """Keep what waits of a job from starting.

    Parameters
    ----------
    others_wait
        Whether another launch of the run does: that this one does not is no mistake then.
    """
    if _is_held(target.waiting_status) and not target.tracked.status.tasks:
        return Outcome(target, Done.AS_ASKED, "it is held already")
    return _held_back(target, Done.HELD, others_wait, lambda scheduler, one: scheduler.hold(one))


def release(target: Target, others_wait: bool = False) -> Outcome:
    """Let what is held of a job start; `others_wait` is as in `hold`."""
    return _held_back(target, Done.RELEASED, others_wait, lambda scheduler, one: scheduler.release(one))


def wait_for_ends(outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """Wait until the schedulers confirm the ends of jobs that were acted on; each as soon as it has ended."""
    left = [outcome for outcome in outcomes if _is_ending(outcome)]
    seconds, answered = _SECONDS, time.monotonic()
    while left:
        told = poll([outcome.target.launch for outcome in left if outcome.target.launch])
        if not all(answer.unanswered for answer in told):
            answered = time.monotonic()
        waiting = []
        for outcome, answer in zip(left, told, strict=True):
            state = state_of(answer.status, outcome.target.task)
            if state.is_final:
                yield replace(outcome, end=replace(answer.status, state=state))
            elif time.monotonic() - answered > _PATIENCE_SECONDS:
                yield replace(outcome, done=Done.UNKNOWN, words=answer.unanswered or answer.status.reason)
            else:
                waiting.append(outcome)
        left = waiting
        if left:
            time.sleep(seconds)
            seconds = min(seconds * 1.5, _MOST_SECONDS)


def _is_ending(outcome: Outcome) -> bool:
    asked = outcome.done is Done.AS_ASKED and outcome.target.state.is_live
    return asked or outcome.done in (Done.CANCELLED, Done.SAVING)


def _held_back(
    target: Target, done: Done, others_wait: bool, act: Callable[[Scheduler, str], None]
) -> Outcome:
    waiting = target.waiting_id
    if target.waits and waiting is not None:
        return _act(target, done, lambda scheduler, _, __: act(scheduler, waiting))
    if target.may_live and not target.state.is_live:
        return Outcome(target, Done.UNKNOWN, target.tracked.status.reason)
    return Outcome(target, Done.LEFT if others_wait else Done.NOT_VALID, _why_not(target, done))


def _why_not(target: Target, done: Done) -> str:
    if target.state.is_live and target.launch and target.launch.manifest.scheduler != "slurm":
        return "without Slurm there is no queue to be held in"
    if not target.state.is_live or done is Done.RELEASED:
        return "only what waits can be held, or released"
    return f"to let it save and leave: slipway cancel --save {shlex.quote(target.run)}"


def _act(target: Target, done: Done, act: _Act) -> Outcome:
    assert target.job_id is not None
    try:
        act(target.scheduler(), target.job_id, target)
    except (Unreachable, NoAnswer) as error:
        return Outcome(target, Done.UNKNOWN, error.message)
    except NotHeld:
        return Outcome(target, Done.AS_ASKED, "it is not held")
    except UserError as error:
        # It may have ended, or begun, between the question and the act.
        (now,) = again([target])
        if not now.may_live or now.state is State.COMPLETING:
            return over(now)
        if done is Done.HELD and not now.waits:
            return Outcome(now, Done.NOT_VALID, _why_not(now, done))
        return Outcome(now, Done.REFUSED, str(error))
    return Outcome(target, done)


def is_unanswered(error: UserError) -> bool:
    """Return True if an act failed because the scheduler was silent: its outcome is not known."""
    return isinstance(error, Unreachable | NoAnswer)


def again(targets: Sequence[Target]) -> list[Target]:
    """Look at targets anew, with one question for all of them."""
    told = iter(poll([target.launch for target in targets if target.launch]))
    now = []
    for target in targets:
        answer = next(told) if target.launch else None
        if answer is not None:
            tracked = replace(target.tracked, status=answer.status, unanswered=answer.unanswered)
            target = replace(target, tracked=tracked)
        now.append(target)
    return now


def over(target: Target) -> Outcome:
    """Return the outcome of a target that has ended, or is ending."""
    if target.state is State.UNKNOWN:
        return Outcome(target, Done.UNKNOWN, target.tracked.status.reason)
    return Outcome(target, Done.AS_ASKED, "it is ending" if target.state.is_live else "it is over")


def give_up(target: Target) -> Outcome:
    """Keep any job of a launch whose answer was lost from doing anything from now on."""
    launch, unanswered = target.launch, target.tracked.unanswered
    if launch is None:
        return Outcome(target, Done.UNKNOWN, target.tracked.status.reason)
    if claim(launch.paths.directory, GIVEN_UP) != GIVEN_UP:
        return Outcome(target, Done.UNKNOWN, "it became a job just now: try again")
    if unanswered is not None:
        return Outcome(target, Done.UNKNOWN, f"{unanswered}; should there be a job, it leaves when it begins")
    return Outcome(
        target, Done.GIVEN_UP, "no job of it is known; should one come yet, it leaves when it begins"
    )


def _is_held(status: JobStatus) -> bool:
    # Slurm's words are JobHeldUser, JobHeldAdmin, REQUEUE_HOLD and "... requeued held".
    word = (status.reason or "").partition(":")[0].lower()
    return status.state is State.PENDING and ("hold" in word or "held" in word)
