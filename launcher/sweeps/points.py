"""The points of a sweep: overrides multiplied out as Hydra's own sweeper does, each drafted and checked."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, QuotedString
from hydra.errors import HydraException

from launcher.checks.findings import Finding, Severity
from launcher.checks.gate import check_drafts, convert_to_mistakes
from launcher.config.compose import BatchComposer, Composition, list_options
from launcher.config.overrides import GROUPS, WORKSPACE, hydra_value, is_text, parse_override
from launcher.config.schema import RunConfig
from launcher.drafting import Draft, Request, drafts
from launcher.errors import Mistakes, UserError, escape, setting_error
from launcher.plan import Plan
from launcher.runs.paths import LAUNCHES

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")

# The number of points that are named in a mistake that several have.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The sweep that the user asked for; at most `throttle` points may run at once."""

    overrides: Sequence[str]
    command: Sequence[str]
    name: str | None = None
    throttle: int | None = None
    config_dirs: tuple[Path, ...] = ()
    template_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One point: its place in the grid, and the draft of its launch."""

    grid_point: GridPoint
    draft: Draft

    @property
    def plan(self) -> Plan:
        return self.draft.plan


@dataclass(frozen=True, slots=True)
class SweepDraft:
    """A planned sweep, not written anywhere yet; `directory` holds the directories of its points' runs."""

    name: str
    directory: Path
    grid: Grid
    points: list[Point]

    @property
    def again(self) -> list[Point]:
        """The points that were launched before, and go on from their checkpoints."""
        return [point for point in self.points if point.plan.paths.number > 1]


def draft_sweep(request: SweepRequest) -> SweepDraft:
    """Draft every point of a sweep; raise UserError at the first mistake in the request."""
    grid = read_grid(request.overrides, request.config_dirs)
    grid_points = grid.points()
    sweep = BatchComposer(grid.shared, request.config_dirs)
    first = sweep.compose(grid_points[0].overrides)
    with first.annotated():
        stage, name, directory = _locate_sweep(first, request)
    points = []
    for grid_point in grid_points:
        # Last, so that nothing of the command line decides otherwise.
        place = [
            f"{stage}.run.name={hydra_value(grid_point.name)}",
            f"{stage}.run.results_dir={hydra_value(str(directory / grid_point.name))}",
        ]
        composition = sweep.compose([*grid_point.overrides, *place])
        with composition.annotated():
            _require_one_job(composition.config)
        launch = Request(composition.overrides, request.command, request.config_dirs, request.template_dir)
        (draft,) = drafts(launch, [composition])
        points.append(Point(grid_point, draft))
    if len({point.plan.slurm_conf for point in points}) > 1:
        raise setting_error(
            "cluster.slurm_conf: the points belong to several Slurms: a sweep is of one cluster"
        )
    return SweepDraft(name, directory, grid, points)


def _locate_sweep(composition: Composition, request: SweepRequest) -> tuple[str, str, Path]:
    """Return the stage of a sweep, its name, and its directory."""
    config = composition.config
    if len(config.stages) != 1:
        message = f"stages=[{','.join(config.stages)}]: a sweep is of one stage"
        raise setting_error(message, f"stages=[{config.stages[-1]}]")
    (stage,) = config.stages
    if stage == WORKSPACE:
        raise setting_error(f"stages=[{stage}]: an interactive shell cannot be swept")
    node = getattr(config, stage)
    name = f"{node.run.name}_sweep" if request.name is None else request.name
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--name {escape(repr(name))}: not a safe file name",
            hint="valid: up to 100 letters, digits and . _ + = - with a letter or digit first",
        )
    directory = Path(config.base_results_dir).absolute() / name
    if (directory / LAUNCHES).exists():
        raise UserError(f"--name {name}: {directory} is a run already", hint="--name ANOTHER")
    return stage, name, directory


def _require_one_job(config: RunConfig) -> None:
    """Refuse a point that could not be one task of an array."""
    if config.cluster.scheduler != "slurm":
        message = f"cluster.scheduler={config.cluster.scheduler}: a sweep is a job array of Slurm's"
        hint = "a throw-away Slurm: `slipway sandbox up` and cluster=sandbox"
        raise setting_error(message, hint)
    if config.resilience.links > 1:
        message = f"resilience.links={config.resilience.links}: a point of a sweep is one job, and no chain"
        hint = "resilience.links=1; sweeping again goes on from the checkpoints"
        raise setting_error(message, hint)
    preparation = config.data_preparation
    if preparation is not None and preparation.tasks > 1:
        message = f"data_preparation.tasks={preparation.tasks}: a point of a sweep is one job"
        raise setting_error(message, "data_preparation.tasks=1")
    if config.cluster.sbatch.get("array") is not None:
        message = f"cluster.sbatch.array={config.cluster.sbatch['array']}: a sweep is an array already"
        raise setting_error(message, "--throttle N is what %N says there")


