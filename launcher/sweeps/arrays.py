"""The job arrays of a sweep: planned, rendered and written, with a launch of each point.

A sweep has one array for each distinct request to Slurm among its points: an array is one request, so
only points with the same header can share it, and a site limits how many tasks it has.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.drafting import Request
from launcher.errors import UserError, explain_os_error
from launcher.launching.recovery import reconcile_unconfirmed
from launcher.launching.submission import describe_ignored, submit, validate
from launcher.launching.writing import add_digest, files_of, manifest_of, quote_line, record_job
from launcher.rendering.quoting import RawShell, escape_pattern, quote_header
from launcher.rendering.render import render_template
from launcher.rendering.slurm_flags import header_lines
from launcher.rendering.supervision import supervisor_archive
from launcher.runs import paths as names
from launcher.runs import provenance
from launcher.runs.known_trees import remember_trees
from launcher.runs.manifest import Manifest, require_readable, write_manifest
from launcher.runs.paths import display_path, log_prefix_beside
from launcher.runs.write import (
    copy_package,
    discard_launch,
    link_atomic,
    list_missing_directories,
    make_directories,
    release_number,
    remove_empty,
    reserve_number,
    write_launch,
)
from launcher.schedulers.base import NoAnswer, Submission
from launcher.schedulers.slurm import SlurmScheduler
from launcher.secrecy import recorded
from launcher.sweeps.points import Point, SweepDraft, SweepRequest, make_task
from launcher.sweeps.record import ARRAYS, POINTS, ArrayRecord, write_record
from slipway.common.files import write_atomic
from slipway.common.node.settings import NAME as SUPERVISOR_SETTINGS
from slipway.common.node.settings import SweepSettings

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
    def numbers(self) -> str:
        """The value of ``--array``."""
        limit = f"%{self.throttle}" if self.throttle is not None else ""
        return f"0-{len(self.points) - 1}{limit}"

    @property
    def script_name(self) -> str:
        """The name of the array's script, and of each point's."""
        return self.points[0].plan.paths.script_name


def plan_arrays(sweep: SweepDraft, throttle: int | None, largest: int) -> list[Array]:
    """Put the points of a sweep into as few arrays as possible, none with more than `largest` tasks."""
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in sweep.points:
        plan = point.plan
        request = (*_header(point), plan.job.merge_stderr, plan.slurm_conf)  # what an array has once
        groups.setdefault(request, []).append(point)
    parts = [
        group[start : start + largest] for group in groups.values() for start in range(0, len(group), largest)
    ]
    arrays = []
    for number, points in enumerate(parts, start=1):
        paths = points[0].plan.paths
        # With one name for all, `singleton` would let them run one after the other.
        job_name = paths.job_name.removesuffix(paths.run_name) + sweep.name
        job_name += f"-{number}" if number > 1 else ""
        named = [make_task(point, job_name, point.plan.paths.number) for point in points]
        arrays.append(Array(sweep.name, job_name, named, throttle))
    return arrays


def render_array(array: Array, directory: Path, tag: str, template_dir: Path | None) -> str:
    """Render the script of an array in `directory`."""
    header = [*_array_lines(array, directory), *_header(array.points[0])]
    programs = ", ".join(sorted({str(point.plan.job.payload.argv[0]) for point in array.points}))
    values = {"header_lines": header, "tag": tag, "directory": directory, "programs": programs}
    return render_template("sweep.sh.j2", values, template_dir)


def array_settings(array: Array, tag: str) -> SweepSettings:
    """Return the settings of an array's tasks."""
    points = [(str(point.plan.paths.directory), point.plan.tag) for point in array.points]
    return SweepSettings(array.sweep, tag, array.script_name, points)


def list_differences(arrays: Sequence[Array]) -> list[str]:
    """Return the flags of sbatch in which the arrays of a sweep differ, without their values."""
    headers = [set(_header(array.points[0])) for array in arrays]
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


def _header(point: Point) -> list[RawShell]:
    return [line for line in header_lines(point.plan) if not line.startswith(_OF_THE_POINT)]


@dataclass(frozen=True, slots=True)
class WrittenArray:
    """An array on disk, with the manifests of its points."""

    directory: Path
    points: list[Point]
    manifests: list[Manifest]
    record: ArrayRecord


