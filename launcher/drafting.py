"""The way from overrides to text: configuration, plan, scripts. Nothing is written or submitted.

Every command walks this way; `launching` goes on from here to a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.compose import Composition, compose
from launcher.errors import explain_os_error
from launcher.plan import Plan
from launcher.rendering.render import Rendered, render
from launcher.runs import provenance
from launcher.runs.paths import next_launch_number
from launcher.stages.planning import plan_launch, run_directory


@dataclass(frozen=True, slots=True)
class Draft:
    """A launch that is planned and rendered, and nowhere written yet."""

    composition: Composition
    plan: Plan
    rendered: Rendered


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for.

    Attributes
    ----------
    command
        The whole command line, for the record.
    config_dir, template_dir
        Trees of the user's own, looked at before ours.
    number, tag
        Those of an earlier launch, to render its script again; ``None`` for the next launch.
    """

    overrides: Sequence[str]
    command: Sequence[str]
    config_dir: Path | None = None
    template_dir: Path | None = None
    number: int | None = None
    tag: str | None = None


def draft(request: Request) -> Draft:
    """Compose, plan and render the next launch of a run; nothing is written.

    Raises
    ------
    UserError
        If the request has a mistake.
    """
    composition = compose(request.overrides, request.config_dir)
    with composition.naming_sources():
        run_dir = run_directory(composition.config)
        try:
            number = request.number or next_launch_number(run_dir)
        except OSError as error:
            raise explain_os_error(error, run_dir, _results_key(composition, run_dir), verb="read") from error
    return render_launch(composition, number, request.tag or provenance.new_tag(), request.template_dir)


def render_launch(composition: Composition, number: int, tag: str, template_dir: Path | None) -> Draft:
    """Plan and render one launch; the same arguments give the same bytes."""
    with composition.naming_sources():
        plan = plan_launch(composition.config, number=number, tag=tag)
        return Draft(composition, plan, render(plan, template_dir))


def results_key(made: Draft) -> str:
    """The key of the configuration that says where the run of a draft is."""
    return _results_key(made.composition, made.plan.paths.run_dir)


def _results_key(composition: Composition, run_dir: Path) -> str:
    config = composition.config
    if run_dir.is_relative_to(config.base_results_dir):
        return "base_results_dir"
    return f"{config.stages[0]}.run.results_dir"
