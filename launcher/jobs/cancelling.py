"""Cancel many jobs with few questions to their schedulers, in an order in which none of them starts."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import UserError
from launcher.jobs.acting import Effect, Outcome, failures, give_up, is_unanswered, make_ended_outcome
from launcher.jobs.launches import Launch, adopt, group_jobs, read_launch
from launcher.jobs.status import LaunchStatus, poll
from launcher.runs.paths import display_path
from launcher.runs.provenance import user
from launcher.runs.receipts import acts
from launcher.schedulers.base import ChainJobs, FoundJobs, Scheduler
from launcher.slurm.states import Action, State
from slipway.common.node.marks import ChainEnd, claim, end_chain, note_cancelled, take_back_end
from slipway.supervisor.dependent_stages import NAME, read_stages

_logger = logging.getLogger(__name__)

_UNKNOWN_STAGES = (
    "%s cannot be read (%s): stages that wait for %s are not cancelled, and exit by themselves when started"
)


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
        """Return True for a chain whose link saves before other links are ended."""
        return self.saves and self.target.chain is not None

    @property
    def tasks_that_wait(self) -> list[str]:
        """Return an array's waiting tasks, which must not start after the running one has saved."""
        tasks = {} if self.target.task or not self.saves else self.target.tasks
        waiting = [f"{self.job_id}_{task}" for task, state in tasks.items() if state is State.PENDING]
        return waiting if State.RUNNING in tasks.values() else []


# Jobs to end at once, each with its ending.
_Wave = list[tuple[_Ending, str]]


def cancel(targets: Sequence[LaunchStatus], save: bool = False) -> list[Outcome]:
    """Cancel jobs, or with `save` let running ones save and leave; waiting ones are always cancelled.

    Waiting jobs are cancelled before running ones; of one run the later launches and the later links of a
    chain first, each when those before it have ended: none starts where another ended. Jobs of different runs
    are cancelled at once. A chain that saves first is ended once the scheduler has accepted the signal: if it
    is refused, nothing is done.
    """
    decided = [_check_live_job(target) for target in targets]
    endings = [
        _Ending(target, target.job_id, save and target.runs, is_over=outcome is not None)
        for target, outcome in zip(targets, decided, strict=True)
        if target.job_id is not None
        # A chain that seems to be over: an unknown link of it may live.
        and (outcome is None or (target.chain is not None and outcome.effect is Effect.AS_ASKED))
    ]
    for group in group_jobs(endings, lambda ending: ending.target.launch):
        try:
            _end(group[0].target.scheduler(), group)
        except UserError as error:
            for ending in group:
                ending.error = ending.error or error
    outcomes = _outcomes(endings)
    return [
        outcomes.get(id(target)) or outcome or make_ended_outcome(target)
        for target, outcome in zip(targets, decided, strict=True)
    ]


def add_followers(targets: Sequence[LaunchStatus]) -> list[LaunchStatus]:
    """Add the stages that wait for chains among the targets: Slurm starts them when all links are gone.

    They would leave without doing anything, but not before they have got nodes.
    """
    known = {target.launch.paths.directory for target in targets if target.launch is not None}
    followers: dict[Path, str] = {}
    for target in targets:
        if target.launch is None or target.chain is None or not target.may_live:
            continue
        directory = target.launch.paths.directory
        try:
            stages = read_stages(directory).after
        except (OSError, ValueError) as error:
            _logger.warning(_UNKNOWN_STAGES, display_path(directory / NAME), error, target.run)
            continue
        tag = target.launch.manifest.tag
        followers |= {Path(stage.directory): tag for stage in stages if stage.needs_success}
    launches = []
    for directory, tag in followers.items():
        if directory not in known and directory.name.isdecimal():
            with contextlib.suppress(UserError, OSError, ValueError):  # it was removed since, or is damaged
                # Anybody may name any launch as one that follows: it has to name this chain, too.
                before = read_stages(directory).before
                if before is not None and before.tag == tag:
                    launches.append(read_launch(directory.parents[1], int(directory.name)))
    return [*targets, *filter(_waits_for_chain, poll(adopt(launches)))]


def _waits_for_chain(target: LaunchStatus) -> bool:
    """Return True if a stage's first job waits, also if a further one looks at a checkpoint just now."""
    if target.chain is None or target.launch is None:
        return target.state is State.PENDING
    first = target.chain.jobs.get(target.launch.manifest.job_id or "")
    return first is not None and first.state is State.PENDING


def _check_live_job(target: LaunchStatus) -> Outcome | None:
    """Return the outcome of a target without a job to end; ``None`` if it has one."""
    if not target.may_live:
        return make_ended_outcome(target)
    if target.job_id is None:
        return give_up(target)
    if target.state is State.UNKNOWN:
        return Outcome(target, Effect.UNKNOWN, target.reason)
    return make_ended_outcome(target) if target.state is State.COMPLETING else None


