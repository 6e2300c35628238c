"""The status of launches: asked of each scheduler once for all of its jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import UserError
from launcher.jobs.launches import Launch, adopt, group_jobs, read_launch, require_launch, scheduler_of
from launcher.jobs.lookup import RunRef
from launcher.runs.paths import LAUNCHES, launch_numbers
from launcher.schedulers.base import JobRef, JobStatus, Scheduler
from launcher.schedulers.chain_status import may_go_on, read_marks_alone
from launcher.slurm.notations import compress_tasks
from launcher.slurm.states import State, why_waiting
from slipway.common.node.marks import cancelled_by, chain_end, read_attempts
from slipway.supervisor.dependent_stages import read_stages

# A launch that waits longer than this for its requeue is superseded by a newer one of its run.
_REQUEUE_SECONDS = 14 * 86400.0
_WAITS_FOR_JOB = why_waiting("PENDING", "Dependency")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStatus(JobStatus):
    """The status of a launch's job, or of one `task` of its array.

    Without a `launch` it could not be read, and the reason says why; `unanswered` is why the scheduler could
    not be asked.
    """

    run_dir: Path
    launch: Launch | None = None
    unanswered: str | None = None
    task: str | None = None

    @property
    def run(self) -> str:
        return self.launch.manifest.run if self.launch else self.run_dir.name

    @property
    def directory(self) -> Path:
        """Return the directory of the launch, that of the run if no launch can be read."""
        return self.launch.paths.directory if self.launch else self.run_dir

    @property
    def number(self) -> int | None:
        return self.launch.paths.number if self.launch else None

    @property
    def job_id(self) -> str | None:
        """Return the scheduler's id of the job; of a chain that of the current link."""
        if self.chain is not None:
            return self.chain.job_id
        job_id = self.launch.manifest.job_id if self.launch else None
        return f"{job_id}_{self.task}" if job_id and self.task else job_id

    @property
    def waiting_id(self) -> str | None:
        """Return the id of the job that can be held: of a chain the next link, if one waits."""
        return next(iter(self.chain.waiting), None) if self.chain else self.job_id

    @property
    def waiting_status(self) -> JobStatus:
        """Return the status of the job that can be held."""
        chain = self.chain
        return chain.jobs[chain.waiting[0]] if chain and chain.waiting else self

    @property
    def waits(self) -> bool:
        """Return True if the job, one of its tasks or a further link has not begun."""
        if self.chain is not None and self.state.is_live:
            return bool(self.chain.waiting)
        return State.PENDING in self._states

    @property
    def runs(self) -> bool:
        """Return True if the job, or one of its tasks, runs."""
        return not self._states.isdisjoint({State.RUNNING, State.SUSPENDED})

    @property
    def _states(self) -> set[State]:
        """Return the states of the job and of its tasks."""
        return {self.state} if self.task else {self.state, *self.tasks.values()}

    @property
    def may_live(self) -> bool:
        """Return True if the scheduler has the job, or could not be asked."""
        if self.state.is_live:
            return True
        is_lost = self.launch is not None and self.launch.manifest.job_id is None
        return self.state is State.UNKNOWN and (is_lost or self.unanswered is not None)

    def scheduler(self) -> Scheduler:
        """Return the scheduler that has the job; raise UserError if the launch could not be read."""
        if self.launch is None:
            raise UserError(self.reason or f"{self.run_dir}: no launch of it can be read")
        return scheduler_of(self.launch)


def pick_task(status: LaunchStatus, task: str | None) -> LaunchStatus:
    """Return the status of one task of an array; that of the whole job without a task."""
    return status if task is None else replace(status, task=task, state=status.tasks.get(task, status.state))


def poll(launches: Sequence[Launch]) -> list[LaunchStatus]:
    """Ask each scheduler once for all of its jobs; return the statuses of launches in their order.

    If a scheduler cannot be asked, its jobs have the status of their marks, or are UNKNOWN with the reason.
    """
    statuses: dict[Path, LaunchStatus] = {}
    for group in group_jobs(launches, lambda launch: launch):
        statuses |= _ask_scheduler(group)
    return [
        statuses.get(launch.paths.directory) or _status_of(launch, _explain_no_job(launch), launch.unanswered)
        for launch in launches
    ]


