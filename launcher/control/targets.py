"""What a verb is to act on: the jobs that a user's words name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError
from launcher.runs.paths import launch_numbers
from launcher.schedulers.base import ChainJobs, JobStatus, Scheduler
from launcher.slurm.hostlists import compress_tasks
from launcher.slurm.states import State
from launcher.tracking.current import Tracked, look_closely
from launcher.tracking.finding import Found
from launcher.tracking.launches import Launch, scheduler_of


@dataclass(frozen=True, slots=True)
class Target:
    """A launch and how it is; with `task` one task of its array."""

    tracked: Tracked
    task: str | None = None

    @property
    def launch(self) -> Launch | None:
        return self.tracked.launch

    @property
    def run(self) -> str:
        return self.launch.manifest.run if self.launch else self.tracked.run_dir.name

    @property
    def number(self) -> int | None:
        return self.launch.paths.number if self.launch else None

    @property
    def job_id(self) -> str | None:
        """What the scheduler calls it; of a chain the current link."""
        if self.links is not None:
            return self.links.job_id
        job_id = self.launch.manifest.job_id if self.launch else None
        return f"{job_id}_{self.task}" if job_id and self.task else job_id

    @property
    def links(self) -> ChainJobs | None:
        """Of a chain its jobs."""
        return self.tracked.status.chain

    @property
    def waiting_id(self) -> str | None:
        """The job that can be held: of a chain the next link, if one waits."""
        return next(iter(self.links.waiting), None) if self.links else self.job_id

    @property
    def waiting_status(self) -> JobStatus:
        """How that job is."""
        status = self.tracked.status
        return self.links.jobs[self.links.waiting[0]] if self.links and self.links.waiting else status

    @property
    def state(self) -> State:
        return state_of(self.tracked.status, self.task)

    @property
    def waits(self) -> bool:
        """Whether it, some task of it, or a further link of it, has not begun."""
        if self.links is not None and self.state.is_live:
            return bool(self.links.waiting)
        tasks = {} if self.task else self.tracked.status.tasks
        return State.PENDING in (self.state, *tasks.values())

    @property
    def runs(self) -> bool:
        """Whether it, or some task of it, runs."""
        tasks = {} if self.task else self.tracked.status.tasks
        return not {State.RUNNING, State.SUSPENDED}.isdisjoint((self.state, *tasks.values()))

    @property
    def may_live(self) -> bool:
        """Whether the scheduler has it, or could not be asked whether it has."""
        if self.state.is_live:
            return True
        lost = self.launch is not None and self.launch.manifest.job_id is None
        return self.state is State.UNKNOWN and (lost or self.tracked.unanswered is not None)

    def scheduler(self) -> Scheduler:
        """The scheduler that has the job.

        Raises
        ------
        UserError
            If the launch could not be read.
        """
        if self.launch is None:
            raise UserError(
                self.tracked.status.reason or f"{self.tracked.run_dir}: no launch of it can be read"
            )
        return scheduler_of(self.launch)


def targets(chosen: Sequence[Found]) -> list[Target]:
    """What words name: of a run all launches that live or may, else its newest; of a launch just that one.

    The runs' order is kept; of each the newest comes first.

    Raises
    ------
    UserError
        If a run has no such launch, or was never launched.
    """
    for found in chosen:
        _check(found)
    whole = {found.run_dir for found in chosen if found.launch is None}
    only: dict[Path, list[int]] = {}
    for found in chosen:
        if found.launch is not None and found.run_dir not in whole:
            only.setdefault(found.run_dir, []).append(found.launch)
    by_run = look_closely(list(dict.fromkeys(found.run_dir for found in chosen)), only)
    named: dict[tuple[Path, int | None, str | None], Target] = {}
    for found in chosen:
        for target in _of(found, by_run[found.run_dir], found.run_dir in whole):
            named.setdefault((found.run_dir, target.number, target.task), target)
    return list(named.values())


def state_of(status: JobStatus, task: str | None) -> State:
    """The state of a job, or of one task of an array."""
    return status.state if task is None else status.tasks.get(task, status.state)


def _of(found: Found, tracked: Sequence[Tracked], whole: bool) -> list[Target]:
    if not whole:
        named = [Target(item, found.task) for item in tracked if _number(item) in (found.launch, None)]
        for target in named:
            _check_task(target)
        return named
    every = [Target(item) for item in tracked]
    living = [target for target in every if target.may_live]
    became = [target for target in every if target.state is not State.NOT_SUBMITTED and target.launch]
    return living or became[:1] or every[:1]


def _check_task(target: Target) -> None:
    tasks = target.tracked.status.tasks
    if target.task is not None and tasks and target.task not in tasks:
        job_id = target.launch.manifest.job_id if target.launch else None
        raise UserError(
            f"job {job_id} of {target.run} has no task {target.task}",
            hint=f"its tasks: {compress_tasks(list(map(int, tasks)))}",
        )


def _number(item: Tracked) -> int | None:
    return item.launch.paths.number if item.launch else None


def _check(found: Found) -> None:
    numbers = launch_numbers(found.run_dir)
    if not numbers:
        raise UserError(f"the run in {found.run_dir} has no launch yet")
    if found.launch is not None and found.launch not in numbers:
        raise UserError(
            f"the run in {found.run_dir} has no launch {found.launch}",
            hint=f"launches: {', '.join(map(str, numbers))}",
        )
