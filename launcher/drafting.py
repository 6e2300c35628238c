"""The way from overrides to planned launches: compose, plan, render. Nothing is written or submitted.

Every command walks this way; `launcher.launching` goes on from here to a job.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from launcher.stages.checkpoint_source import directory_of, with_training
from launcher.stages.planning import by_stage, plan_launch, run_directory, stage_name
from launcher.stages.workspace import STAGE as WORKSPACE

if TYPE_CHECKING:
    from launcher.images.resolve import ResolvedImage
    from launcher.stages.image import ImageWork


@dataclass(frozen=True, slots=True)
class Request:
    """The launch that the user asked for.

    Attributes
    ----------
    config_dir, template_dir
        The user's own trees, which are searched before ours.
    number, tag
        Those of an earlier launch, to render its script again; ``None`` for the next launch.
    stage
        The only stage to draft, of several in the overrides.
    launch_dir
        The directory of an earlier launch, to render it again from what is stored there.
    work
        The image that the job builds or imports; ``None`` for the stages in the overrides.
    """

    overrides: Sequence[str]
    command: Sequence[str]
    config_dir: Path | None = None
    template_dir: Path | None = None
    number: int | None = None
    tag: str | None = None
    stage: str | None = None
    launch_dir: Path | None = None
    work: ImageWork | None = None


@dataclass(frozen=True)
class Draft:
    """A planned launch, not written anywhere yet.

    Attributes
    ----------
    work
        The image that the job builds or imports, if that is what it does.
    """

    composition: Composition
    plan: Plan
    template_dir: Path | None = None
    work: ImageWork | None = None

    @cached_property
    def rendered(self) -> Rendered:
        """The text of the launch's scripts, rendered when it is first needed.

        Raises
        ------
        UserError
            If a template of the user's is not valid or holds a secret, or a value cannot be quoted.
        """
        try:
            rendered = render(self.plan, self.template_dir)
            if self.template_dir is not None:
                check_texts(rendered.texts(self.plan.paths), f"--template-dir {self.template_dir}")
        except UserError as error:
            self.composition.annotate(error)
            raise
        return rendered

    @property
    def results_key(self) -> str:
        """The configuration key that determines the run's directory."""
        return _results_key(self.composition.config, self.plan.paths.run_dir)

    def directory_key(self, directory: Path) -> str:
        """Return the key of a directory that the job writes to."""
        config = self.composition.config
        if directory.is_relative_to(Path(config.data_dir).absolute()):
            return "data_dir"
        if config.data_preparation is not None:
            for key in ("output_prefix", "work_dir"):
                if directory == Path(getattr(config.data_preparation, key)).absolute().parent:
                    return f"data_preparation.{key}"
            if directory == Path(config.data_preparation.tokenizer_dir).absolute():
                return "data_preparation.tokenizer_dir"
        if config.command is not None and directory in map(Path, config.command.writable):
            return "command.writable"
        if config.conversion is not None and directory == _above_steps(config.conversion.output):
            return "conversion.output"
        if config.evaluation is not None:
            for key in ("results", "converted"):
                path = getattr(config.evaluation, key)
                if path is not None and directory in (Path(path).absolute(), _above_steps(path)):
                    return f"evaluation.{key}"
        return self.results_key

    @property
    def stage_name(self) -> str:
        """The name of the launch among those of one command."""
        return stage_name(self.composition.config) if self.work is None else self.plan.job.stage

    @property
    def stored_config(self) -> RunConfig:
        """The configuration to store with the launch, with the image and interpreter resolved here."""
        config = _with_image(self.composition, self.template_dir)
        job = self.plan.job
        if config.cluster.python is None and job.container is None and config.workspace is None:
            cluster = config.cluster.model_copy(update={"python": job.payload.argv[0]})
            return config.model_copy(update={"cluster": cluster})
        return config

    def numbered(self, number: int, tag: str | None = None) -> Draft:
        """Return the draft of the same launch under another number or tag."""
        tag = tag or self.plan.tag
        if (number, tag) == (self.plan.paths.number, self.plan.tag):
            return self
        return replace(self, plan=_plan(self.composition, number, tag, self.template_dir, self.work))


def draft(request: Request) -> Draft:
    """Draft the next launch of a run.

    Raises
    ------
    UserError
        If the request has a mistake, or is for several stages: see `drafts`.
    """
    (first, *others) = drafts(request)
    if others:
        stages = [draft.stage_name for draft in (first, *others)]
        name, _, phase = stages[-1].partition(".")
        part = f" {name}.phase={phase}" if phase else ""
        hint = f"one stage at a time: stages=[{name}]{part}"
        raise UserError(f"stages=[{','.join(stages)}]: this needs a single stage", key="stages", hint=hint)
    return first


def drafts(request: Request, staged: Sequence[Composition] | None = None) -> list[Draft]:
    """Draft the next launch of each requested stage.

    Parameters
    ----------
    staged
        The compositions of the stages, if they are composed already: see `compose_stages`.

    Raises
    ------
    UserError
        If the request has a mistake.
    """
    if request.launch_dir is not None:
        return [_stored_draft(request.launch_dir, request.number, request.tag)]
    staged = compose_stages(request) if staged is None else staged
    if len(staged) > 1 and (request.number is not None or request.tag is not None):
        names = [stage_name(composition.config) for composition in staged]
        raise UserError(
            f"stages=[{','.join(names)}]: --launch-number and --tag are those of one launch",
            key="stages",
            hint=f"--stage={names[-1]}",
        )
    return [_draft(composition, request) for composition in staged]


