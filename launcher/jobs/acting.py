"""The results of acting on jobs, and waiting for their ends."""

from __future__ import annotations

import enum
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from launcher.control.targets import Target, state_of
from launcher.errors import UserError
from launcher.exit_codes import DONE, MISTAKE, NOT_KNOWN, WENT_WRONG
from launcher.schedulers.base import JobStatus, NoAnswer
from launcher.slurm.commands import Unreachable
from launcher.slurm.states import State
from launcher.tracking.polling import poll
from supervisor.marks import GIVEN_UP, claim

T = TypeVar("T")

# Between two questions whether a job has ended: at first, and at most.
_SECONDS, _MOST_SECONDS = 0.3, 5.0
# For how long a scheduler that does not answer is waited for.
_PATIENCE_SECONDS = 60.0


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


def by_scheduler(items: Sequence[T], target_of: Callable[[T], Target]) -> list[list[T]]:
    """Group items by the schedulers that have the jobs of their targets, which can be read."""
    groups: dict[tuple[str | None, ...], list[T]] = defaultdict(list)
    for item in items:
        launch = target_of(item).launch
        assert launch is not None
        manifest = launch.manifest
        where = (None,) if manifest.scheduler == "slurm" else (manifest.host,)
        groups[manifest.scheduler, launch.slurm_conf, *where].append(item)
    return list(groups.values())


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
