"""The way from overrides to text: configurations, plans, scripts. Nothing is written or submitted.

Every command walks this way; `launching` goes on from here to a job.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.compose import Composition, compose
from launcher.config.overrides import STAGES
from launcher.config.schema import RunConfig
from launcher.config.secrets import check_references, check_texts
from launcher.config.stored import read_stored
from launcher.errors import UserError, did_you_mean, explain_os_error
from launcher.plan import Plan
from launcher.rendering.render import Rendered, render
from launcher.runs import provenance
from launcher.runs.manifest import read_manifest, read_stored_text
from launcher.runs.paths import LAUNCHES, ROOT_CONFIG, LaunchPaths, next_launch_number
from launcher.runs.trust import why_untrusted
from launcher.stages.planning import by_stage, plan_launch, run_directory
from launcher.stages.workspace import STAGE as WORKSPACE

if TYPE_CHECKING:
    from launcher.images.choice import Choice
    from launcher.stages.image import ImageWork


@dataclass(frozen=True, slots=True)
class Draft:
    """A launch that is planned and rendered, and nowhere written yet.

    `template_dir` holds templates of the user's own, and `work` what a job does that makes an image.
    """

    composition: Composition
    plan: Plan
    rendered: Rendered
    template_dir: Path | None = None
    work: ImageWork | None = None


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
    stage
        The one stage that is meant, of several that the overrides ask for.
    launch_dir
        The directory of an earlier launch, to render it again from what is stored there.
    """

    overrides: Sequence[str]
    command: Sequence[str]
    config_dir: Path | None = None
    template_dir: Path | None = None
    number: int | None = None
    tag: str | None = None
    stage: str | None = None
    launch_dir: Path | None = None


def draft(request: Request) -> Draft:
    """Compose, plan and render the next launch of a run; nothing is written.

    Raises
    ------
    UserError
        If the request has a mistake, or is for several stages: see `drafts`.
    """
    made = drafts(request)
    if len(made) > 1:
        stages = [one.plan.job.stage for one in made]
        hint = f"one stage at a time: stages=[{stages[-1]}]"
        raise UserError(f"stages=[{','.join(stages)}]: one stage is meant here", key="stages", hint=hint)
    return made[0]


def drafts(request: Request) -> list[Draft]:
    """Compose, plan and render the next launch of each stage that is asked for; nothing is written.

    Raises
    ------
    UserError
        If the request has a mistake.
    """
    if request.launch_dir is not None:
        return [stored_draft(request.launch_dir, request.number, request.tag)]
    return drafts_of(stages_of(compose(request.overrides, request.config_dir), request.stage), request)


def drafts_of(staged: Sequence[Composition], request: Request) -> list[Draft]:
    """The same of what is composed already, each for a stage.

    Raises
    ------
    UserError
        If the request has a mistake.
    """
    if len(staged) > 1 and (request.number is not None or request.tag is not None):
        names = [one.config.stages[0] for one in staged]
        raise UserError(
            f"stages=[{','.join(names)}]: --launch-number and --tag are those of one launch",
            key="stages",
            hint=f"--stage={names[-1]}",
        )
    return [_draft(composition, request) for composition in staged]


def stages_of(composition: Composition, stage: str | None = None) -> list[Composition]:
    """One composition for each stage that is asked for, or for the one that is chosen of them.

    Raises
    ------
    UserError
        If the stages cannot be launched one after the other, or the chosen one is none of them.
    """
    with composition.naming_sources():
        composition = _with_dev_image(composition)
        configs = by_stage(composition.config)
        names = [config.stages[0] for config in configs]
        if stage is not None and stage not in names:
            raise UserError(
                f"--stage={stage}: not one of stages=[{','.join(names)}]", hint=did_you_mean(stage, names)
            )
    if len(configs) == 1:
        return [composition]
    return [
        replace(
            composition,
            config=config,
            choices=_choices_of(composition, name),
            before=tuple(configs[:position]),
        )
        for position, (config, name) in enumerate(zip(configs, names, strict=True))
        if stage in (None, name)
    ]


def _with_dev_image(composition: Composition) -> Composition:
    """Of a workspace, with the image that is its own; of a recipe that is the flavor for developers."""
    config = composition.config
    if config.stages != [WORKSPACE] or config.workspace is None:
        return composition
    image = config.workspace.container or config.container
    if config.workspace.container is None and image is not None:
        from launcher.images.references import recipe_and_flavor  # late: few launches are workspaces

        name, flavor = recipe_and_flavor(image) or (None, None)
        image = f"{name}:dev" if name is not None and flavor in (None, "run") else image
    return replace(composition, config=config.model_copy(update={"container": image}))


def _choices_of(composition: Composition, stage: str) -> dict[str, str]:
    """The choices less those of other stages' groups."""
    return {
        group: choice
        for group, choice in composition.choices.items()
        if group == stage or group not in STAGES
    }


def draft_image(request: Request, work: ImageWork) -> Draft:
    """Compose, plan and render the job that makes an image; nothing is written.

    Raises
    ------
    UserError
        If the request has a mistake, or there is no queue for the job.
    """
    return _draft(compose(request.overrides, request.config_dir), request, work)


