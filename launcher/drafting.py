"""Overrides to planned launches: compose, plan, render. Nothing is written or submitted.

Every command plans this way; `launcher.launching` makes a job of a draft.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.compose import Composition, compose
from launcher.config.overrides import STAGES, parse_override
from launcher.config.schema import RunConfig
from launcher.config.secrets import check_references, check_texts
from launcher.errors import UserError, did_you_mean, explain_os_error, setting_error
from launcher.plan import Plan
from launcher.rendering.render import render
from launcher.runs import provenance
from launcher.runs.paths import LAUNCHES, ROOT_CONFIG, TEMPLATES, next_launch_number
from launcher.runs.trust import why_untrusted
from launcher.stages.health import GATED_STAGES
from launcher.stages.planning import plan_launch, prepare_launch, split_by_stage, stage_name

if TYPE_CHECKING:
    from launcher.images.resolve import ResolvedImage
    from launcher.stages.image import ImageWork


@dataclass(frozen=True, slots=True)
class Request:
    """The requested launch.

    `config_dirs` (the first one wins) and `template_dir` are the user's own trees, before ours. To render the
    script of an earlier launch again, `number` and `tag` are its own. `stage` is the only stage to draft, of
    several in the overrides; `work` is an image to make instead. With a `launch_dir` the draft is that of the
    configuration stored there, with its `choices`, and not of today's trees.
    """

    overrides: Sequence[str]
    command: Sequence[str]
    config_dirs: tuple[Path, ...] = ()
    template_dir: Path | None = None
    number: int | None = None
    tag: str | None = None
    stage: str | None = None
    launch_dir: Path | None = None
    work: ImageWork | None = None
    choices: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_launch(
        cls, launch_dir: Path, command: Sequence[str] = (), number: int | None = None, tag: str | None = None
    ) -> Request:
        """Read the record of a launch; raise UserError if it is missing, or its templates are not trusted."""
        from launcher.runs.manifest import read_manifest

        launch_dir = launch_dir.absolute()
        manifest, templates = read_manifest(launch_dir), launch_dir / TEMPLATES
        return cls(
            manifest.overrides,
            command,
            template_dir=_require_trusted(templates) if templates.is_dir() else None,
            number=number or manifest.launch,
            tag=tag or manifest.tag,
            launch_dir=launch_dir,
            choices=manifest.choices,
        )

    def compositions(self) -> list[Composition]:
        """Compose the configuration, once for each requested stage, or for the job that makes an image.

        Raise UserError if the stages cannot be launched one after the other, `stage` is another one, or no
        configuration is stored in `launch_dir`.
        """
        if self.launch_dir is not None:
            from launcher.config.stored import read_stored
            from launcher.runs.manifest import read_stored_text

            stored = self.launch_dir / ROOT_CONFIG
            try:
                text = read_stored_text(stored)
            except OSError as error:
                raise UserError(
                    f"{stored}: {(error.strerror or str(error)).lower()}: this launch was stored without it",
                    hint="without --launch-dir the launch is composed again, from the trees as they are now",
                ) from error
            config = read_stored(text, str(stored), why_untrusted(stored))
            return [Composition(config, dict(self.choices), tuple(self.overrides))]
        composition, stage = compose(self.overrides, self.config_dirs), self.stage
        with composition.annotated():
            check_references(composition.references)
            if self.work is not None:
                return [composition]
            configs = split_by_stage(composition.config)
            names = [stage_name(config) for config in configs]
            if stage is not None and stage not in names:
                raise UserError(
                    f"--stage={stage}: not one of stages=[{','.join(names)}]", hint=did_you_mean(stage, names)
                )
            _check_resilience(composition, names)
        if len(configs) == 1:
            return [replace(composition, config=configs[0])]
        return [
            replace(
                composition,
                config=config,
                # Without the choices of other stages' groups.
                choices={
                    group: choice
                    for group, choice in composition.choices.items()
                    if group in config.stages or group not in STAGES
                },
                before=tuple(configs[:position]),
            )
            for position, (config, name) in enumerate(zip(configs, names, strict=True))
            if stage in (None, name)
        ]


@dataclass(frozen=True)
class Draft:
    """A planned launch, not written yet; `work` is the image that its job makes, if any.

    `config` is the one that is planned: the composition's, with `container` as the job reads it.
    `results_key` is its key that determines the run's directory.
    """

    composition: Composition
    plan: Plan
    config: RunConfig
    results_key: str
    template_dir: Path | None = None
    work: ImageWork | None = None

    @cached_property
    def texts(self) -> dict[Path, str]:
        """The texts of the launch's files, rendered when they are first needed.

        Raise UserError if a user's template is not valid or holds a secret, or a value cannot be quoted.
        """
        with self.composition.annotated():
            texts = render(self.plan, self.template_dir)
            if self.template_dir is not None:
                check_texts(texts, f"--template-dir {self.template_dir}")
        return texts

    @property
    def script(self) -> str:
        return self.texts[self.plan.paths.script]

    @cached_property
    def image(self) -> ResolvedImage | None:
        """The image of `container`; ``None`` on bare metal."""
        return resolve_choice(self.composition, self.template_dir)

    def directory_key(self, directory: Path) -> str:
        """Return the key of a directory that the job writes to."""
        if directory.is_relative_to(Path(self.composition.config.data_dir).absolute()):
            return "data_dir"
        return self.plan.job.directories.get(directory) or self.results_key

    @property
    def stage_name(self) -> str:
        """The name of the launch among those of one command."""
        return stage_name(self.composition.config) if self.work is None else self.plan.job.stage

    @property
    def stored_config(self) -> RunConfig:
        """The configuration to store with the launch, with the image and interpreter resolved here."""
        config, job = self.config, self.plan.job
        if config.cluster.python is None and job.container is None and config.workspace is None:
            cluster = config.cluster.model_copy(update={"python": job.payload.argv[0]})
            return config.model_copy(update={"cluster": cluster})
        return config

    def numbered(self, number: int, tag: str | None = None) -> Draft:
        """Return the draft of the same launch under another number or tag."""
        tag = tag or self.plan.tag
        if (number, tag) == (self.plan.paths.number, self.plan.tag):
            return self
        with self.composition.annotated():
            return replace(self, plan=plan_launch(self.config, number=number, tag=tag, work=self.work))


def _check_resilience(composition: Composition, names: Sequence[str]) -> None:
    """Refuse settings of a chain of trainings in a command that launches none."""
    settings = composition.config.resilience
    asks = {"links": settings.links > 1, "nodes": settings.nodes, "save_before_end": settings.save_before_end}
    asks[""] = any(asks.values())
    gated = {"health": settings.health != "off", "spares": settings.spares, "restarts": settings.restarts}
    stages = " or a ".join(GATED_STAGES)
    for override in map(parse_override, composition.overrides):
        node, _, name = override.key.partition(".")
        why = ""
        if asks.get(name) and "training" not in names:
            why = "only a training is a chain of jobs, and saves before its end"
        if gated.get(name) and not set(names) & set(GATED_STAGES):
            why = f"only jobs of a {stages} ask nodes for their health, and start their tasks again"
        if node == "resilience" and why:
            message, hint = f"{override.text}: {why}", f"stages=[{','.join(names)}] without it"
            raise UserError(message, key=override.key, hint=hint)


def draft(request: Request) -> Draft:
    """Draft the next launch of a run; raise UserError for a mistake, or if the request is for several."""
    (first, *others) = drafts(request)
    if others:
        stages = [draft.stage_name for draft in (first, *others)]
        name, _, phase = stages[-1].partition(".")
        part = f" {name}.phase={phase}" if phase else ""
        hint = f"one stage at a time: stages=[{name}]{part}"
        raise setting_error(f"stages=[{','.join(stages)}]: this needs a single stage", hint)
    return first


def drafts(request: Request, staged: Sequence[Composition] | None = None) -> list[Draft]:
    """Draft the next launch of each requested stage; raise UserError if the request has a mistake.

    `staged` are the compositions of the stages, if they are composed already.
    """
    staged = request.compositions() if staged is None else staged
    if len(staged) > 1 and (request.number is not None or request.tag is not None):
        names = [stage_name(composition.config) for composition in staged]
        text = f"stages=[{','.join(names)}]: --launch-number and --tag are those of one launch"
        raise setting_error(text, f"--stage={names[-1]}")
    return [_draft(composition, request) for composition in staged]


def resolve_choice(composition: Composition, template_dir: Path | None = None) -> ResolvedImage | None:
    """Resolve `container` to an image; return ``None`` on bare metal.

    Raise UserError if it is no name of an image; a recipe's own mistakes are raised when it is read.
    """
    config = composition.config
    if config.container is None or not config.container.strip():
        return None
    # Imported late: most launches have no container, or one that needs no resolving.
    from launcher.images.resolve import resolve_container

    with composition.annotated():
        return resolve_container(config.container, config.images_dir, composition.config_dirs, template_dir)


def _draft(composition: Composition, request: Request) -> Draft:
    config = composition.config
    number, tag, work = request.number, request.tag, request.work
    with composition.annotated():
        run = prepare_launch(config, work)
        run_dir = run.paths.run_dir
        if number is not None and tag is not None and (work, request.launch_dir) == (None, None):
            from launcher.runs.manifest import read_manifest

            launch_dir = run_dir / LAUNCHES / str(number)
            with contextlib.suppress(UserError, OSError):
                if (launch_dir / ROOT_CONFIG).is_file() and read_manifest(launch_dir).tag == tag:
                    return draft(Request.from_launch(launch_dir))
        try:
            number = number or next_launch_number(run_dir)
        except OSError as error:
            raise explain_os_error(error, run_dir, run.results_key, verb="read") from error
        # Files, and names as Pyxis takes them, need no resolving; a job that makes an image has no container.
        if work is None and not re.match(r"\s*$|[/~.]|[^:/]*#", config.container or ""):
            choice = resolve_choice(composition, request.template_dir)
            assert choice is not None
            config = config.model_copy(update={"container": choice.image})
        plan = plan_launch(config, number=number, tag=tag or provenance.new_tag(), work=work)
    return Draft(composition, plan, config, run.results_key, request.template_dir, work)


def _require_trusted(templates: Path) -> Path:
    """Refuse templates that somebody else could have written: a template can run any code as the reader."""
    for path in (templates, *templates.rglob("*")):
        if (why := why_untrusted(path)) is not None:
            raise UserError(
                f"{templates}: templates can run commands, and these are not trusted: {why}",
                hint="read them; then copy the run to a directory that only you may write, and render there",
            )
    return templates