def pick_array(sweep_dir: Path) -> Path:
    """Return the directory of a sweep's next array; raise OSError if the others cannot be listed."""
    directory = sweep_dir / ARRAYS
    entries = directory.iterdir() if directory.is_dir() else ()
    numbers = [int(path.name) for path in entries if path.name.isdecimal()]
    return directory / str(max(numbers, default=0) + 1)


def _write_array(array: Array, sweep: SweepDraft, request: SweepRequest, undo: ExitStack) -> WrittenArray:
    """Write the launches of an array's points, and the array itself; `undo` gets what removes it again."""
    directory, tag = _reserve(sweep.directory), provenance.new_tag()
    undo.callback(remove_empty, [directory.parent, sweep.directory])
    undo.callback(shutil.rmtree, directory, ignore_errors=True)
    job = array.points[0].plan.job
    image = job.container.image if job.container else None
    origin = provenance.gather(names.PACKAGE, request.config_dirs, image)
    for name, text in origin.files.items():
        write_atomic(directory / name, text)
    shared = [directory / name for name in origin.files]
    if job.engine == "megatron":
        copy_package(names.PACKAGE, directory / names.CODE / names.PACKAGE.name)
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
    script = render_array(array, directory, tag, request.template_dir)
    write_atomic(directory / array.script_name, script, 0o777)
    settings = json.dumps(array_settings(array, tag)._asdict(), indent=2) + "\n"
    require_readable(directory / SUPERVISOR_SETTINGS, settings)
    write_atomic(directory / SUPERVISOR_SETTINGS, settings)
    record = ArrayRecord(
        sweep=sweep.name,
        tag=tag,
        script=array.script_name,
        created=provenance.format_now(),
        user=provenance.user(),
        host=provenance.host(),
        slurm_conf=points[0].plan.slurm_conf,
        command=recorded(request.command),
        overrides=recorded(sweep.grid.shared),
        throttle=request.throttle,
        labels=sweep.grid.labels,
        points=[
            {
                "name": point.plan.paths.run_dir.name,
                "launch": point.plan.paths.number,
                "values": point.grid_point.values,
            }
            for point in points
        ],
    )
    write_record(directory, record)
    return WrittenArray(directory, points, manifests, record)


def _reserve(sweep_dir: Path) -> Path:
    """Make a directory that no other launcher has."""
    (sweep_dir / ARRAYS).mkdir(parents=True, exist_ok=True)
    directory = pick_array(sweep_dir)
    while True:
        try:
            directory.mkdir()
            return directory
        except FileExistsError:  # ever higher, as a listing may be late over NFS
            directory = directory.with_name(str(int(directory.name) + 1))


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
        undo.callback(remove_empty, list_missing_directories(run_dir / names.LAUNCHES))
        number = reserve_number(run_dir, KEY)
        reservation.callback(release_number, run_dir, number)
        point = make_task(point, array.job_name, number)
        draft, paths, directories = point.draft, point.plan.paths, point.plan.job.directories
        launch = Request(draft.composition.overrides, request.command, request.config_dirs)
        # The image of each is its own, where images are swept.
        image = draft.plan.job.container.image if draft.plan.job.container else None
        own_origin = add_digest(provenance.replace_image(origin, image), image)
        manifest = replace(manifest_of(draft, launch, own_origin), **fields)
        files = files_of(draft, manifest, launch)
        del files[paths.supervisor]  # shared by all points
        files[paths.directory / names.COMMAND_LOG] = _make_pasteable(point, request)
        write_launch(paths, files, None, KEY)
    undo.callback(discard_launch, paths, directories)
    make_directories(directories, KEY)
    return point, manifest


