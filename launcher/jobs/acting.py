"""Act on jobs with few questions to their schedulers: wait, hold, release, cancel."""

from __future__ import annotations

import enum
import itertools
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from launcher.errors import UserError
from launcher.exit_codes import DONE, MISTAKE, NOT_KNOWN, WENT_WRONG
from launcher.jobs.launches import Launch
from launcher.jobs.status import LaunchStatus, poll, state_of_task
from launcher.runs.provenance import user
from launcher.runs.receipts import note_act
from launcher.schedulers.base import ChainJobs, JobStatus, NoAnswer, Scheduler
from launcher.slurm.commands import Unreachable
from launcher.slurm.job_actions import NotHeld
from launcher.slurm.states import State
from supervisor.marks import GIVEN_UP, ChainEnd, claim, end_chain, note_cancelled, take_back_end

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
                note_act(f"{effect.value} {{}}", job_id)
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


@dataclass
class _Ending:
    """A job to end, and the error of that.

    `is_over` means that it has ended already, and only `further` links of its chain may live; `cancelled` are
    those that were ended. `is_marked` is False if the mark that ends the chain could not be left;
    `is_ended_now` means that the mark is new.
    """

    target: LaunchStatus
    job_id: str
    saves: bool
    is_over: bool = False
    is_marked: bool = True
    is_ended_now: bool = False
    further: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    error: UserError | None = None

    @property
    def directory(self) -> Path:
        assert self.target.launch is not None
        return self.target.launch.paths.directory

    @property
    def saves_first(self) -> bool:
        """Return True for a chain whose link is to save before any other is ended."""
        return self.saves and self.target.chain is not None

    @property
    def tasks_that_wait(self) -> list[str]:
        """Return the waiting tasks of an array whose running task saves: none may start after it.

        None for a suspended task, whose saving will be refused.
        """
        tasks = {} if self.target.task or not self.saves else self.target.status.tasks
        waiting = [f"{self.job_id}_{task}" for task, state in tasks.items() if state is State.PENDING]
        return waiting if State.RUNNING in tasks.values() else []


# Jobs to end at once, each with its ending.
_Wave = list[tuple[_Ending, str]]


def cancel(targets: Sequence[LaunchStatus], save: bool = False) -> list[Outcome]:
    """Cancel jobs, or with `save` let running ones save and leave; waiting ones are always cancelled.

    Waiting jobs are cancelled before running ones; of one run the later launches and the later links of a
    chain first, each when those before it have ended: none starts where another ended. Jobs of different runs
    are cancelled at once. A chain whose link is to save is ended after the scheduler has accepted that: if it
    is refused, nothing is done.
    """
    decided = [_without_live_job(target) for target in targets]
    endings = [
        _Ending(target, target.job_id, save and target.runs, is_over=outcome is not None)
        for target, outcome in zip(targets, decided, strict=True)
        if target.job_id is not None and (outcome is None or _is_chain_without_end(target, outcome))
    ]
    for group in by_scheduler(endings, lambda ending: ending.target):
        try:
            _end(group[0].target.scheduler(), group)
        except UserError as error:
            for ending in group:
                ending.error = ending.error or error
    outcomes = {
        id(ending.target): outcome for ending, outcome in zip(endings, _outcomes(endings), strict=True)
    }
    return [
        outcomes.get(id(target)) or outcome or over(target)
        for target, outcome in zip(targets, decided, strict=True)
    ]


def _without_live_job(target: LaunchStatus) -> Outcome | None:
    """Return the outcome of a target without a job to end; ``None`` if it has one."""
    if not target.may_live:
        return over(target)
    if target.job_id is None:
        return give_up(target)
    if target.state is State.UNKNOWN:
        return Outcome(target, Effect.UNKNOWN, target.status.reason)
    return over(target) if target.state is State.COMPLETING else None


def _is_chain_without_end(target: LaunchStatus, outcome: Outcome) -> bool:
    """Return True for a chain that seems to be over: an unknown link of it may live."""
    return target.chain is not None and outcome.effect is Effect.AS_ASKED


def _end(scheduler: Scheduler, endings: Sequence[_Ending]) -> None:
    saving = [ending for ending in endings if ending.saves_first]
    others = [ending for ending in endings if not ending.saves_first]
    _end_chains(scheduler, others)
    for wave in _waves(others, _that_wait):
        _run(scheduler.cancel_all, wave)
    for wave in _waves(others, _that_run):
        _run(scheduler.cancel_all, wave)
    _run(scheduler.save_all, [(ending, ending.job_id) for ending in endings if ending.saves])
    # The next link sees the mark: it begins long after this one was asked to save.
    saving = [ending for ending in saving if ending.error is None]
    _end_chains(scheduler, saving)
    for wave in _waves(saving, _that_wait):
        _run(scheduler.cancel_all, wave)