def _ask_scheduler(launches: Sequence[Launch]) -> dict[Path, LaunchStatus]:
    # Read anew each time: a chain gets further links while it is watched.
    tracked = [(launch, ref) for launch in launches if (ref := launch.ref)]
    if not tracked:
        return {}
    unanswered = None
    try:
        statuses = _statuses(scheduler_of(launches[0]), tracked)
    except UserError as error:
        unanswered = error.message.splitlines()[0]
        unknown = JobStatus(State.UNKNOWN, unanswered)
        marked = (read_marks_alone(ref) for _, ref in tracked)
        statuses = [status if status and status.state.is_final else unknown for status in marked]
    answers = {}
    for (launch, _), status in zip(tracked, statuses, strict=True):
        waits_for = launch.manifest.waits_for
        if waits_for is not None and (status.reason == _WAITS_FOR_JOB or _waits_silently(launch, status)):
            status = replace(status, reason=f"Dependency: it waits for the end of {waits_for}")
        answers[launch.paths.directory] = _status_of(launch, status, unanswered)
    return answers


def _status_of(launch: Launch, status: JobStatus, unanswered: str | None) -> LaunchStatus:
    return LaunchStatus.extending(status, run_dir=launch.paths.run_dir, launch=launch, unanswered=unanswered)


def _waits_silently(launch: Launch, status: JobStatus) -> bool:
    """Return True if a stage waits for a chain, but Slurm has no word for why: its dependency is new."""
    if status.state is not State.PENDING or status.reason is not None:
        return False
    with contextlib.suppress(OSError, ValueError):  # a damaged file hides no status
        before = read_stages(launch.paths.directory).before
        return before is not None and chain_end(before.directory) is None
    return False


def _statuses(scheduler: Scheduler, tracked: Sequence[tuple[Launch, JobRef]]) -> list[JobStatus]:
    """Ask for the statuses, and again for chains with a further link without an answer to its submission."""
    statuses = list(scheduler.statuses([ref for _, ref in tracked]))
    open_ended = [index for index, (_, ref) in enumerate(tracked) if may_go_on(ref, statuses[index])]
    jobs_of = scheduler.find([tracked[index][0].submission for index in open_ended]) if open_ended else {}
    extended: dict[int, JobRef] = {}
    for index in open_ended:
        launch, ref = tracked[index]
        further = {link: jobs[0] for link, jobs in jobs_of.get(launch.submission.tag, {}).items()}
        if further.keys() - ref.links.keys():
            extended[index] = replace(ref, links=dict(sorted((further | dict(ref.links)).items())))
    if extended:
        for index, status in zip(extended, scheduler.statuses([*extended.values()]), strict=True):
            statuses[index] = status
    return statuses


def _explain_no_job(launch: Launch) -> JobStatus:
    if launch.unanswered:
        return JobStatus(State.UNKNOWN, f"whether it became a job cannot be asked: {launch.unanswered}")
    if launch.manifest.error:
        return JobStatus(State.NOT_SUBMITTED, launch.manifest.error.strip().partition("\n")[0])
    if launch.is_without_job:
        why = launch.manifest.unanswered or "its launcher ended before it submitted"
        return JobStatus(State.NOT_SUBMITTED, why)
    why = launch.manifest.unanswered or "being submitted, or its launcher died"
    return JobStatus(State.UNKNOWN, f"{why}: no job of it is known yet")


def current_statuses(refs: Sequence[RunRef]) -> list[LaunchStatus]:
    """Return of each run all live launches, the newest first, or else the newest launch.

    However many runs there are, each scheduler is asked once. One broken run hides no other. Of a run of
    which only launches are named, these are returned instead, in any state.
    """
    numbers = _group_launches(refs)
    return [
        item
        for run_dir, items in _possible_statuses(numbers).items()
        for item in (items if numbers[run_dir] else _select_current(items))
    ]


def _group_launches(refs: Sequence[RunRef]) -> dict[Path, list[int]]:
    """Return the launches named for each run; an empty list means the whole run."""
    named: dict[Path, list[int]] = {ref.run_dir: [] for ref in refs}
    whole = {ref.run_dir for ref in refs if ref.launch is None}
    for ref in refs:
        if ref.launch is not None and ref.run_dir not in whole:
            named[ref.run_dir].append(ref.launch)
    return named