def make_task(point: Point, job_name: str, number: int) -> Point:
    """Return the point as a launch of this number, in a job of this name: all tasks of an array share one."""
    draft = point.draft.numbered(number)
    plan = replace(draft.plan, paths=replace(draft.plan.paths, job_name=job_name))
    return replace(point, draft=replace(draft, plan=plan))


def check_sweep(sweep: SweepDraft, skipped: Sequence[str]) -> None:
    """Check every point, and report once what several of them have; raise Mistakes all errors together."""
    findings: dict[tuple[Severity, str, str, str | None], list[tuple[Point, Finding]]] = {}
    # The points are called alike on purpose, and are one array.
    drafted = [point.draft for point in sweep.points]
    reports = check_drafts(drafted, skipped, same_job_name=(), array_tasks=len(drafted))
    for point, report in zip(sweep.points, reports, strict=True):
        for finding in report.findings:
            kind = (finding.severity, finding.id, finding.message, finding.key)
            findings.setdefault(kind, []).append((point, finding))
    errors: list[UserError] = []
    for (severity, *_), places in findings.items():
        mistake = _mistake(places, len(sweep.points))
        if severity is Severity.ERROR:
            errors.append(mistake)
        elif severity is Severity.WARNING:
            _logger.warning("warning: %s", mistake)
    if errors:
        raise Mistakes(errors)


def _mistake(places: Sequence[tuple[Point, Finding]], count: int) -> UserError:
    """Return one mistake, with the points that have it, unless all have."""
    point, finding = places[0]
    (mistake,) = convert_to_mistakes(point.draft, [finding])
    if len(places) < count:
        names = ", ".join(point.grid_point.name for point, _ in places[:_NAMED])
        more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
        mistake.hint = "\n".join(filter(None, [f"in {escape(names)}{more}", mistake.hint]))
    return mistake


# --- the grid

# More are a slip: the controller of a cluster holds ten thousand jobs by default, of all users together.
MOST_POINTS = 10_000

# Directories, jobs and logs are called after points, and file systems take names of 255 bytes.
_LONGEST_NAME = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
# Where every comma and bracket belongs to the values, they are taken as they were typed: 3e-4, not 0.0003.
_PLAIN = re.compile(r"[^\[\]{}()'\"\\]+")
# Keys that a sweep sets itself, under any prefix.
_OURS = (".stages", ".run.name", ".run.results_dir")


@dataclass(frozen=True, slots=True)
class Axis:
    """A key that is swept, with its sign if it has one, and its values as the command line takes them."""

    key: str
    values: tuple[str, ...]

    @property
    def plain_key(self) -> str:
        return self.key.lstrip("+~")


@dataclass(frozen=True, slots=True)
class GridPoint:
    """A point of a grid: its name, its overrides, and the value of each swept key."""

    name: str
    overrides: tuple[str, ...]
    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class Grid:
    """The overrides that all points of a sweep share, and its axes; the last one changes fastest."""

    shared: tuple[str, ...]
    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    @property
    def labels(self) -> dict[str, str]:
        """The name of each swept key in tables: its last words, as many as make it unique."""
        keys = [axis.plain_key for axis in self.axes]
        return {key: _shorten_key(key, keys) for key in keys}

    def points(self) -> list[GridPoint]:
        """Return all points, in order."""
        labels, points = self.labels, []
        for values in itertools.product(*(axis.values for axis in self.axes)):
            pairs = list(zip(self.axes, values, strict=True))
            overrides = tuple(f"{axis.key}={value}" for axis, value in pairs)
            by_key = {axis.plain_key: value for axis, value in pairs}
            safe = {key: _UNSAFE.sub("-", value).strip("-") or "-" for key, value in by_key.items()}
            name = "_".join(f"{labels[key]}={value}" for key, value in safe.items())
            points.append(GridPoint(name, overrides, by_key))
        # Values may differ only in characters that file names should not contain.
        counted = Counter(point.name for point in points)
        for index, point in enumerate(points):
            if counted[point.name] > 1 or len(point.name) > _LONGEST_NAME:
                content = "\n".join(point.overrides).encode("utf-8", "surrogateescape")
                digest = hashlib.sha256(content).hexdigest()[:8]
                points[index] = replace(point, name=f"{point.name[: _LONGEST_NAME - 9]}-{digest}")
        return points


