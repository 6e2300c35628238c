"""Launches on disk, and asking their schedulers how they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from launcher.errors import UserError
from launcher.runs.manifest import Manifest, read_manifest
from launcher.runs.paths import LAUNCHES, METRICS, LaunchPaths, launch_numbers
from launcher.schedulers.base import Intent, JobStatus, State, Ticket
from launcher.schedulers.states import from_markers, started_job

# Longer than any scheduler takes to answer a launcher: after that nobody is submitting any more.
_SUBMITTING_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a run: where it is, and what was launched.

    `unanswered` says why it could not be asked whether there is a job that the manifest does not know.
    """

    paths: LaunchPaths
    manifest: Manifest
    unanswered: str | None = None

    @property
    def is_without_job(self) -> bool:
        """Whether this launch never became a job, and will not: refused, or its launcher died before."""
        if self.manifest.job_id is not None or self.unanswered is not None:
            return False
        return self.manifest.error is not None or _age(self.manifest) > _SUBMITTING_SECONDS

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
    return _read(run_dir, chosen)


def _newest(run_dir: Path, numbers: Sequence[int]) -> int | None:
    for number in reversed(numbers):
        if not _read(run_dir, number).is_without_job:
            return number
    return numbers[-1] if numbers else None


def _read(run_dir: Path, number: int) -> Launch:
    manifest = read_manifest(run_dir / LAUNCHES / str(number))
    launch = Launch(LaunchPaths(run_dir, manifest.run, manifest.job_name, number), manifest)
    if manifest.job_id:
        return launch
    # Its launcher died, or is at it, or lost the answer: the job may be there all the same.
    job_id = started_job(launch.paths.directory)
    if job_id is None and manifest.error is None:
        try:
            job_id = _find(launch)
        except UserError as error:
            return replace(launch, unanswered=error.message.splitlines()[0])
    return replace(launch, manifest=manifest.submitted_as(job_id)) if job_id else launch


def _find(launch: Launch) -> str | None:
    from launcher.schedulers.registry import open_scheduler

    manifest = launch.manifest
    intent = Intent(manifest.tag, launch.paths.script, manifest.user, manifest.created)
    return open_scheduler(manifest).find(intent)


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
    if launch.unanswered:
        return JobStatus(State.UNKNOWN, f"whether it became a job cannot be asked: {launch.unanswered}")
    if launch.manifest.error:
        return JobStatus(State.NOT_SUBMITTED, launch.manifest.error.strip().splitlines()[0])
    if launch.is_without_job:
        return JobStatus(State.NOT_SUBMITTED, "its launcher ended before it submitted")
    return JobStatus(State.UNKNOWN, "being submitted, or its launcher died: no job of it is known yet")


def _age(manifest: Manifest) -> float:
    created = datetime.fromisoformat(manifest.created)
    return (datetime.now(UTC) - created).total_seconds()
