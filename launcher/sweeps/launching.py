"""A drafted sweep to its directories and its job arrays: everything is judged and written, then submitted."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.checks.gathering.host import check_host
from launcher.errors import UserError, explain_os_error
from launcher.launching.directory import record_job
from launcher.launching.settling import settle
from launcher.launching.submitting import Patience, Tell, submit, validate
from launcher.runs.index import Index, entry_of
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.paths import short
from launcher.runs.write import missing_directories, remove_empty
from launcher.schedulers.base import NoAnswer, PendingSubmission
from launcher.schedulers.slurm import SlurmScheduler
from launcher.sweeps.arrays import Array, plan_arrays, render_array
from launcher.sweeps.points import Drafted, Point, Request
from launcher.sweeps.record import write_record
from launcher.sweeps.writing import Written, next_array, write_array


@dataclass(frozen=True, slots=True)
class Launched:
    """A sweep that became jobs: the ids of its arrays, and what the user should know."""

    arrays: list[Written]
    job_ids: list[str]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Judged:
    """The arrays of a sweep that Slurm would take."""

    scheduler: SlurmScheduler
    arrays: list[Array]
    warnings: list[str]


def judge(sweep: Drafted, request: Request, tell: Tell, patience: Patience) -> Judged:
    """Plan the arrays, look at what this machine has of what they need, and show each to Slurm.

    Raises
    ------
    UserError
        If something would keep a point from running; nothing is written yet.
    """
    scheduler = SlurmScheduler(sweep.points[0].plan.slurm_conf)
    warnings = [*_machine(sweep.points), *scheduler.ignored_environment()]
    largest = scheduler.largest_array()
    if largest < 1:
        raise UserError("this Slurm takes no job arrays: its MaxArraySize is 0")
    arrays = plan_arrays(sweep, request.throttle, largest, request.template_dir)
    for array in arrays:
        script = render_array(array, next_array(sweep.directory), "tag", request.template_dir)
        told = validate(scheduler, script, tell, patience)
        warnings += [told] if told else []
    return Judged(scheduler, arrays, list(dict.fromkeys(warnings)))


def launch(
    sweep: Drafted, judged: Judged, request: Request, *, tell: Tell, patience: Patience | None = None
) -> Launched:
    """Write every point of a sweep, and submit its arrays.

    Raises
    ------
    NoAnswer
        If it is not known whether an array became a job.
    UserError
        If something cannot be written, or Slurm refuses an array after all.
    """
    for point in sweep.again:
        settle(point.plan.paths.run_dir, tell)
    with sweep.points[0].draft.composition.naming_sources(), contextlib.ExitStack() as undo:
        undo.callback(remove_empty, missing_directories(sweep.directory))
        try:
            written = [write_array(array, sweep, request, undo) for array in judged.arrays]
            undo.pop_all()  # all of it is written
        except OSError as error:
            raise explain_os_error(error, sweep.directory, "base_results_dir") from error
    job_ids: list[str] = []
    for array in written:
        # So that no more points run at once than were asked for, however many arrays they are.
        after = f"afterany:{job_ids[-1]}" if job_ids and request.throttle is not None else None
        try:
            job_ids.append(_submit(judged.scheduler, array, after, tell, patience or Patience()))
        except UserError as error:
            error.hint = _so_far(error.hint, sweep, written, job_ids)
            raise
    return Launched(written, job_ids, [*judged.warnings, *_recorded(written, job_ids)])


def _machine(points: Sequence[Point]) -> list[str]:
    """What a launch would look at on this machine, once for all points that need the same."""
    seen: set[tuple[object, ...]] = set()
    told: list[str] = []
    for point in points:
        job = point.plan.job
        environment = tuple(sorted(job.environment.items()))
        needed = (job.container, job.engine, job.payload.argv[0], environment)
        if needed not in seen:
            seen.add(needed)
            told += check_host(point.draft)
    return list(dict.fromkeys(told))


def _submit(
    scheduler: SlurmScheduler, array: Written, after: str | None, tell: Tell, patience: Patience
) -> str:
    """Submit an array, and keep on record of every point why there is no job, or why nobody knows."""
    record = array.record
    submission = PendingSubmission(record.tag, array.script, record.user, record.created, after=after)
    try:
        return submit(scheduler, submission, tell, patience)
    except NoAnswer as error:
        _keep(array, Manifest.lost, error.message)
        raise
    except KeyboardInterrupt:
        _keep(array, Manifest.lost, "its launcher was interrupted")
        raise
    except UserError as error:
        _keep(array, Manifest.refused, str(error))
        raise


def _keep(array: Written, change: Callable[[Manifest, str], Manifest], why: str) -> None:
    # Without it each point is settled as that of a launcher that died.
    with contextlib.suppress(OSError):
        write_record(array.directory, array.record.failed(why))
        for point, manifest in zip(array.points, array.manifests, strict=True):
            write_manifest(point.plan.paths.directory, change(manifest, why))


def _recorded(arrays: Sequence[Written], job_ids: Sequence[str]) -> list[str]:
    """Write down which job each point became; what cannot be is told: the jobs are there all the same."""
    entries, failed = [], set()
    for array, job_id in zip(arrays, job_ids, strict=True):
        try:
            write_record(array.directory, array.record.submitted_as(job_id))
        except OSError as error:
            failed.add(f"into {short(array.directory)}: {error.strerror}")
        for point, submission in zip(array.points, array.manifests, strict=True):
            paths, manifest = point.plan.paths, submission.submitted_as(job_id)
            try:
                record_job(paths, manifest)
            except OSError as error:
                failed.add(f"into {short(paths.directory)}: {error.strerror}")
            entries.append(entry_of(paths.run_dir, paths.number, manifest, manifest.job_id))
    Index().remember(entries)
    return [f"the job's id could not be written {where}" for where in sorted(failed)]


def _so_far(hint: str | None, sweep: Drafted, arrays: Sequence[Written], job_ids: Sequence[str]) -> str:
    where = shlex.quote(short(sweep.directory))
    told = f"of {len(arrays)} arrays {len(job_ids)} are submitted: {', '.join(job_ids)}" if job_ids else None
    return "\n".join(filter(None, [hint, told, f"how its points are: slipway sweep --results {where}"]))
