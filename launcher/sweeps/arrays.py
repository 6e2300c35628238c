"""The job arrays of a sweep: planned, rendered and written, with a launch of each point.

A sweep is one array, or as many as its points differ in what they ask Slurm for: an array is one request, so
only points with the same header can share it, and a site limits how many tasks it has.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.drafting import Request
from launcher.errors import UserError, explain_os_error, file_mode
from launcher.launching.recovery import reconcile_unconfirmed
from launcher.launching.submission import submit, validate
from launcher.launching.writing import files_of, manifest_of, quoted_line, record_job, with_digest
from launcher.rendering.quoting import RawShell, escape_pattern, quote_header
from launcher.rendering.render import render_template
from launcher.rendering.slurm_flags import header_lines
from launcher.rendering.supervision import supervisor_archive
from launcher.runs import paths as names
from launcher.runs import provenance
from launcher.runs.index import Index, entry_of
from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.paths import log_prefix_beside, short
from launcher.runs.write import (
    copy_package,
    discard_launch,
    link_atomic,
    make_directories,
    missing_directories,
    release_number,
    remove_empty,
    reserve_number,
    write_launch,
)
from launcher.schedulers.base import NoAnswer, PendingSubmission
from launcher.schedulers.slurm import SlurmScheduler
from launcher.secrecy import recorded
from launcher.sweeps.points import Point, SweepDraft, SweepRequest, as_task
from launcher.sweeps.record import ARRAYS, POINTS, ArrayRecord, write_record
from supervisor.files import write_atomic
from supervisor.settings import NAME as SUPERVISOR_SETTINGS
from supervisor.settings import SweepSettings

KEY = "base_results_dir"

# Flags of a point's own header that the array has its own of.
_OF_THE_POINT = ("--job-name=", "--output=", "--error=")


@dataclass(frozen=True, slots=True)
class Array:
    """Points that are the tasks of one job array, in the order of their numbers from 0 on."""

    sweep: str
    job_name: str
    points: list[Point]
    throttle: int | None

    @property
    def header(self) -> list[RawShell]:
        return _header(self.points[0])

    @property
    def numbers(self) -> str:
        """The value of ``--array``."""
        limit = f"%{self.throttle}" if self.throttle is not None else ""
        return f"0-{len(self.points) - 1}{limit}"

    @property
    def script_name(self) -> str:
        """The name of the array's script, and of each point's."""
        return self.points[0].plan.paths.script_name


def plan_arrays(sweep: SweepDraft, throttle: int | None, largest: int) -> list[Array]:
    """Put the points of a sweep into as few arrays as possible.

    Parameters
    ----------
    largest
        The most tasks that an array of this site may have.
    """
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in sweep.points:
        groups.setdefault(_request(point), []).append(point)
    parts = [part for group in groups.values() for part in _split(group, largest)]
    arrays = []
    for number, points in enumerate(parts, start=1):
        # With one name for all, `singleton` would let them run one after the other.
        job_name = _job_name(points[0], sweep.name) + (f"-{number}" if number > 1 else "")
        named = [as_task(point, job_name, point.plan.paths.number) for point in points]
        arrays.append(Array(sweep.name, job_name, named, throttle))
    return arrays


def render_array(array: Array, directory: Path, tag: str, template_dir: Path | None) -> str:
    """Render the script of an array in `directory`."""
    values = {
        "header_lines": [*_array_lines(array, directory), *array.header],
        "tag": tag,
        "directory": directory,
    }
    return render_template("sweep.sh.j2", values, template_dir)


def array_settings(array: Array, tag: str) -> SweepSettings:
    """Return the settings of an array's tasks."""
    points = [(str(point.plan.paths.directory), point.plan.tag) for point in array.points]
    return SweepSettings(array.sweep, tag, array.script_name, points)


def differing(arrays: Sequence[Array]) -> list[str]:
    """Return the flags of sbatch in which the arrays of a sweep differ, without their values."""
    headers = [set(array.header) for array in arrays]
    every, shared = set.union(*headers), set.intersection(*headers)
    return sorted({line.partition("=")[0] for line in every - shared})


def _array_lines(array: Array, directory: Path) -> Iterator[RawShell]:
    yield RawShell(f"--job-name={quote_header(array.job_name)}")
    yield RawShell(f"--array={array.numbers}")
    # Slurm opens a log before the script runs: %a leads through a link to the launch of the point.
    prefix = log_prefix_beside(Path(array.script_name)).name
    log = f"{escape_pattern(str(directory / POINTS))}/%a/{escape_pattern(prefix)}%A_%a"
    yield RawShell(f"--output={quote_header(f'{log}.out')}")
    if not array.points[0].plan.job.merge_stderr:
        yield RawShell(f"--error={quote_header(f'{log}.err')}")


def _request(point: Point) -> tuple[object, ...]:
    """Return what the points of one array must share: their requests, and their Slurm."""
    return (*_header(point), point.plan.job.merge_stderr, point.plan.slurm_conf)


def _header(point: Point) -> list[RawShell]:
    return [line for line in header_lines(point.plan) if not line.startswith(_OF_THE_POINT)]


def _split(points: Sequence[Point], largest: int) -> Iterator[list[Point]]:
    for start in range(0, len(points), largest):
        yield list(points[start : start + largest])


def _job_name(point: Point, sweep: str) -> str:
    paths = point.plan.paths
    return paths.job_name.removesuffix(paths.run_name) + sweep


