"""Launches on disk, and asking their schedulers how they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError
from launcher.runs.manifest import Manifest, read_manifest
from launcher.runs.paths import LAUNCHES, METRICS, LaunchPaths, launch_numbers
from launcher.schedulers.base import JobStatus, State, Ticket
from launcher.schedulers.states import from_markers


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a run: where it is, and what was launched."""

    paths: LaunchPaths
    manifest: Manifest

    @property
    def metrics(self) -> Path:
        return self.paths.results / METRICS

    @property
    def job(self) -> str:
        """The job's id for people."""
        return self.manifest.job_id or "-"

    @property
    def ticket(self) -> Ticket | None:
        return Ticket(self.manifest.job_id, self.paths.directory) if self.manifest.job_id else None

    def log(self, extension: str = "out") -> Path:
        """The job's log; it need not exist yet.

        Raises
        ------
        UserError
            If the launch never became a job.
        """
        if not self.manifest.job_id:
            raise UserError(
                f"launch {self.paths.number} of {self.paths.run_name} has no job, and so no log",
                hint=self.manifest.error,
            )
        return self.paths.directory / self.paths.log_name(self.manifest.job_id, extension)


def open_launch(run_dir: Path, number: int | None = None) -> Launch:
    """Read a launch of a run, by default the newest that the scheduler did not refuse.

    Raises
    ------
    UserError
        If the run has no such launch; the message lists those there are.
    """
    numbers = launch_numbers(run_dir)
    chosen = number if number is not None else _newest(run_dir, numbers)
    if chosen not in numbers or chosen is None:
        raise UserError(
            f"the run in {run_dir} has no launch {'yet' if number is None else number}",
            hint=f"launches: {', '.join(map(str, numbers)) or 'none'}",
        )
    manifest = read_manifest(run_dir / LAUNCHES / str(chosen))
    return Launch(LaunchPaths(run_dir, manifest.run, manifest.job_name, chosen), manifest)


def _newest(run_dir: Path, numbers: Sequence[int]) -> int | None:
    for number in reversed(numbers):
        if read_manifest(run_dir / LAUNCHES / str(number)).error is None:
            return number
    return numbers[-1] if numbers else None


def open_launches(run_dir: Path) -> list[Launch]:
    """Read all launches of a run, oldest first."""
    return [open_launch(run_dir, number) for number in launch_numbers(run_dir)]


def ask(launches: Sequence[Launch]) -> list[JobStatus]:
    """Ask each scheduler once for all of its jobs; one status for each launch, in their order.

    A scheduler that cannot be asked does not end the question: its jobs are told from the marks they left,
    or UNKNOWN with the reason.
    """
    groups: dict[tuple[str, str | None], list[Launch]] = defaultdict(list)
    for launch in launches:
        if launch.ticket:
            groups[launch.manifest.scheduler, launch.manifest.slurm_conf].append(launch)
    told: dict[Path, JobStatus] = {}
    for group in groups.values():
        told.update(_ask_scheduler(group))
    return [told.get(launch.paths.directory) or _without_job(launch) for launch in launches]


def _ask_scheduler(launches: list[Launch]) -> Iterable[tuple[Path, JobStatus]]:
    from launcher.schedulers.registry import open_scheduler

    tickets = [launch.ticket for launch in launches if launch.ticket]
    try:
        statuses = open_scheduler(launches[0].manifest).statuses(tickets)
        blind = JobStatus(State.UNKNOWN, "the scheduler did not tell of this job")
    except UserError as error:
        statuses, blind = {}, JobStatus(State.UNKNOWN, error.message.splitlines()[0])
    return [(ticket.launch_dir, statuses.get(ticket.job_id) or _marked(ticket, blind)) for ticket in tickets]


def _marked(ticket: Ticket, blind: JobStatus) -> JobStatus:
    marked = from_markers(ticket.launch_dir, ticket.job_id)
    return marked if marked and marked.state.is_final else blind


def _without_job(launch: Launch) -> JobStatus:
    if launch.manifest.error:
        return JobStatus(State.NOT_SUBMITTED, launch.manifest.error.strip().splitlines()[0])
    # Between the intent and the scheduler's answer; a launcher that died there may have left a job.
    return JobStatus(State.UNKNOWN, "the scheduler's answer to the submission was never recorded")
