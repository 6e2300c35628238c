"""Ending many jobs with few questions to their schedulers, in an order in which none of them starts."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.control.acting import Done, Outcome, again, by_scheduler, give_up, is_unanswered, over
from launcher.control.targets import Target
from launcher.errors import UserError
from launcher.runs.provenance import user
from launcher.runs.receipts import note_act
from launcher.schedulers.base import Scheduler, State
from supervisor.marks import ChainEnd, end_chain, note_cancelled

_Many = Callable[[Sequence[str]], Mapping[str, UserError]]


@dataclass
class _Ending:
    """A job that is to end, and what went wrong with that."""

    target: Target
    job_id: str
    saves: bool
    is_marked: bool = True
    further: list[str] = field(default_factory=list)
    error: UserError | None = None

    @property
    def directory(self) -> Path:
        assert self.target.launch is not None
        return self.target.launch.paths.directory

    @property
    def tasks_that_wait(self) -> list[str]:
        """Return the waiting tasks of an array whose running task saves: none may start after it."""
        tasks = {} if self.target.task or not self.saves else self.target.tracked.status.tasks
        return [f"{self.job_id}_{task}" for task, state in tasks.items() if state is State.PENDING]


# Jobs that are ended at once, each with what it is ended for.
_Wave = list[tuple[_Ending, str]]


def cancel(targets: Sequence[Target], save: bool = False) -> list[Outcome]:
    """End jobs, or with `save` let what runs of them save and leave; what waits is ended in any case.

    What waits is ended before what runs; of one run the later launches and the later links of a chain first,
    each when those before it have ended: so none starts where another ended. Jobs of different runs are ended
    at once.
    """
    settled = [_settled(target) for target in targets]
    endings = [
        _Ending(target, target.job_id, save and target.runs)
        for target, outcome in zip(targets, settled, strict=True)
        if outcome is None and target.job_id is not None
    ]
    for group in by_scheduler(endings, lambda ending: ending.target):
        try:
            _end(group[0].target.scheduler(), group)
        except UserError as error:
            for ending in group:
                ending.error = ending.error or error
    outcomes = iter(_outcomes(endings))
    return [outcome or next(outcomes) for outcome in settled]


def _settled(target: Target) -> Outcome | None:
    """Return the outcome of a target without a job to end; ``None`` if it has one."""
    if not target.may_live:
        return over(target)
    if target.job_id is None:
        return give_up(target)
    if target.state is State.UNKNOWN:
        return Outcome(target, Done.UNKNOWN, target.tracked.status.reason)
    return over(target) if target.state is State.COMPLETING else None


def _end(scheduler: Scheduler, endings: Sequence[_Ending]) -> None:
    _end_chains(scheduler, [ending for ending in endings if ending.target.links is not None])
    for wave in _waves(endings, _that_wait):
        _run(scheduler.cancel_all, wave)
    for wave in _waves(endings, _that_run):
        _run(scheduler.cancel_all, wave)
    _run(scheduler.save_all, [(ending, ending.job_id) for ending in endings if ending.saves])


def _end_chains(scheduler: Scheduler, endings: Sequence[_Ending]) -> None:
    """Let no further link of the chains do anything, and find those that wait."""
    lost: Mapping[str, Sequence[str]] = {}
    growing = []
    for ending in endings:
        try:
            end_chain(ending.directory, ChainEnd(user(), f"cancelled by {user()}"))
        except OSError:
            ending.is_marked = False
        launch, links = ending.target.launch, ending.target.links
        if launch and links and len(links.jobs) < links.most:
            growing.append(replace(launch.intent, link=len(links.jobs) + 1))
    if growing:
        # Also links of which the answer to their submission was lost.
        with contextlib.suppress(UserError):
            lost = scheduler.find(growing)
    for ending in endings:
        launch, links = ending.target.launch, ending.target.links
        if launch and links:
            known = [job_id for job_id in links.beyond if not links.jobs[job_id].state.is_final]
            found = lost.get(launch.intent.tag, ()) if len(links.jobs) < links.most else ()
            ending.further = [*known, *(job_id for job_id in found if job_id not in links.jobs)]


def _that_wait(ending: _Ending) -> Iterator[list[str]]:
    """The jobs that wait, those that are ended at once together: of a chain the last link first."""
    yield from ([job_id] for job_id in reversed(ending.further))
    if ending.tasks_that_wait:
        yield ending.tasks_that_wait
    if not ending.target.runs:
        yield [ending.job_id]


def _that_run(ending: _Ending) -> Iterator[list[str]]:
    if ending.target.runs and not ending.saves:
        yield [ending.job_id]


def _waves(endings: Sequence[_Ending], jobs: Callable[[_Ending], Iterator[list[str]]]) -> Iterator[_Wave]:
    """Jobs that can be ended at once: the first of each run, the second of each, and so on."""
    runs: dict[Path, list[_Wave]] = defaultdict(list)
    for ending in endings:
        runs[ending.target.tracked.run_dir] += [
            [(ending, job_id) for job_id in together] for together in jobs(ending)
        ]
    for row in itertools.zip_longest(*runs.values(), fillvalue=()):
        yield [item for together in row for item in together]


def _run(act: _Many, wave: _Wave) -> None:
    """Act on a wave but for what failed before, and note what came of it."""
    wave = [(ending, job_id) for ending, job_id in wave if ending.error is None]
    if not wave:
        return
    try:
        wrong = act([job_id for _, job_id in wave])
    except UserError as error:
        wrong = {job_id: error for _, job_id in wave}
    for ending, job_id in wave:
        _note(ending, job_id, wrong.get(job_id))


def _note(ending: _Ending, job_id: str, error: UserError | None) -> None:
    is_further = job_id in ending.further
    if error is not None:
        # A further link is over, or else leaves when it begins.
        if not is_further or not ending.is_marked or is_unanswered(error):
            ending.error = error
        return
    saves = ending.saves and job_id == ending.job_id
    note_act("told {} to save and leave" if saves else "cancelled {}", job_id)
    if is_further or (job_id == ending.job_id and not ending.saves and ending.target.task is None):
        note_cancelled(ending.directory, job_id, user())


def _outcomes(endings: Sequence[_Ending]) -> list[Outcome]:
    refused = [ending for ending in endings if ending.error and not is_unanswered(ending.error)]
    # They may have ended between the question and the act.
    now = {
        id(ending): target
        for ending, target in zip(refused, again([one.target for one in refused]), strict=True)
    }
    return [_outcome(ending, now.get(id(ending))) for ending in endings]


def _outcome(ending: _Ending, now: Target | None) -> Outcome:
    if ending.error is None:
        return Outcome(ending.target, Done.SAVING if ending.saves else Done.CANCELLED)
    if now is None:
        return Outcome(ending.target, Done.UNKNOWN, ending.error.message)
    if not now.may_live or now.state is State.COMPLETING:
        return over(now)
    return Outcome(now, Done.REFUSED, str(ending.error))