def _end(scheduler: Scheduler, endings: Sequence[_Ending]) -> None:
    saving = [ending for ending in endings if ending.saves_first]
    others = [ending for ending in endings if not ending.saves_first]
    _end_chains(scheduler, others)
    _cancel(scheduler, others, _find_waiting_jobs)
    running = [ending for ending in others if ending.target.runs and not (ending.saves or ending.is_over)]
    _cancel(scheduler, running, lambda ending: [[ending.job_id]])
    _run(scheduler, Action.SAVE, [(ending, ending.job_id) for ending in endings if ending.saves])
    # The next link sees the mark: it begins long after this one was asked to save.
    saving = [ending for ending in saving if ending.error is None]
    _end_chains(scheduler, saving)
    _cancel(scheduler, saving, _find_waiting_jobs)


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
    growing = [launch.submission for _, launch, links in chains if len(links.jobs) < links.max_links]
    jobs_of_tag: FoundJobs = {}
    is_known = True
    if growing:
        # Also links without a claim, or whose submission was not answered.
        try:
            jobs_of_tag = scheduler.find(growing)
        except UserError:
            is_known = False
    for ending, launch, links in chains:
        jobs_of = sorted(jobs_of_tag.get(launch.submission.tag, {}).items())
        lost = {link: [job for job in jobs if job not in links.jobs] for link, jobs in jobs_of}
        _claim(launch, links, {link: jobs[0] for link, jobs in lost.items() if jobs})
        known = [job_id for job_id in links.after_current if not links.jobs[job_id].state.is_final]
        ending.further = [*known, *(job for jobs in lost.values() for job in jobs)]
        if ending.is_ended_now and is_known and not ending.further and ending.target.state.is_final:
            take_back_end(ending.directory)  # it had ended by itself
            ending.is_ended_now = False


def _claim(launch: Launch, known: ChainJobs, lost: Mapping[int, str]) -> None:
    """Record links without claims, so that their ends can be awaited and shown."""
    recorded = launch.links
    for link, job_id in {**lost, **dict(zip(known.numbers, known.jobs, strict=True))}.items():
        if link not in recorded:
            claim(launch.paths.directory, job_id, link)


def _find_waiting_jobs(ending: _Ending) -> Iterator[list[str]]:
    """Yield the waiting jobs in groups to cancel at once: of a chain the last link first."""
    yield from ([job_id] for job_id in reversed(ending.further))
    if ending.tasks_that_wait:
        yield ending.tasks_that_wait
    if not ending.target.runs and not ending.is_over:
        yield [ending.job_id]


def _cancel(
    scheduler: Scheduler, endings: Sequence[_Ending], jobs: Callable[[_Ending], Iterable[list[str]]]
) -> None:
    """Cancel jobs at once: the first of each run, then the second of each, and so on."""
    runs: dict[Path, list[_Wave]] = defaultdict(list)
    for ending in endings:
        runs[ending.target.run_dir] += [
            [(ending, job_id) for job_id in together] for together in jobs(ending)
        ]
    for row in itertools.zip_longest(*runs.values(), fillvalue=()):
        _run(scheduler, Action.CANCEL, [item for together in row for item in together])


def _run(scheduler: Scheduler, action: Action, wave: _Wave) -> None:
    """Act on a wave without jobs that failed before, and note the results."""
    wave = [(ending, job_id) for ending, job_id in wave if ending.error is None]
    if not wave:
        return
    try:
        errors = scheduler.act(action, [job_id for _, job_id in wave])
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
    acts["asked {} to save and exit" if saves else "cancelled {}"].append(job_id)
    ending.cancelled += [job_id] if is_further else []
    if is_further or (job_id == ending.job_id and not ending.saves and ending.target.task is None):
        note_cancelled(ending.directory, job_id, user())


def _outcomes(endings: Sequence[_Ending]) -> dict[int, Outcome]:
    """Return the outcomes by the identities of their targets."""
    refused = [(ending, ending.error) for ending in endings if ending.error is not None]
    failed = failures([(ending.target, error) for ending, error in refused])
    outcomes = {id(ending.target): _make_outcome(ending) for ending in endings if ending.error is None}
    for (ending, _), outcome in zip(refused, failed, strict=True):
        outcomes[id(ending.target)] = outcome
        if outcome.effect is Effect.REFUSED and ending.is_ended_now and not ending.cancelled:
            take_back_end(ending.directory)
    return outcomes


def _make_outcome(ending: _Ending) -> Outcome:
    if not ending.is_over:
        return Outcome(ending.target, Effect.SAVING if ending.saves else Effect.CANCELLED)
    message = "it is over" if ending.target.state.is_final else "it is ending"
    further = f" (cancelled of its chain: {', '.join(ending.cancelled)})"
    return Outcome(ending.target, Effect.AS_ASKED, message + (further if ending.cancelled else ""))