def compose_stages(request: Request) -> list[Composition]:
    """Compose the configuration, once for each requested stage, or for the job that makes an image.

    Raises
    ------
    UserError
        If the stages cannot be launched one after the other, or `request.stage` is none of them.
    """
    composition, stage = compose(request.overrides, request.config_dir), request.stage
    if request.work is not None:
        return [composition]
    try:
        composition = _with_workspace_image(composition)
        configs = [with_training(config) for config in by_stage(composition.config)]
        names = [stage_name(config) for config in configs]
        if stage is not None and stage not in names:
            raise UserError(
                f"--stage={stage}: not one of stages=[{','.join(names)}]", hint=did_you_mean(stage, names)
            )
    except UserError as error:
        composition.annotate(error)
        raise
    if len(configs) == 1:
        return [replace(composition, config=configs[0])]
    return [
        replace(
            composition,
            config=config,
            choices=_choices_of(composition, config.stages[0]),
            before=tuple(configs[:position]),
        )
        for position, (config, name) in enumerate(zip(configs, names, strict=True))
        if stage in (None, name)
    ]


def choice_of(composition: Composition, template_dir: Path | None = None) -> ResolvedImage | None:
    """Resolve `container` to an image; return ``None`` on bare metal.

    Raises
    ------
    UserError
        If it is no image, or a recipe that does not exist or has a mistake.
    """
    config = composition.config
    if config.container is None or not config.container.strip():
        return None
    # Imported late: most launches have no container, or one that needs no resolving.
    from launcher.images.resolve import resolve_container

    try:
        return resolve_container(config.container, config.images_dir, composition.config_dir, template_dir)
    except UserError as error:
        composition.annotate(error)
        raise


def _with_workspace_image(composition: Composition) -> Composition:
    """Use the workspace's own image, or the recipe's `dev` flavor."""
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
    """Drop the choices of other stages' groups."""
    return {
        group: choice
        for group, choice in composition.choices.items()
        if group == stage or group not in STAGES
    }


def _draft(composition: Composition, request: Request) -> Draft:
    config, work = composition.config, request.work
    try:
        run_dir = run_directory(config) if work is None else _image_directory(config, work)
        number = request.number or _next_number(config, run_dir)
        if work is None and (stored := _stored(run_dir, request)) is not None:
            return stored
        tag = request.tag or provenance.new_tag()
        plan = _plan(composition, number, tag, request.template_dir, work)
    except UserError as error:
        composition.annotate(error)
        raise
    return Draft(composition, plan, request.template_dir, work)


def _next_number(config: RunConfig, run_dir: Path) -> int:
    try:
        return next_launch_number(run_dir)
    except OSError as error:
        raise explain_os_error(error, run_dir, _results_key(config, run_dir), verb="read") from error


def _image_directory(config: RunConfig, work: ImageWork) -> Path:
    from launcher.stages.image import image_directory  # late: few launches make an image

    return image_directory(config, work)


def _plan(
    composition: Composition,
    number: int,
    tag: str,
    template_dir: Path | None,
    work: ImageWork | None = None,
) -> Plan:
    """Plan one launch; the same arguments give the same plan."""
    check_references(composition.references)
    if work is None:
        config = _with_image(composition, template_dir)
        return plan_launch(config, number=number, tag=tag)
    from launcher.stages.image import image_plan  # late: few launches make an image

    return image_plan(composition.config, work, number=number, tag=tag)


def _with_image(composition: Composition, template_dir: Path | None) -> RunConfig:
    """Return the configuration with `container` as the job reads it."""
    config = composition.config
    # Files, and names as Pyxis takes them, need no resolving.
    if config.container is None or re.match(r"\s*$|[/~.]|[^:/]*#", config.container):
        return config
    choice = choice_of(composition, template_dir)
    assert choice is not None
    return config.model_copy(update={"container": choice.image})


def _stored(run_dir: Path, request: Request) -> Draft | None:
    """Return the stored launch that a request names by its number and tag, if there is one."""
    if request.number is None or request.tag is None:
        return None
    launch_dir = run_dir / LAUNCHES / str(request.number)
    with contextlib.suppress(UserError, OSError):
        if (launch_dir / ROOT_CONFIG).is_file() and read_manifest(launch_dir).tag == request.tag:
            return _stored_draft(launch_dir)
    return None


def _stored_draft(launch_dir: Path, number: int | None = None, tag: str | None = None) -> Draft:
    """Draft a launch again from what is stored with it, whatever the trees say now.

    Raise UserError if there is no such launch, or nothing is stored with it.
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
    template_dir = _require_trusted(templates) if templates.is_dir() else None
    try:
        plan = _plan(composition, number or manifest.launch, tag or manifest.tag, template_dir)
    except UserError as error:
        composition.annotate(error)
        raise
    return Draft(composition, plan, template_dir)


def _require_trusted(templates: Path) -> Path:
    """Refuse templates that somebody else could have written: a template can run any code as the reader."""
    for path in (templates, *templates.rglob("*")):
        if (why := why_untrusted(path)) is not None:
            raise UserError(
                f"{templates}: templates can run commands, and these are not trusted: {why}",
                hint="read them; then copy the run to a directory that only you may write, and render there",
            )
    return templates


def _above_steps(path: str) -> Path:
    return directory_of(Path(path).absolute())


def _results_key(config: RunConfig, run_dir: Path) -> str:
    if run_dir.is_relative_to(config.base_results_dir):
        return "base_results_dir"
    return f"{config.stages[0]}.run.results_dir"
