"""Recovery of launches after their launcher died or got no answer, before their run is launched again."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import UserError
from launcher.jobs.launches import Launch, group_jobs, read_launch, scheduler_of
from launcher.launching.submission import keep_one
from launcher.launching.writing import record_job
from launcher.runs import provenance
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.paths import display_path, launch_numbers
from launcher.schedulers.local import is_alive
from slipway.common.node.marks import GIVEN_UP, claim, job_of

_logger = logging.getLogger(__name__)

# Upper bound on unconfirmed launches to examine.
_NEWEST = 20
_DIED = "its launcher died before it submitted"


def reconcile_unconfirmed(run_dir: Path) -> None:
    """Find the unrecorded jobs of a run's newest launches.

    The answers are written into their manifests, so that each is asked for once. Launches that are being
    submitted are left alone. Raise UserError if the user does not know of a job, or its scheduler cannot be
    asked: launching once more could double it.
    """
    unconfirmed = _unconfirmed_launches(run_dir)
    if not unconfirmed:
        return
    marked = {launch.manifest.tag: [job] for launch in unconfirmed if (job := job_of(launch.paths.directory))}
    jobs_by_tag = {
        **marked,
        **_find_jobs([launch for launch in unconfirmed if launch.manifest.tag not in marked]),
    }
    jobs = [job for launch in unconfirmed if (job := _reconcile(launch, jobs_by_tag)) is not None]
    if jobs:
        where = shlex.quote(display_path(run_dir))
        raise UserError(
            "; ".join(jobs),
            hint=f"to see its state: slipway status {where}\nto launch anyway: repeat the command",
        )


def _unconfirmed_launches(run_dir: Path) -> list[Launch]:
    """Return the launches that may have become a job, the oldest first."""
    launches = []
    for number in launch_numbers(run_dir)[-_NEWEST:]:
        with contextlib.suppress(UserError):  # a broken launch hides no other
            launch = read_launch(run_dir, number)
            if launch.may_be_unknown_job and not _is_being_submitted(launch):
                launches.append(launch)
    return launches


def _is_being_submitted(launch: Launch) -> bool:
    manifest = launch.manifest
    if manifest.unanswered is not None or launch.is_without_job:
        return False
    return (
        manifest.host != provenance.host()
        or not manifest.launcher_pid
        or is_alive(str(manifest.launcher_pid))
    )


def _find_jobs(launches: Sequence[Launch]) -> Mapping[str, Sequence[str]]:
    """Find the jobs of launches, by tag, with one question to each scheduler."""
    jobs: dict[str, Sequence[str]] = {}
    for group in group_jobs(launches, lambda launch: launch):
        try:
            matches = scheduler_of(group[0]).find([launch.submission for launch in group])
        except UserError as error:
            raise _explain_unknown_job(group[-1], error.message.splitlines()[0]) from error
        # A point of a sweep is looked for by the tag of its array.
        jobs |= {launch.manifest.tag: matches.get(launch.submission.tag, {}).get(1, ()) for launch in group}
    return jobs


def _reconcile(launch: Launch, jobs_by_tag: Mapping[str, Sequence[str]]) -> str | None:
    """Record the job of a launch, or its absence; return a message on a job unknown to the user."""
    manifest, directory = launch.manifest, launch.paths.directory
    jobs = jobs_by_tag.get(manifest.tag)
    if jobs:
        kept = keep_one(scheduler_of(launch), launch.submission, jobs)
    elif submitter := _find_submitter(manifest):
        raise _explain_unknown_job(launch, f"process {submitter} is still submitting it")
    elif manifest.user != provenance.user():
        # With Slurm's PrivateData their job is there, and not to be seen.
        raise _explain_unknown_job(
            launch, f"it is {manifest.user}'s, and only {manifest.user} can ask for it"
        )
    else:
        # Should the scheduler take it yet, its script finds the launch claimed, and leaves.
        kept = claim(directory, GIVEN_UP)
    try:
        if kept == GIVEN_UP:
            write_manifest(directory, manifest.set_error(manifest.unanswered or _DIED))
        else:
            record_job(launch.paths, manifest.set_job(kept))
    except OSError as error:  # a colleague's launch, or a full disk
        message = "the outcome of launch %s could not be recorded: %s"
        _logger.warning(message, manifest.launch, error.strerror)
    name, number, job_id = manifest.run, launch.paths.number, manifest.find_id(kept)
    return None if kept == GIVEN_UP else f"launch {number} of {name} was submitted as job {job_id} after all"


def _explain_unknown_job(launch: Launch, why: str) -> UserError:
    name, number = launch.manifest.run, launch.paths.number
    directory = shlex.quote(display_path(launch.paths.directory))
    return UserError(
        f"it is not known whether launch {number} of {name} became a job: {why}",
        hint="launching now could submit it twice: try again once that is known\n"
        f"if you know that it has no job, remove that launch: rm -r {directory}",
    )


def _find_submitter(manifest: Manifest) -> str | None:
    """Return the process of this machine's sbatch that is still submitting; it outlives its launcher."""
    tag = os.fsencode(manifest.array_tag or manifest.tag)
    if manifest.host != provenance.host():
        return None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")[:-1]
                if words[-1:] == [tag] and any(word.endswith(b"sbatch") for word in words):
                    return entry.name
    return None