def _possible_statuses(numbers: Mapping[Path, Sequence[int]]) -> dict[Path, list[LaunchStatus]]:
    """Return each run's launches that may live, and its newest, newest first; or those that are named."""
    read = {
        run_dir: _read(run_dir, named) if named else _candidates(run_dir)
        for run_dir, named in numbers.items()
    }
    opened = adopt([item for items in read.values() for item in items if isinstance(item, Launch)])
    statuses = dict(zip((launch.paths.directory for launch in opened), poll(opened), strict=True))
    return {
        run_dir: [
            statuses[item.paths.directory]
            if isinstance(item, Launch)
            else LaunchStatus(State.UNKNOWN, item.message, run_dir=run_dir)
            for item in items
        ]
        for run_dir, items in read.items()
    }


def _candidates(run_dir: Path) -> list[Launch | UserError]:
    """Return the newest readable launch, and older ones that may be live; newest first."""
    items: list[Launch | UserError] = []
    try:
        numbers = launch_numbers(run_dir)
    except OSError as error:
        return [UserError(f"its launches cannot be read: {(error.strerror or str(error)).lower()}")]
    has_newer = False
    for number in reversed(numbers):
        if has_newer and _is_over(run_dir / LAUNCHES / str(number)):
            continue
        (item,) = _read(run_dir, [number])
        items.append(item)
        has_newer = has_newer or (isinstance(item, Launch) and not _is_cancelled_before(item))
    return items


def _read(run_dir: Path, numbers: Sequence[int]) -> list[Launch | UserError]:
    items: list[Launch | UserError] = []
    for number in numbers:
        try:
            items.append(read_launch(run_dir, number))
        except UserError as error:
            items.append(error)
    return items


def _is_cancelled_before(launch: Launch, state: State | None = None) -> bool:
    """Return True if a launch was refused, or was cancelled before it began, by its marks or its state."""
    attempts = launch.attempts
    if launch.manifest.error is not None or any(attempt.started is not None for attempt in attempts):
        return launch.manifest.error is not None
    is_cancelled = state is State.CANCELLED or any(attempt.state == "CANCELLED" for attempt in attempts)
    return is_cancelled or cancelled_by(launch.paths.directory, launch.job) is not None


def _is_over(launch_dir: Path) -> bool:
    """Return True if the marks alone prove that a job is over: a failed one may wait for its requeue."""
    attempts = read_attempts(launch_dir)
    if not attempts or attempts[-1].task is not None:
        return False
    last = attempts[-1]
    if last.is_over and chain_end(launch_dir) is not None:
        return True
    return last.exit_code == 0 or (last.is_over and time.time() - (last.ended or 0.0) > _REQUEUE_SECONDS)


def _select_current(items: Sequence[LaunchStatus]) -> list[LaunchStatus]:
    alive = [item for item in items if item.state.is_live]
    if alive:
        return alive
    read = [item for item in items if item.launch]
    submitted = [item for item in read if item.state is not State.NOT_SUBMITTED]
    began = [item for item in submitted if item.launch and not _is_cancelled_before(item.launch, item.state)]
    return list(began or submitted or read or items)[:1]


def named_statuses(refs: Sequence[RunRef]) -> list[LaunchStatus]:
    """Return the launches that a command line names, in its order, the newest of each run first.

    A run means all launches that live or may live, else its newest; a launch means itself. Raise
    UserError if a run has no such launch, or was never launched.
    """
    for ref in refs:
        require_launch(ref.run_dir, ref.launch)
    numbers = _group_launches(refs)
    by_run = _possible_statuses(numbers)
    named: dict[tuple[Path, int | None, str | None], LaunchStatus] = {}
    for ref in refs:
        for item in _select_named(ref, by_run[ref.run_dir], not numbers[ref.run_dir]):
            named.setdefault((ref.run_dir, item.number, item.task), item)
    return list(named.values())


def _select_named(ref: RunRef, items: Sequence[LaunchStatus], whole: bool) -> list[LaunchStatus]:
    if not whole:
        named = [pick_task(item, ref.task) for item in items if item.number in (ref.launch, None)]
        for item in named:
            _require_task(item)
        return named
    living = [item for item in items if item.may_live]
    submitted = [item for item in items if item.state is not State.NOT_SUBMITTED and item.launch]
    return living or submitted[:1] or list(items[:1])


def _require_task(item: LaunchStatus) -> None:
    tasks = item.tasks
    if item.task is not None and tasks and item.task not in tasks:
        job_id = item.launch.manifest.job_id if item.launch else None
        raise UserError(
            f"job {job_id} of {item.run} has no task {item.task}",
            hint=f"its tasks: {compress_tasks(list(map(int, tasks)))}",
        )
