"""`launch --build`: the image is made first, on this machine or by a job that the launch waits for."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.compose import Composition
from launcher.config.overrides import WORKSPACE, hydra_value
from launcher.drafting import Draft, Request, draft, drafts, resolve_choice
from launcher.errors import UserError, setting_error
from launcher.images.resolve import KEY, RecipeImage, ReferenceImage, ResolvedImage
from launcher.images.squashfs import is_squashfs
from launcher.stages.image import STAGE, ImageWork

if TYPE_CHECKING:
    from launcher.images.importing import Imported
    from launcher.images.progress import ImageProgress

_PLAIN_HTTP = "ENROOT_ALLOW_HTTP"
# The check that the image exists is skipped while it is about to be made.
_CHECK = "path.image"


@dataclass(frozen=True, slots=True)
class ImageRequirement:
    """The image file that a launch runs in; `request` is the launch's, with the file for its container."""

    choice: ResolvedImage
    file: Path
    request: Request

    @property
    def work(self) -> ImageWork:
        """The work of a job that makes the file."""
        words = self.command
        if isinstance(self.choice, RecipeImage):
            words = (*words, f"--expect={self.file.name}")  # the recipe may change while the job waits
        return ImageWork(self.file.stem, words, self.file)

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments with which `slipway` makes the file."""
        words = self.choice.command
        return (*words, "--plain-http") if words and _allows_plain_http() else words


@dataclass(frozen=True, slots=True)
class Building:
    """A launch with an image to make first.

    `drafts` are the launch, after the job that makes the image if there is one; `skipped` are the checks that
    wait for the image; `needed` is the image to make on this machine first, if any.
    """

    drafts: list[Draft]
    request: Request
    skipped: tuple[str, ...] = ()
    needed: ImageRequirement | None = None


def draft_with_image(request: Request, *, as_job: bool) -> Building:
    """Draft a launch and the job that makes its image, if there is one to make; nothing is written."""
    of_image = request.stage == STAGE  # of two jobs the one that is rendered again
    launch = replace(request, stage=None, number=None, tag=None) if of_image else request
    staged = launch.compositions()
    if as_job:
        _refuse_job(staged[0])
    needed = required_image(staged[0], launch)
    if needed is None:
        return Building(drafts(launch, staged), request)
    # Drafted with the file itself: a plan may refuse other values of `container`.
    drafted = drafts(launch, staged) if needed.request is launch else drafts(needed.request)
    if of_image:
        return Building([draft(replace(request, work=needed.work))], request)
    if is_squashfs(needed.file):  # a torn one is made again
        return Building(drafted, needed.request)
    if not as_job:
        return Building(drafted, needed.request, (_CHECK,), needed)
    if request.stage is None:
        if request.number is not None or request.tag is not None:
            stages = ",".join([STAGE, *(draft.plan.job.stage for draft in drafted)])
            text = f"stages=[{stages}]: --launch-number and --tag are those of one launch"
            raise setting_error(text, "--stage=...")
        drafted = [draft(replace(needed.request, work=needed.work)), *drafted]
    return Building(drafted, needed.request, (_CHECK,))


def required_image(composition: Composition, request: Request) -> ImageRequirement | None:
    """Return the image for `launch --build` to make; ``None`` if the container is a file already."""
    if composition.config.cluster.scheduler == "local":
        raise UserError(
            "--build: cluster.scheduler=local runs without containers",
            key="cluster.scheduler",
            hint="without --build; or slipway image build|import, which needs no cluster",
        )
    choice = resolve_choice(composition, request.template_dir)
    if choice is None:
        raise UserError(
            f"--build: {KEY}=null: there is no image to build",
            key=KEY,
            hint=f"{KEY}=nemo, or another recipe; or an image of a registry",
        )
    with composition.annotated():
        file = choice.stored  # a recipe is read here
    if file is None:
        return None
    if choice.image == str(file):
        return ImageRequirement(choice, file, request)
    # The nodes would fetch it by themselves.
    workspace = composition.config.workspace
    key = f"{WORKSPACE}.{KEY}" if workspace is not None and workspace.container is not None else KEY
    override = f"{key}={hydra_value(str(file))}"
    return ImageRequirement(choice, file, replace(request, overrides=(*request.overrides, override)))


def _refuse_job(composition: Composition) -> None:
    """Refuse `--build=job` where nothing could wait for a job."""
    stage, scheduler = composition.config.stages[0], composition.config.cluster.scheduler
    if scheduler != "slurm" or stage == WORKSPACE:
        what = f"stages=[{stage}]" if scheduler == "slurm" else f"cluster.scheduler={scheduler}"
        raise UserError(f"--build=job: with {what} nothing waits in a queue", hint="--build=host")


def make_here(needed: ImageRequirement, progress: ImageProgress) -> Imported:
    """Build or import the image on this machine, after anyone else who is making the same one."""
    from launcher.images.building import build_into_store
    from launcher.images.importing import ImportOptions, import_image

    choice, file, options = needed.choice, needed.file, ImportOptions(plain_http=_allows_plain_http())
    try:
        if isinstance(choice, ReferenceImage):
            return import_image(choice.source, file, options, progress)
        for warning in choice.recipe.warnings:
            progress.note(warning)
        return build_into_store(choice.recipe, file.parent, options, progress, config_dirs=choice.config_dirs)
    except UserError as error:
        # `slipway launch` has no options of an import.
        hint = (error.hint or "").replace("--plain-http", f"{_PLAIN_HTTP}=yes slipway launch ... --build")
        hint = hint.replace("--temp-dir DIR", "TMPDIR=DIR slipway launch ... --build")
        raise UserError(error.message, key=error.key, also=error.also, hint=hint or None) from error


def _allows_plain_http() -> bool:
    """Return True if the user lets Enroot speak to registries without TLS, as the nodes' Enroot may."""
    return os.environ.get(_PLAIN_HTTP, "").lower() in ("y", "yes", "1", "true", "on")
