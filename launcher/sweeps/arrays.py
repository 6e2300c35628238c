"""The job arrays that a sweep becomes: one, or as many as its points differ in what they ask Slurm for.

An array is one request, so that only points with the same header can share it, and a site limits how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.rendering.quoting import RawShell, escape_pattern, quote_header
from launcher.rendering.render import render_template
from launcher.rendering.sbatch_flags import header_lines
from launcher.runs.paths import log_prefix_beside
from launcher.sweeps.points import Drafted, Point, as_job
from launcher.sweeps.record import POINTS
from supervisor.settings import SweepSettings

# Of a point's own header; the array's are others.
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
        """What ``--array`` is given."""
        limit = f"%{self.throttle}" if self.throttle is not None else ""
        return f"0-{len(self.points) - 1}{limit}"

    @property
    def script_name(self) -> str:
        """That of the array's script, and of each point's."""
        return self.points[0].plan.paths.script_name


def plan_arrays(sweep: Drafted, throttle: int | None, largest: int, template_dir: Path | None) -> list[Array]:
    """Put the points of a sweep into as few arrays as possible.

    Parameters
    ----------
    largest
        How many tasks an array of this site may have.
    """
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in sweep.points:
        groups.setdefault(_request(point), []).append(point)
    parts = [part for group in groups.values() for part in _split(group, largest)]
    arrays = []
    for number, points in enumerate(parts, start=1):
        # With one name for all, `singleton` would let them run one after the other.
        job_name = _job_name(points[0], sweep.name) + (f"-{number}" if number > 1 else "")
        named = [as_job(point, job_name, point.plan.paths.number, template_dir) for point in points]
        arrays.append(Array(sweep.name, job_name, named, throttle))
    return arrays


def render_array(array: Array, directory: Path, tag: str, template_dir: Path | None) -> str:
    """The script of an array that lies in `directory`."""
    values = {
        "header_lines": [*_array_lines(array, directory), *array.header],
        "tag": tag,
        "directory": directory,
    }
    return render_template("sweep.sh.j2", values, template_dir)


def array_settings(array: Array, tag: str) -> SweepSettings:
    """Return what the tasks of an array are told."""
    points = [(str(point.plan.paths.directory), point.plan.tag) for point in array.points]
    return SweepSettings(array.sweep, tag, array.script_name, points)


def differing(arrays: Sequence[Array]) -> list[str]:
    """The flags of sbatch in which the arrays of a sweep differ, without their values."""
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
    """What points of one array have in common: what they ask for, and of which Slurm."""
    return (*_header(point), point.plan.job.merge_stderr, point.plan.slurm_conf)


def _header(point: Point) -> list[RawShell]:
    return [line for line in header_lines(point.plan) if not line.startswith(_OF_THE_POINT)]


def _split(points: Sequence[Point], largest: int) -> Iterator[list[Point]]:
    for start in range(0, len(points), largest):
        yield list(points[start : start + largest])


def _job_name(point: Point, sweep: str) -> str:
    paths = point.plan.paths
    return paths.job_name.removesuffix(paths.run_name) + sweep
