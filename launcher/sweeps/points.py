"""The points of a sweep as drafts: each composed, planned and checked, and nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.checks.findings import Finding, Severity
from launcher.checks.gate import as_mistakes
from launcher.checks.gathering.cluster import remembered
from launcher.checks.gathering.gather import gather
from launcher.checks.gathering.trainer import trainer_verdicts
from launcher.checks.runner import run_checks
from launcher.config.compose import Composition
from launcher.config.many import Sweep
from launcher.config.overrides import hydra_value
from launcher.config.schema import RunConfig
from launcher.config.secrets import check_references
from launcher.drafting import Draft, with_image
from launcher.errors import Mistakes, UserError, explain_os_error, one_line
from launcher.plan import Plan
from launcher.rendering.render import render
from launcher.runs import provenance
from launcher.runs.paths import LAUNCHES, next_launch_number
from launcher.stages.planning import plan_launch
from launcher.stages.workspace import STAGE as WORKSPACE
from launcher.sweeps.grid import Grid, Spot, read_grid

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")

# So many points are named of those that have the same mistake.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for.

    Attributes
    ----------
    command
        The whole command line, for the record.
    name
        The sweep's; ``None`` to call it after the run.
    throttle
        How many points may run at once; ``None`` for as many as can.
    config_dir, template_dir
        Trees of the user's own, looked at before ours.
    """

    overrides: Sequence[str]
    command: Sequence[str]
    name: str | None = None
    throttle: int | None = None
    config_dir: Path | None = None
    template_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One point: where it stands in the grid, and the launch that it will be."""

    spot: Spot
    draft: Draft

    @property
    def plan(self) -> Plan:
        return self.draft.plan


@dataclass(frozen=True, slots=True)
class Drafted:
    """A sweep before anything of it is written: `directory` holds the directories of its points' runs."""

    name: str
    directory: Path
    grid: Grid
    points: list[Point]

    @property
    def again(self) -> list[Point]:
        """The points that were launched before, and go on from their checkpoints."""
        return [point for point in self.points if point.plan.paths.number > 1]


def draft(request: Request) -> Drafted:
    """Compose and plan every point.

    Raises
    ------
    UserError
        At the first mistake in the request.
    """
    grid = read_grid(request.overrides, request.config_dir)
    spots = grid.spots()
    sweep = Sweep(grid.shared, request.config_dir)
    first = sweep.compose(spots[0].overrides)
    with first.naming_sources():
        stage, name, directory = _place(first, request)
    points = []
    for spot in spots:
        # Last, so that nothing of the command line decides otherwise.
        place = [
            f"{stage}.run.name={hydra_value(spot.name)}",
            f"{stage}.run.results_dir={hydra_value(str(directory / spot.name))}",
        ]
        points.append(Point(spot, _draft(sweep.compose([*spot.overrides, *place]), request)))
    if len({point.plan.slurm_conf for point in points}) > 1:
        raise UserError(
            "the points belong to several Slurms: a sweep is of one cluster", key="cluster.slurm_conf"
        )
    return Drafted(name, directory, grid, points)


def _place(composition: Composition, request: Request) -> tuple[str, str, Path]:
    """The stage of a sweep, its name, and its directory."""
    config = composition.config
    if len(config.stages) != 1:
        told = f"stages=[{','.join(config.stages)}]: a sweep is of one stage"
        raise UserError(told, key="stages", hint=f"stages=[{config.stages[-1]}]")
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
        told = f"resilience.links={config.resilience.links}: a point of a sweep is one job, and no chain"
        hint = "resilience.links=1; sweeping again goes on from the checkpoints"
        raise UserError(told, key="resilience.links", hint=hint)
    if config.cluster.sbatch.get("array") is not None:
        told = f"cluster.sbatch.array={config.cluster.sbatch['array']}: a sweep is an array already"
        raise UserError(told, key="cluster.sbatch.array", hint="--throttle N is what %N says there")


def _draft(composition: Composition, request: Request) -> Draft:
    """Plan the next launch of a point; its scripts are rendered once it is known which job it is of."""
    with composition.naming_sources():
        _require_one_job(composition.config)
        run_dir = Path(getattr(composition.config, composition.config.stages[0]).run.results_dir)
        try:
            number = next_launch_number(run_dir)
        except OSError as error:
            raise explain_os_error(error, run_dir, "base_results_dir", verb="read") from error
        check_references(composition.references)
        config = with_image(composition, request.template_dir)
        plan = plan_launch(config, number=number, tag=provenance.new_tag())
        return Draft(composition, plan, render(plan, request.template_dir), request.template_dir)


def as_job(point: Point, job_name: str, number: int, template_dir: Path | None) -> Point:
    """The same point as a launch of this number, in a job of this name: all tasks of an array have one."""
    made = point.draft
    with made.composition.naming_sources():
        config = with_image(made.composition, template_dir)
        plan = plan_launch(config, number=number, tag=made.plan.tag)
        plan = replace(plan, paths=replace(plan.paths, job_name=job_name))
        return replace(point, draft=replace(made, plan=plan, rendered=render(plan, template_dir)))


def check(sweep: Drafted, skipped: Sequence[str], tell: Callable[[str], None]) -> None:
    """Check every point; what several of them have is told once.

    Raises
    ------
    Mistakes
        All errors together.
    """
    verdicts = dict(
        zip(
            (point.plan.tag for point in sweep.points),
            trainer_verdicts([point.plan for point in sweep.points]),
            strict=True,
        )
    )
    found: dict[tuple[Severity, str, str, str | None], list[tuple[Point, Finding]]] = {}
    cluster_of, tasks = remembered(), len(sweep.points)
    for point in sweep.points:
        facts = gather(
            point.draft, look=True, verdict_of=lambda plan: verdicts[plan.tag], cluster_of=cluster_of
        )
        # The points are called alike on purpose, and are one array.
        facts = replace(facts, same_job_name=(), array_tasks=tasks)
        for finding in run_checks(point.plan, facts, skipped):
            told = (finding.severity, finding.id, finding.message, finding.key)
            found.setdefault(told, []).append((point, finding))
    errors: list[UserError] = []
    for (severity, *_), where in found.items():
        mistake = _mistake(where, len(sweep.points))
        if severity is Severity.ERROR:
            errors.append(mistake)
        elif severity is Severity.WARNING:
            tell(f"warning: {mistake}")
    if errors:
        raise Mistakes(errors)


def _mistake(where: Sequence[tuple[Point, Finding]], count: int) -> UserError:
    """One mistake, with the points that have it, unless all have."""
    point, finding = where[0]
    (told,) = as_mistakes(point.draft, [finding])
    if len(where) < count:
        names = ", ".join(each.spot.name for each, _ in where[:_NAMED])
        more = f" and {len(where) - _NAMED} more" if len(where) > _NAMED else ""
        told.hint = "\n".join(filter(None, [f"in {one_line(names)}{more}", told.hint]))
    return told
