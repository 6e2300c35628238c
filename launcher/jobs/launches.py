"""Launches on disk, and the jobs that they became."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from launcher import schedulers
from launcher.errors import UserError
from launcher.runs.manifest import Manifest, find_manifest
from launcher.runs.paths import LAUNCHES, MANIFEST, LaunchPaths, launch_numbers
from launcher.runs.trust import usable_slurm_conf
from launcher.schedulers.base import JobRef, JobStatus, Scheduler, Submission
from slipway.common.files import RECORD_LIMIT, read_bytes
from slipway.common.node.marks import JobAttempt, job_of, later_jobs, read_attempts

T = TypeVar("T")

# Longer than any scheduler takes to answer: a launcher that takes longer is dead.
_SUBMITTING_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a run: its files and its manifest.

    `unanswered` says why the scheduler could not be asked for a job that the manifest does not know;
    `warnings` of its submission name omitted options, and reasons why it may wait.
    """

    paths: LaunchPaths
    manifest: Manifest
    unanswered: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_without_job(self) -> bool:
        """Return True if this launch will never become a job: refused, or its launcher died before."""
        if self.manifest.job_id is not None or self.unanswered is not None:
            return False
        age = datetime.now(UTC) - datetime.fromisoformat(self.manifest.created)
        return self.manifest.error is not None or age.total_seconds() > _SUBMITTING_SECONDS

    @property
    def slurm_conf(self) -> str | None:
        """Return the configuration of its Slurm; ``None``, the site's, if the manifest is not trusted."""
        return usable_slurm_conf(self.paths.manifest, self.manifest.slurm_conf)

    @property
    def job(self) -> str:
        """Return the job's id for people; of a chain that of its first link."""
        return self.manifest.job_id or "-"

    def find_job(self, status: JobStatus) -> str:
        """Return the id for people of the job that a status is about: of a chain the current link's."""
        return status.chain.job_id if status.chain else self.job

    @property
    def is_chain(self) -> bool:
        """Return True if it may be several jobs: a chain, or a stage that is repeated."""
        return self.manifest.links > 1 or self.manifest.is_repeated

    @property
    def links(self) -> dict[int, str]:
        """Return the ids of its known jobs by the numbers of their links, in order; one if it is no chain."""
        if self.manifest.job_id is None:
            return {}
        later = later_jobs(self.paths.directory, self.manifest.tags) if self.is_chain else {}
        most = None if self.manifest.is_repeated else self.manifest.links
        known = {link: job_id for link, job_id in later.items() if most is None or link <= most}
        return {1: self.manifest.job_id, **known}

    @property
    def nodes(self) -> int:
        """Return the number of its nodes: of a range that of its newest job, or the least before that."""
        lists = [attempt.nodes for attempt in self.attempts if attempt.nodes]
        if self.manifest.max_nodes is None or not lists:
            return self.manifest.nodes
        return len(lists[-1].split(","))

    @property
    def attempts(self) -> list[JobAttempt]:
        """Return the attempts of its jobs, in the order in which they began."""
        job_id = None if self.is_chain else self.manifest.job_id
        return read_attempts(self.paths.directory, job_id, self.manifest.tags)

    @property
    def starts(self) -> list[JobAttempt]:
        """Return the starts of its tasks: of an attempt several, if they were started again inside of it."""
        job_id = None if self.is_chain else self.manifest.job_id
        return read_attempts(self.paths.directory, job_id, self.manifest.tags, each_start=True)

    @property
    def ref(self) -> JobRef | None:
        """Return the reference to its job; ``None`` without a job."""
        links, manifest = self.links, self.manifest
        if not links:
            return None
        directory, host = self.paths.directory, manifest.host
        return JobRef(links, directory, manifest.tags, host, manifest.links, manifest.is_repeated)

    @property
    def submission(self) -> Submission:
        """Return the submission of its job, of a point of a sweep that of the array."""
        manifest = self.manifest
        return Submission(manifest.tags[-1], self.paths.script, manifest.user, manifest.created)

    @property
    def may_be_unknown_job(self) -> bool:
        """Return True if its launcher died, or is submitting, or lost the answer: there may be a job."""
        return self.manifest.job_id is None and self.manifest.error is None

    def log(self, extension: str = "out") -> Path:
        """Return the job's log, of a chain that of its first link; it need not exist yet."""
        if not self.manifest.job_id:
            raise UserError(
                f"launch {self.paths.number} of {self.paths.run_name} has no job, and so no log",
                hint=self.manifest.error,
            )
        return self.paths.log(self.manifest.job_id, extension)