def read_grid(overrides: Sequence[str], config_dirs: tuple[Path, ...] = ()) -> Grid:
    """Separate swept overrides from the others; raise UserError without any, or an invalid one."""
    axes = {text: _axis(text, config_dirs) for text in overrides}
    shared = tuple(text for text in overrides if axes[text] is None)
    grid = Grid(shared, tuple(axis for text in overrides if (axis := axes[text]) is not None))
    _check(grid)
    return grid


def _axis(text: str, config_dirs: tuple[Path, ...]) -> Axis | None:
    """Return the axis of an override; ``None`` if it has one value, or a mistake that composing reports."""
    try:
        override = parse_override(text)
        # In a text value a comma is a part of it, so that only `choice(...)` sweeps.
        if is_text(override) and not (override.value or "").startswith("choice("):
            return None
        (parsed,) = OverridesParser.create().parse_overrides([text])
    except (UserError, HydraException):
        return None
    if not parsed.is_sweep_override():
        return None
    key = parsed.get_key_element()
    if not parsed.is_discrete_sweep():
        message = f"{escape(text)}: an interval has no number of values"
        hint = f"{escape(key)}=1,2,4, choice(...) or range(START,STOP,STEP)"
        raise UserError(message, key=key.lstrip("+~"), hint=hint)
    value: object = parsed.value()
    if isinstance(value, Glob):
        values = _list_choices(text, parsed.key_or_group, value, config_dirs)
    elif is_text(override):
        items = parsed.sweep_iterator()
        values = [item.text if isinstance(item, QuotedString) else str(item) for item in items]
    elif _PLAIN.fullmatch(override.value or ""):
        values = [part.strip() for part in (override.value or "").split(",")]
    else:
        values = list(parsed.sweep_string_iterator())
    return Axis(key, tuple(values))


def _list_choices(text: str, group: str, glob: Glob, config_dirs: tuple[Path, ...]) -> list[str]:
    if group not in GROUPS:
        raise UserError(f"{escape(text)}: glob() chooses files, and {escape(group)} is a value")
    matches = glob.filter(list_options(group, config_dirs))
    if not matches:
        raise UserError(f"{escape(text)}: no choice is called so", key=group, hint=f"slipway list {group}")
    return matches


def _check(grid: Grid) -> None:
    if not grid.axes:
        raise UserError(
            "nothing is swept: no override has several values",
            hint="several are training.model.optim.lr=1e-4,3e-4, choice(...) or range(START,STOP,STEP)\n"
            "to launch one training: slipway launch",
        )
    for key in (parse_override(text).key for text in grid.shared):
        if key.endswith(".run.results_dir"):
            message = f"{escape(key)}: each point has its own directory, below that of the sweep"
            hint = "base_results_dir=DIR, and --name for the sweep's below it"
            raise UserError(message, key=key, hint=hint)
    for axis in grid.axes:
        key = escape(axis.plain_key)
        if f".{axis.plain_key}".endswith(_OURS):
            hint = "--name is the sweep's; each point is called after its values"
            raise UserError(f"{key} cannot be swept", key=axis.plain_key, hint=hint)
        again = [value for value, count in Counter(axis.values).items() if count > 1]
        if again:
            raise UserError(f"{key}: the value {escape(again[0])} is there twice", key=axis.plain_key)
    twice = [key for key, count in Counter(axis.plain_key for axis in grid.axes).items() if count > 1]
    if twice:
        raise UserError(f"{escape(twice[0])} is swept twice", key=twice[0])
    if grid.size > MOST_POINTS:
        lengths = " × ".join(str(len(axis.values)) for axis in grid.axes)
        raise UserError(f"{lengths} are {grid.size} points: a sweep has {MOST_POINTS} at most")


def _shorten_key(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    for count in range(1, len(parts)):
        label = ".".join(parts[-count:])
        if sum(other == label or other.endswith(f".{label}") for other in keys) == 1:
            return label
    return key
