"""What a sweep leaves on disk before it is submitted: a launch of each point, a directory of each array."""

from __future__ import annotations

import json
import shutil
import stat
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.drafting import Request as LaunchRequest
from launcher.errors import file_mode
from launcher.launching.directory import files_of, manifest_of, quoted_line, with_digest
from launcher.runs import paths as names
from launcher.runs import provenance
from launcher.runs.manifest import Manifest
from launcher.runs.paths import next_launch_number
from launcher.runs.write import (
    LaunchExists,
    copy_package,
    discard_launch,
    link_atomic,
    make_directories,
    remove_empty,
    write_launch,
)
from launcher.secrecy import recorded
from launcher.sweeps.arrays import Array, array_settings, render_array
from launcher.sweeps.points import Drafted, Point, Request, as_job
from launcher.sweeps.record import ARRAYS, POINTS, Record, write_record
from supervisor.files import write_atomic
from supervisor.settings import NAME as SUPERVISOR_SETTINGS

KEY = "base_results_dir"


@dataclass(frozen=True, slots=True)
class Written:
    """An array that lies on disk, with the manifests of its points."""

    directory: Path
    script: Path
    points: list[Point]
    manifests: list[Manifest]
    record: Record


def next_array(sweep_dir: Path) -> Path:
    """The directory that the next array of a sweep gets."""
    numbers = [int(path.name) for path in _entries(sweep_dir / ARRAYS) if path.name.isdecimal()]
    return sweep_dir / ARRAYS / str(max(numbers, default=0) + 1)


def write_array(array: Array, sweep: Drafted, request: Request, undo: ExitStack) -> Written:
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
    (directory / names.SUPERVISOR).write_bytes(array.points[0].draft.rendered.supervisor)
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
    told = json.dumps(array_settings(array, tag)._asdict(), indent=2) + "\n"
    write_atomic(directory / SUPERVISOR_SETTINGS, told)
    record = _record(array, sweep, request, tag)
    write_record(directory, record)
    return Written(directory, script, points, manifests, record)


def _reserve(sweep_dir: Path) -> Path:
    """A directory that no other launcher has."""
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
    request: Request,
    origin: provenance.Origin,
    fields: dict[str, Any],
    undo: ExitStack,
) -> tuple[Point, Manifest]:
    """Write the launch of a point, taking the next number for as long as other launchers take ours."""
    while True:
        made = point.draft
        asked = LaunchRequest(made.composition.overrides, request.command, request.config_dir)
        # The image of each is its own, where images are swept.
        container = made.plan.job.container
        image = container.image if container else None
        told = with_digest(provenance.of_image(origin, image), image)
        manifest = replace(manifest_of(made, asked, told), **fields)
        files = files_of(made, manifest, asked)
        del files[made.plan.paths.supervisor]  # shared by all points
        files[made.plan.paths.directory / names.COMMAND_LOG] = _pasteable(point, request)
        try:
            write_launch(made.plan.paths, files, (), KEY)
        except LaunchExists:
            number = next_launch_number(made.plan.paths.run_dir)
            point = as_job(point, array.job_name, number, request.template_dir)
            continue
        undo.callback(discard_launch, made.plan.paths, made.plan.job.directories)
        make_directories(made.plan.job.directories, KEY)
        return point, manifest


def _pasteable(point: Point, request: Request) -> str:
    trees = [("--config-dir", request.config_dir), ("--template-dir", request.template_dir)]
    options = [word for name, path in trees if path is not None for word in (name, str(path))]
    alone = ["slipway", "launch", *recorded(point.draft.composition.overrides), *options]
    there = quoted_line(["cd", str(Path.cwd())])
    return (
        f"{there} && {quoted_line(recorded(request.command))}\n"
        f"# this point alone, as the next launch of its run:\n# {there} && {quoted_line(alone)}\n"
    )


def _record(array: Array, sweep: Drafted, request: Request, tag: str) -> Record:
    points = [
        {
            "name": point.plan.paths.run_dir.name,
            "launch": point.plan.paths.number,
            "values": point.spot.values,
        }
        for point in array.points
    ]
    return Record(
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
