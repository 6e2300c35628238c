"""The points of a sweep as drafts: each composed, planned and checked, and nothing written."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.checks.findings import Finding, Severity
from launcher.checks.gate import as_mistakes, check_drafts
from launcher.config.batch_compose import BatchComposer
from launcher.config.compose import Composition
from launcher.config.overrides import hydra_value
from launcher.config.schema import RunConfig
from launcher.drafting import Draft, Request, drafts
from launcher.errors import Mistakes, UserError, one_line
from launcher.plan import Plan
from launcher.runs.paths import LAUNCHES
from launcher.stages.workspace import STAGE as WORKSPACE
from launcher.sweeps.grid import Grid, GridPoint, read_grid

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")

# The number of points that are named in a mistake that several have.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The sweep that the user asked for.

    Attributes
    ----------
    command
        The whole command line, for the record.
    name
        The sweep's name; ``None`` to call it after the run.
    throttle
        The number of points that may run at once; ``None`` for no limit.
    config_dir, template_dir
        The user's own trees, which are searched before ours.
    """

    overrides: Sequence[str]
    command: Sequence[str]
    name: str | None = None
    throttle: int | None = None
    config_dir: Path | None = None
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
    """Draft every point of a sweep.

    Raises
    ------
    UserError
        At the first mistake in the request.
    """
    grid = read_grid(request.overrides, request.config_dir)
    grid_points = grid.points()
    sweep = BatchComposer(grid.shared, request.config_dir)
    first = sweep.compose(grid_points[0].overrides)
    try:
        stage, name, directory = _place(first, request)
    except UserError as error:
        first.annotate(error)
        raise
    points = []
    for grid_point in grid_points:
        # Last, so that nothing of the command line decides otherwise.
        place = [
            f"{stage}.run.name={hydra_value(grid_point.name)}",
            f"{stage}.run.results_dir={hydra_value(str(directory / grid_point.name))}",
        ]
        composition = sweep.compose([*grid_point.overrides, *place])
        points.append(Point(grid_point, _draft_point(composition, request)))
    if len({point.plan.slurm_conf for point in points}) > 1:
        raise UserError(
            "the points belong to several Slurms: a sweep is of one cluster", key="cluster.slurm_conf"
        )
    return SweepDraft(name, directory, grid, points)


def _place(composition: Composition, request: SweepRequest) -> tuple[str, str, Path]:
    """Return the stage of a sweep, its name, and its directory."""
    config = composition.config
    if len(config.stages) != 1:
        message = f"stages=[{','.join(config.stages)}]: a sweep is of one stage"
        raise UserError(message, key="stages", hint=f"stages=[{config.stages[-1]}]")
    (stage,) = config.stages
    if stage == WORKSPACE:
        raise UserError(f"stages=[{stage}]: a shell to sit at, of which there are no points", key="stages")
    node = getattr(config, stage)
    name = f"{node.run.name}_sweep" if request.name is None else request.name
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--name {one_line(repr(name))}: not a safe file name",
            hint="valid: up to 100 letters, digits and . _ + = - with a letter or digit first",
        )
    directory = Path(config.base_results_dir).absolute() / name
    if (directory / LAUNCHES).exists():
        raise UserError(f"--name {name}: {directory} is a run already", hint="--name ANOTHER")
    return stage, name, directory


def _require_one_job(config: RunConfig) -> None:
    """Refuse a point that could not be one task of an array."""
    if config.cluster.scheduler != "slurm":
        raise UserError(
            f"cluster.scheduler={config.cluster.scheduler}: a sweep is a job array of Slurm's",
            key="cluster.scheduler",
            hint="a throw-away Slurm: `slipway sandbox up` and cluster=sandbox",
        )
    if config.resilience.links > 1:
        message = f"resilience.links={config.resilience.links}: a point of a sweep is one job, and no chain"
        hint = "resilience.links=1; sweeping again goes on from the checkpoints"
        raise UserError(message, key="resilience.links", hint=hint)
    preparation = config.data_preparation
    if preparation is not None and preparation.tasks > 1:
        message = f"data_preparation.tasks={preparation.tasks}: a point of a sweep is one job"
        raise UserError(message, key="data_preparation.tasks", hint="data_preparation.tasks=1")
    if config.cluster.sbatch.get("array") is not None:
        message = f"cluster.sbatch.array={config.cluster.sbatch['array']}: a sweep is an array already"
        raise UserError(message, key="cluster.sbatch.array", hint="--throttle N is what %N says there")


def _draft_point(composition: Composition, request: SweepRequest) -> Draft:
    try:
        _require_one_job(composition.config)
    except UserError as error:
        composition.annotate(error)
        raise
    launch = Request(composition.overrides, request.command, request.config_dir, request.template_dir)
    (draft,) = drafts(launch, [composition])
    return draft


def as_task(point: Point, job_name: str, number: int) -> Point:
    """Return the point as a launch of this number, in a job of this name: all tasks of an array share one."""
    draft = point.draft.numbered(number)
    plan = replace(draft.plan, paths=replace(draft.plan.paths, job_name=job_name))
    return replace(point, draft=replace(draft, plan=plan))


def check_sweep(sweep: SweepDraft, skipped: Sequence[str]) -> None:
    """Check every point, and report once what several of them have.

    Raises
    ------
    Mistakes
        All errors together.
    """
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
    (mistake,) = as_mistakes(point.draft, [finding])
    if len(places) < count:
        names = ", ".join(point.grid_point.name for point, _ in places[:_NAMED])
        more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
        mistake.hint = "\n".join(filter(None, [f"in {one_line(names)}{more}", mistake.hint]))
    return mistake