def _end_chains(scheduler: Scheduler, endings: Sequence[_Ending]) -> None:
    """Let no further link of the chains do anything; find the waiting ones, also without a claim."""
    chains = [
        (ending, launch, links)
        for ending in endings
        if (launch := ending.target.launch) and (links := ending.target.chain)
    ]
    for ending, _, _ in chains:
        try:
            ending.is_ended_now = end_chain(ending.directory, ChainEnd(user(), f"cancelled by {user()}"))
        except OSError:
            ending.is_marked = False
    growing = [
        replace(launch.submission, link=None)
        for _, launch, links in chains
        if len(links.jobs) < links.max_links
    ]
    jobs_of_tag: Mapping[str, Mapping[int, Sequence[str]]] = {}
    is_known = True
    if growing:
        # Also links whose claim, or the answer to whose submission, was lost.
        try:
            jobs_of_tag = scheduler.find_links(growing)
        except UserError:
            is_known = False
    for ending, launch, links in chains:
        jobs_of = sorted(jobs_of_tag.get(launch.submission.tag, {}).items())
        lost = {link: [job for job in jobs if job not in links.jobs] for link, jobs in jobs_of}
        _claim(launch, links, {link: jobs[0] for link, jobs in lost.items() if jobs})
        known = [job_id for job_id in links.after_current if not links.jobs[job_id].state.is_final]
        ending.further = [*known, *(job for jobs in lost.values() for job in jobs)]
        if ending.is_ended_now and is_known and not ending.further and ending.target.state.is_final:
            take_back_end(ending.directory)  # it was over before: nobody cancelled it
            ending.is_ended_now = False


def _claim(launch: Launch, known: ChainJobs, lost: Mapping[int, str]) -> None:
    """Record links whose claims are missing, so that their ends can be waited for and shown."""
    recorded = launch.links
    for link, job_id in {**lost, **dict(zip(known.numbers, known.jobs, strict=True))}.items():
        if link not in recorded:
            claim(launch.paths.directory, job_id, link)


def _that_wait(ending: _Ending) -> Iterator[list[str]]:
    """Yield the waiting jobs in groups to cancel at once: of a chain the last link first."""
    yield from ([job_id] for job_id in reversed(ending.further))
    if ending.tasks_that_wait:
        yield ending.tasks_that_wait
    if not ending.target.runs and not ending.is_over:
        yield [ending.job_id]


def _that_run(ending: _Ending) -> Iterator[list[str]]:
    if ending.target.runs and not ending.saves and not ending.is_over:
        yield [ending.job_id]


def _waves(endings: Sequence[_Ending], jobs: Callable[[_Ending], Iterator[list[str]]]) -> Iterator[_Wave]:
    """Yield jobs to end at once: the first of each run, the second of each, and so on."""
    runs: dict[Path, list[_Wave]] = defaultdict(list)
    for ending in endings:
        runs[ending.target.run_dir] += [
            [(ending, job_id) for job_id in together] for together in jobs(ending)
        ]
    for row in itertools.zip_longest(*runs.values(), fillvalue=()):
        yield [item for together in row for item in together]


def _run(act: _Many, wave: _Wave) -> None:
    """Act on a wave without jobs that failed before, and note the results."""
    wave = [(ending, job_id) for ending, job_id in wave if ending.error is None]
    if not wave:
        return
    try:
        errors = act([job_id for _, job_id in wave])
    except UserError as error:
        errors = {job_id: error for _, job_id in wave}
    for ending, job_id in wave:
        _note(ending, job_id, errors.get(job_id))


def _note(ending: _Ending, job_id: str, error: UserError | None) -> None:
    is_further = job_id in ending.further
    if error is not None:
        # A further link is over, or else leaves when it begins.
        if not is_further or not ending.is_marked or is_unanswered(error):
            ending.error = error
        return
    saves = ending.saves and job_id == ending.job_id
    note_act("told {} to save and leave" if saves else "cancelled {}", job_id)
    ending.cancelled += [job_id] if is_further else []
    if is_further or (job_id == ending.job_id and not ending.saves and ending.target.task is None):
        note_cancelled(ending.directory, job_id, user())


def _outcomes(endings: Sequence[_Ending]) -> list[Outcome]:
    refused = [ending for ending in endings if ending.error and not is_unanswered(ending.error)]
    # They may have ended between the question and the action.
    now = {
        id(ending): target
        for ending, target in zip(refused, refreshed([ending.target for ending in refused]), strict=True)
    }
    return [_outcome(ending, now.get(id(ending))) for ending in endings]


def _outcome(ending: _Ending, now: LaunchStatus | None) -> Outcome:
    if ending.error is None and ending.is_over:
        message = "it is over" if ending.target.state.is_final else "it is ending"
        further = f", but not job {', '.join(ending.cancelled)} of its chain, cancelled now"
        return Outcome(ending.target, Effect.AS_ASKED, message + (further if ending.cancelled else ""))
    if ending.error is None:
        return Outcome(ending.target, Effect.SAVING if ending.saves else Effect.CANCELLED)
    if now is None:
        return Outcome(ending.target, Effect.UNKNOWN, ending.error.message)
    if not now.may_live or now.state is State.COMPLETING:
        return over(now)
    if ending.is_ended_now and not ending.cancelled:
        take_back_end(ending.directory)
    return Outcome(now, Effect.REFUSED, str(ending.error))