def _make_pasteable(point: Point, request: SweepRequest) -> str:
    trees = [("--config-dir", path) for path in request.config_dirs]
    trees += [("--template-dir", request.template_dir)] if request.template_dir is not None else []
    options = [word for name, path in trees for word in (name, str(path))]
    alone = ["slipway", "launch", *recorded(point.draft.composition.overrides), *options]
    directory = quote_line(["cd", str(Path.cwd())])
    return (
        f"{directory} && {quote_line(recorded(request.command))}\n"
        f"# this point alone, as the next launch of its run:\n# {directory} && {quote_line(alone)}\n"
    )


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
    """Plan the arrays, check them on this machine, and show each to Slurm; write nothing yet."""
    scheduler = SlurmScheduler(sweep.points[0].plan.slurm_conf)
    warnings = describe_ignored(scheduler.ignored_environment())
    largest = scheduler.ask_largest_array()
    if largest < 1:
        raise UserError("this Slurm takes no job arrays: its MaxArraySize is 0")
    arrays = plan_arrays(sweep, request.throttle, largest)
    for array in arrays:
        script = render_array(array, pick_array(sweep.directory), "tag", request.template_dir)
        for point in array.points:
            _ = point.draft.texts  # a mistake in a template is refused before anything is written
        answer = validate(scheduler, script)
        warnings += [answer.waits] if answer.waits else []
    return ReadySweep(scheduler, arrays, list(dict.fromkeys(warnings)))


def launch_sweep(sweep: SweepDraft, ready: ReadySweep, request: SweepRequest) -> LaunchedSweep:
    """Write every point of a sweep, and submit its arrays.

    Raise `NoAnswer` if it is unknown whether an array became a job, and UserError if something cannot be
    written, or Slurm refuses an array after all.
    """
    for point in sweep.again:
        reconcile_unconfirmed(point.plan.paths.run_dir)
    with sweep.points[0].draft.composition.annotated(), ExitStack() as undo:
        undo.callback(remove_empty, list_missing_directories(sweep.directory))
        try:
            written = [_write_array(array, sweep, request, undo) for array in ready.arrays]
        except OSError as error:
            raise explain_os_error(error, sweep.directory, KEY) from error
        undo.pop_all()
    job_ids: list[str] = []
    for array in written:
        # So that no more points run at once than were asked for, however many arrays they are.
        after = f"afterany:{job_ids[-1]}" if job_ids and request.throttle is not None else None
        try:
            job_ids.append(_submit(ready.scheduler, array, after))
        except UserError as error:
            where = shlex.quote(display_path(sweep.directory))
            results = f"to show its points: slipway sweep --results {where}"
            so_far = f"of {len(written)} arrays {len(job_ids)} are submitted: {', '.join(job_ids)}"
            error.hint = "\n".join(filter(None, [error.hint, so_far if job_ids else None, results]))
            raise
    return LaunchedSweep(written, job_ids, [*ready.warnings, *_record_jobs(written, job_ids)])


def _submit(scheduler: SlurmScheduler, array: WrittenArray, after: str | None) -> str:
    """Submit an array, and record for every point why there is no job, or why that is unknown."""
    record = array.record
    script = array.directory / record.script
    submission = Submission(record.tag, script, record.user, record.created, after=after)
    try:
        return submit(scheduler, submission)
    except (UserError, KeyboardInterrupt) as error:
        is_refused = isinstance(error, UserError) and not isinstance(error, NoAnswer)
        why = str(error) if is_refused else getattr(error, "message", "its launcher was interrupted")
        # Otherwise the next launch of each point treats this one as abandoned.
        with contextlib.suppress(OSError):
            write_record(array.directory, replace(record, error=why))
            for point, manifest in zip(array.points, array.manifests, strict=True):
                result = manifest.set_error(why) if is_refused else manifest.set_unanswered(why)
                write_manifest(point.plan.paths.directory, result)
        raise


def _record_jobs(arrays: Sequence[WrittenArray], job_ids: Sequence[str]) -> list[str]:
    """Record the job of each point; return warnings about records that could not be written."""
    failed = set()
    for array, job_id in zip(arrays, job_ids, strict=True):
        try:
            write_record(array.directory, replace(array.record, job_id=job_id))
        except OSError as error:
            failed.add(f"into {display_path(array.directory)}: {error.strerror}")
        for point, planned in zip(array.points, array.manifests, strict=True):
            paths = point.plan.paths
            try:
                record_job(paths, planned.set_job(job_id))
            except OSError as error:
                failed.add(f"into {display_path(paths.directory)}: {error.strerror}")
    remember_trees({point.plan.paths.run_dir.parent for array in arrays for point in array.points})
    return [f"the job's id could not be written {place}" for place in sorted(failed)]