def choice_of(composition: Composition, template_dir: Path | None = None) -> Choice | None:
    """What `container` stands for; ``None`` on bare metal.

    Raises
    ------
    UserError
        If it is no image, or a recipe that is not there or has a mistake.
    """
    config = composition.config
    if config.container is None or not config.container.strip():
        return None
    # Imported late: most launches have no container, or one that is told as it is.
    from launcher.images.choice import choose

    with composition.naming_sources():
        return choose(config.container, config.images_dir, composition.config_dir, template_dir)


def with_image(composition: Composition, template_dir: Path | None) -> RunConfig:
    """The configuration with the container as the job is told of it."""
    config = composition.config
    # Files, and names as Pyxis takes them, are told as they are.
    if config.container is None or re.match(r"\s*$|[/~.]|[^:/]*#", config.container):
        return config
    choice = choice_of(composition, template_dir)
    assert choice is not None
    return config.model_copy(update={"container": choice.image})


def stored_draft(launch_dir: Path, number: int | None = None, tag: str | None = None) -> Draft:
    """Render a launch again from what is stored with it, whatever became of the trees that it was made from.

    Raises
    ------
    UserError
        If there is no such launch, or nothing is stored with it.
    """
    launch_dir = launch_dir.absolute()
    manifest = read_manifest(launch_dir)
    paths = LaunchPaths(launch_dir.parents[1], manifest.run, manifest.job_name, manifest.launch)
    stored, templates = launch_dir / paths.root_config.name, launch_dir / paths.templates.name
    try:
        text = read_stored_text(stored)
    except OSError as error:
        raise UserError(
            f"{stored}: {(error.strerror or str(error)).lower()}: this launch was stored without it",
            hint="without --launch-dir the launch is composed again, from the trees as they are now",
        ) from error
    config = read_stored(text, str(stored))
    composition = Composition(config, manifest.choices, tuple(manifest.overrides))
    return render_launch(
        composition,
        number or manifest.launch,
        tag or manifest.tag,
        _require_trusted(templates) if templates.is_dir() else None,
    )


def _require_trusted(templates: Path) -> Path:
    """Refuse templates that somebody else could have written: a template can run any code as the reader."""
    for path in (templates, *templates.rglob("*")):
        if (why := why_untrusted(path)) is not None:
            raise UserError(
                f"{templates}: templates can run commands, and these are not trusted: {why}",
                hint="read them; then copy the run to a directory that only you may write, and render there",
            )
    return templates


def stored_config(made: Draft) -> RunConfig:
    """The configuration of a draft with all that this machine had a part in: its image, its interpreter."""
    config = with_image(made.composition, made.template_dir)
    if config.cluster.python is None and made.plan.job.container is None and config.workspace is None:
        cluster = config.cluster.model_copy(update={"python": made.plan.job.payload.argv[0]})
        return config.model_copy(update={"cluster": cluster})
    return config


def _stored(run_dir: Path, request: Request) -> Draft | None:
    """The launch that a request names by its number and its tag, if it is stored."""
    if request.number is None or request.tag is None:
        return None
    launch_dir = run_dir / LAUNCHES / str(request.number)
    with contextlib.suppress(UserError, OSError):
        if (launch_dir / ROOT_CONFIG).is_file() and read_manifest(launch_dir).tag == request.tag:
            return stored_draft(launch_dir)
    return None


def _draft(composition: Composition, request: Request, work: ImageWork | None = None) -> Draft:
    with composition.naming_sources():
        config = composition.config
        run_dir = run_directory(config) if work is None else _image_directory(config, work)
        try:
            number = request.number or next_launch_number(run_dir)
        except OSError as error:
            raise explain_os_error(error, run_dir, _results_key(composition, run_dir), verb="read") from error
    if work is None and (stored := _stored(run_dir, request)) is not None:
        return stored
    tag = request.tag or provenance.new_tag()
    return render_launch(composition, number, tag, request.template_dir, work)


def _image_directory(config: RunConfig, work: ImageWork) -> Path:
    from launcher.stages.image import image_directory  # late: few launches make an image

    return image_directory(config, work)


def render_launch(
    composition: Composition,
    number: int,
    tag: str,
    template_dir: Path | None,
    work: ImageWork | None = None,
) -> Draft:
    """Plan and render one launch; the same arguments give the same bytes."""
    with composition.naming_sources():
        check_references(composition.references)
        if work is None:
            config = with_image(composition, template_dir)
            plan = plan_launch(config, number=number, tag=tag)
        else:
            from launcher.stages.image import image_plan  # late: few launches make an image

            plan = image_plan(composition.config, work, number=number, tag=tag)
        rendered = render(plan, template_dir)
        if template_dir is not None:
            check_texts(rendered.texts(plan.paths), f"--template-dir {template_dir}")
        return Draft(composition, plan, rendered, template_dir, work)


def render_again(made: Draft, number: int, template_dir: Path | None) -> Draft:
    """Render the same draft with another number."""
    return render_launch(made.composition, number, made.plan.tag, template_dir, made.work)


def results_key(made: Draft) -> str:
    """The key of the configuration that says where the run of a draft is."""
    return _results_key(made.composition, made.plan.paths.run_dir)


def _results_key(composition: Composition, run_dir: Path) -> str:
    config = composition.config
    if run_dir.is_relative_to(config.base_results_dir):
        return "base_results_dir"
    return f"{config.stages[0]}.run.results_dir"