def read_launch(run_dir: Path, number: int) -> Launch:
    """Read one launch from disk; no scheduler is asked; raise UserError if it has no files."""
    manifest = find_manifest(run_dir / LAUNCHES / str(number))
    return Launch(LaunchPaths(run_dir, manifest.run, manifest.job_name, number), manifest)


def require_launch(run_dir: Path, number: int | None) -> list[int]:
    """Return the numbers of a run's launches; raise UserError without launches, or without this one."""
    numbers = launch_numbers(run_dir)
    if not numbers or number not in (None, *numbers):
        which = f" {number}" if numbers else " yet"
        hint = f"launches: {', '.join(map(str, numbers))}" if numbers else None
        raise UserError(f"the run in {run_dir} has no launch{which}", hint=hint)
    return numbers


def open_launch(run_dir: Path, number: int | None = None) -> Launch:
    """Read a launch of a run, by default the newest that the scheduler did not refuse."""
    numbers = require_launch(run_dir, number)
    chosen = numbers[-1] if number is None else number
    newest = adopt([read_launch(run_dir, chosen)])[0]
    if number is not None or not newest.is_without_job:
        return newest
    earlier = (adopt([read_launch(run_dir, other)])[0] for other in reversed(numbers[:-1]))
    return next((launch for launch in earlier if not launch.is_without_job), newest)


def open_launches(run_dir: Path) -> list[Launch]:
    """Read all launches of a run, oldest first."""
    return adopt([read_launch(run_dir, number) for number in launch_numbers(run_dir)])


def readable_launches(run_dir: Path, job_id: str | None = None) -> list[Launch]:
    """Return the launches of a run that can be read, oldest first, with the jobs of their marks.

    With `job_id` those are left out that certainly became another job. No scheduler is asked.
    """
    launches: list[Launch] = []
    with contextlib.suppress(OSError):
        for number in launch_numbers(run_dir):
            with contextlib.suppress(UserError):
                if job_id is None or _may_be_job(run_dir / LAUNCHES / str(number) / MANIFEST, job_id):
                    launches.append(_add_marked_job(read_launch(run_dir, number)))
    return launches


def _may_be_job(manifest: Path, job_id: str) -> bool:
    """Return False if a manifest, which is slow to parse, has one job, of another id."""
    with contextlib.suppress(OSError):
        content = read_bytes(manifest, RECORD_LIMIT)
        has_one = all(text in content for text in (b'"links": 1,', b'"every": null,'))
        return not has_one or b'"job_id": null,' in content or b'"%s' % job_id.encode() in content
    return True


def adopt(launches: Sequence[Launch]) -> list[Launch]:
    """Find the jobs that manifests do not know: by their marks, else with one question per scheduler."""
    marked = list(map(_add_marked_job, launches))
    unknown = [launch for launch in marked if launch.may_be_unknown_job]
    adopted: dict[Path, Launch] = {}
    for group in group_jobs(unknown, lambda launch: launch):
        adopted.update(_adopt_asked(group))
    return [adopted.get(launch.paths.directory, launch) for launch in marked]


def group_jobs(items: Iterable[T], launch_of: Callable[[T], Launch | None]) -> list[list[T]]:
    """Group items by the schedulers of their launches; without Slurm each host is one."""
    groups: dict[tuple[str | None, ...], list[T]] = defaultdict(list)
    for item in items:
        launch = launch_of(item)
        assert launch is not None
        manifest = launch.manifest
        host = None if manifest.scheduler == "slurm" else manifest.host
        groups[manifest.scheduler, launch.slurm_conf, host].append(item)
    return list(groups.values())


def scheduler_of(launch: Launch) -> Scheduler:
    """Return the scheduler that a launch was submitted to."""
    manifest = launch.manifest
    return schedulers.scheduler_for(manifest.scheduler, launch.slurm_conf, manifest.host)


def _adopt_asked(group: Sequence[Launch]) -> dict[Path, Launch]:
    try:
        jobs_of = scheduler_of(group[0]).find([launch.submission for launch in group])
    except UserError as error:
        why = error.message.splitlines()[0]
        return {launch.paths.directory: replace(launch, unanswered=why) for launch in group}
    return {
        launch.paths.directory: _set_job(launch, jobs[0])
        for launch in group
        if (jobs := jobs_of.get(launch.submission.tag, {}).get(1))
    }


def _add_marked_job(launch: Launch) -> Launch:
    """Return a launch with the job of its mark, if its manifest knows none."""
    job_id = job_of(launch.paths.directory) if launch.manifest.job_id is None else None
    return _set_job(launch, job_id) if job_id else launch


def _set_job(launch: Launch, job_id: str) -> Launch:
    return replace(launch, manifest=launch.manifest.set_job(job_id))
