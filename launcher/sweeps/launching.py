"""The way from a drafted sweep to its job arrays: everything is judged and written, then submitted."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.errors import UserError, explain_os_error
from launcher.launching.recovery import reconcile_unconfirmed
from launcher.launching.submission import submit, validate
from launcher.launching.writing import record_job
from launcher.runs.index import Index, entry_of
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.paths import short
from launcher.runs.write import missing_directories, remove_empty
from launcher.schedulers.base import NoAnswer, PendingSubmission
from launcher.schedulers.slurm import SlurmScheduler
from launcher.sweeps.arrays import (
    Array,
    WrittenArray,
    next_array,
    plan_arrays,
    render_array,
    write_array,
)
from launcher.sweeps.points import SweepDraft, SweepRequest
from launcher.sweeps.record import write_record


@dataclass(frozen=True, slots=True)
class LaunchedSweep:
    """A sweep that became jobs: its arrays, their ids, and warnings."""

    arrays: list[WrittenArray]
    job_ids: list[str]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class ReadySweep:
    """The arrays of a sweep that nothing refuses."""

    scheduler: SlurmScheduler
    arrays: list[Array]
    warnings: list[str]


def prepare_sweep(sweep: SweepDraft, request: SweepRequest) -> ReadySweep:
    """Plan the arrays, check what they need of this machine, and show each to Slurm.

    Raises
    ------
    UserError
        If something would keep a point from running; nothing is written yet.
    """
    scheduler = SlurmScheduler(sweep.points[0].plan.slurm_conf)
    warnings = [*scheduler.ignored_environment()]
    largest = scheduler.largest_array()
    if largest < 1:
        raise UserError("this Slurm takes no job arrays: its MaxArraySize is 0")
    arrays = plan_arrays(sweep, request.throttle, largest)
    for array in arrays:
        script = render_array(array, next_array(sweep.directory), "tag", request.template_dir)
        for point in array.points:
            _ = point.draft.rendered  # a mistake in a template is refused before anything is written
        answer = validate(scheduler, script)
        warnings += [answer] if answer else []
    return ReadySweep(scheduler, arrays, list(dict.fromkeys(warnings)))


def launch_sweep(sweep: SweepDraft, ready: ReadySweep, request: SweepRequest) -> LaunchedSweep:
    """Write every point of a sweep, and submit its arrays.

    Raises
    ------
    NoAnswer
        If it is unknown whether an array became a job.
    UserError
        If something cannot be written, or Slurm refuses an array after all.
    """
    for point in sweep.again:
        reconcile_unconfirmed(point.plan.paths.run_dir)
    try:
        written = _write(sweep, ready, request)
    except UserError as error:
        sweep.points[0].draft.composition.annotate(error)
        raise
    job_ids: list[str] = []
    for array in written:
        # So that no more points run at once than were asked for, however many arrays they are.
        after = f"afterany:{job_ids[-1]}" if job_ids and request.throttle is not None else None
        try:
            job_ids.append(_submit(ready.scheduler, array, after))
        except UserError as error:
            error.hint = _so_far(error.hint, sweep, written, job_ids)
            raise
    return LaunchedSweep(written, job_ids, [*ready.warnings, *_record_jobs(written, job_ids)])


def _write(sweep: SweepDraft, ready: ReadySweep, request: SweepRequest) -> list[WrittenArray]:
    """Write all arrays, or none."""
    with contextlib.ExitStack() as undo:
        undo.callback(remove_empty, missing_directories(sweep.directory))
        try:
            written = [write_array(array, sweep, request, undo) for array in ready.arrays]
        except OSError as error:
            raise explain_os_error(error, sweep.directory, "base_results_dir") from error
        undo.pop_all()
    return written


def _submit(scheduler: SlurmScheduler, array: WrittenArray, after: str | None) -> str:
    """Submit an array, and record for every point why there is no job, or why that is unknown."""
    record = array.record
    submission = PendingSubmission(record.tag, array.script, record.user, record.created, after=after)
    try:
        return submit(scheduler, submission)
    except NoAnswer as error:
        _keep(array, Manifest.lost, error.message)
        raise
    except KeyboardInterrupt:
        _keep(array, Manifest.lost, "its launcher was interrupted")
        raise
    except UserError as error:
        _keep(array, Manifest.refused, str(error))
        raise


def _keep(array: WrittenArray, change: Callable[[Manifest, str], Manifest], why: str) -> None:
    # Otherwise the next launch of each point treats this one as abandoned.
    with contextlib.suppress(OSError):
        write_record(array.directory, array.record.failed(why))
        for point, manifest in zip(array.points, array.manifests, strict=True):
            write_manifest(point.plan.paths.directory, change(manifest, why))


def _record_jobs(arrays: Sequence[WrittenArray], job_ids: Sequence[str]) -> list[str]:
    """Record the job of each point; return warnings about records that could not be written."""
    entries, failed = [], set()
    for array, job_id in zip(arrays, job_ids, strict=True):
        try:
            write_record(array.directory, array.record.submitted_as(job_id))
        except OSError as error:
            failed.add(f"into {short(array.directory)}: {error.strerror}")
        for point, planned in zip(array.points, array.manifests, strict=True):
            paths, manifest = point.plan.paths, planned.submitted_as(job_id)
            try:
                record_job(paths, manifest)
            except OSError as error:
                failed.add(f"into {short(paths.directory)}: {error.strerror}")
            entries.append(entry_of(paths.run_dir, paths.number, manifest, manifest.job_id))
    Index().remember(entries)
    return [f"the job's id could not be written {place}" for place in sorted(failed)]


def _so_far(
    hint: str | None, sweep: SweepDraft, arrays: Sequence[WrittenArray], job_ids: Sequence[str]
) -> str:
    """Add to a hint which arrays are submitted already."""
    directory = shlex.quote(short(sweep.directory))
    submitted = (
        f"of {len(arrays)} arrays {len(job_ids)} are submitted: {', '.join(job_ids)}" if job_ids else None
    )
    return "\n".join(
        filter(None, [hint, submitted, f"how its points are: slipway sweep --results {directory}"])
    )