@dataclass(frozen=True, slots=True)
class WrittenArray:
    """An array on disk, with the manifests of its points."""

    directory: Path
    script: Path
    points: list[Point]
    manifests: list[Manifest]
    record: ArrayRecord


def next_array(sweep_dir: Path) -> Path:
    """Return the directory of a sweep's next array."""
    numbers = [int(path.name) for path in _entries(sweep_dir / ARRAYS) if path.name.isdecimal()]
    return sweep_dir / ARRAYS / str(max(numbers, default=0) + 1)


def write_array(array: Array, sweep: SweepDraft, request: SweepRequest, undo: ExitStack) -> WrittenArray:
    """Write the launches of an array's points, and the array itself.

    Parameters
    ----------
    undo
        Gets what removes all of it again.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    directory, tag = _reserve(sweep.directory), provenance.new_tag()
    undo.callback(remove_empty, [directory.parent, sweep.directory])
    undo.callback(shutil.rmtree, directory, ignore_errors=True)
    job = array.points[0].plan.job
    image = job.container.image if job.container else None
    origin = provenance.gather(names.TRAINER, request.config_dir, image)
    for name, text in origin.files.items():
        write_atomic(directory / name, text)
    shared = [directory / name for name in origin.files]
    if job.engine == "megatron":
        for package in names.TASK_PACKAGES:
            copy_package(package, directory / names.CODE / package.name)
        shared.append(directory / names.CODE)
    (directory / names.SUPERVISOR).write_bytes(supervisor_archive())
    shared.append(directory / names.SUPERVISOR)
    (directory / POINTS).mkdir()
    points, manifests = [], []
    for number, planned in enumerate(array.points):
        fields = {"sweep": sweep.name, "array_tag": tag, "array_task": number}
        point, manifest = _write_point(planned, array, request, origin, fields, undo)
        launch_dir = point.plan.paths.directory
        for path in shared:
            link_atomic(launch_dir / path.name, path)
        link_atomic(directory / POINTS / str(number), launch_dir)
        points.append(point)
        manifests.append(manifest)
    array = replace(array, points=points)
    script = directory / array.script_name
    write_atomic(script, render_array(array, directory, tag, request.template_dir), 0o777)
    settings = json.dumps(array_settings(array, tag)._asdict(), indent=2) + "\n"
    write_atomic(directory / SUPERVISOR_SETTINGS, settings)
    record = _record(array, sweep, request, tag)
    write_record(directory, record)
    return WrittenArray(directory, script, points, manifests, record)


def _reserve(sweep_dir: Path) -> Path:
    """Make a directory that no other launcher has."""
    (sweep_dir / ARRAYS).mkdir(parents=True, exist_ok=True)
    while True:
        directory = next_array(sweep_dir)
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        return directory


def _write_point(
    point: Point,
    array: Array,
    request: SweepRequest,
    origin: provenance.Origin,
    fields: dict[str, Any],
    undo: ExitStack,
) -> tuple[Point, Manifest]:
    """Write the launch of a point under the next number of its run."""
    run_dir = point.plan.paths.run_dir
    with ExitStack() as reservation:
        undo.callback(remove_empty, missing_directories(run_dir / names.LAUNCHES))
        number = reserve_number(run_dir, KEY)
        reservation.callback(release_number, run_dir, number)
        point = as_task(point, array.job_name, number)
        draft, paths, directories = point.draft, point.plan.paths, point.plan.job.directories
        launch = Request(draft.composition.overrides, request.command, request.config_dir)
        # The image of each is its own, where images are swept.
        image = draft.plan.job.container.image if draft.plan.job.container else None
        own_origin = with_digest(provenance.of_image(origin, image), image)
        manifest = replace(manifest_of(draft, launch, own_origin), **fields)
        files = files_of(draft, manifest, launch)
        del files[paths.supervisor]  # shared by all points
        files[paths.directory / names.COMMAND_LOG] = _pasteable(point, request)
        write_launch(paths, files, (), KEY)
    undo.callback(discard_launch, paths, directories)
    make_directories(directories, KEY)
    return point, manifest


def _pasteable(point: Point, request: SweepRequest) -> str:
    trees = [("--config-dir", request.config_dir), ("--template-dir", request.template_dir)]
    options = [word for name, path in trees if path is not None for word in (name, str(path))]
    alone = ["slipway", "launch", *recorded(point.draft.composition.overrides), *options]
    directory = quoted_line(["cd", str(Path.cwd())])
    return (
        f"{directory} && {quoted_line(recorded(request.command))}\n"
        f"# this point alone, as the next launch of its run:\n# {directory} && {quoted_line(alone)}\n"
    )


def _record(array: Array, sweep: SweepDraft, request: SweepRequest, tag: str) -> ArrayRecord:
    points = [
        {
            "name": point.plan.paths.run_dir.name,
            "launch": point.plan.paths.number,
            "values": point.grid_point.values,
        }
        for point in array.points
    ]
    return ArrayRecord(
        sweep=sweep.name,
        tag=tag,
        script=array.script_name,
        created=provenance.now(),
        user=provenance.user(),
        host=provenance.host(),
        slurm_conf=array.points[0].plan.slurm_conf,
        command=recorded(request.command),
        overrides=recorded(sweep.grid.shared),
        throttle=request.throttle,
        labels=sweep.grid.labels,
        points=points,
    )


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if stat.S_ISDIR(file_mode(directory)) else []


# --- launching


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
