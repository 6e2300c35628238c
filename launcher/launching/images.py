"""What a launch needs made beforehand: the file of its image."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.compose import Composition
from launcher.config.overrides import hydra_value
from launcher.drafting import Request, choice_of
from launcher.errors import UserError
from launcher.images.choice import KEY, Choice, recipe_of
from launcher.images.superblock import is_squashfs
from launcher.stages.image import ImageWork

if TYPE_CHECKING:
    from launcher.images.importing import Imported
    from launcher.images.progress import Progress

_WORKSPACE = "workspace"
_PLAIN_HTTP = "ENROOT_ALLOW_HTTP"


@dataclass(frozen=True, slots=True)
class Needed:
    """The file of an image that a launch is to run in, there or not.

    Attributes
    ----------
    request
        The launch's, with the file for its container.
    """

    choice: Choice
    file: Path
    request: Request

    @property
    def is_there(self) -> bool:
        """Whether it is, and whole as far as its first bytes tell; a torn one is made anew."""
        return is_squashfs(self.file)

    @property
    def work(self) -> ImageWork:
        """What a job makes it with."""
        words = self.command
        if self.choice.recipe is not None:
            words = (*words, f"--expect={self.file.name}")  # the recipe may change while the job waits
        return ImageWork(self.file.stem, words, self.file)

    @property
    def command(self) -> tuple[str, ...]:
        """What `slipway` makes it with."""
        words = self.choice.command(self.request.config_dir, self.request.template_dir)
        return (*words, "--plain-http") if words and _allows_plain_http() else words


def needed_image(composition: Composition, request: Request) -> Needed | None:
    """What `launch --build` is to make; ``None`` where its container is a file already.

    Raises
    ------
    UserError
        If it runs in no container.
    """
    if composition.config.cluster.scheduler == "local":
        raise UserError(
            "--build: cluster.scheduler=local runs without containers",
            key="cluster.scheduler",
            hint="without --build; or slipway image build|import, which needs no cluster",
        )
    choice = choice_of(composition, request.template_dir)
    if choice is None:
        raise UserError(
            f"--build: {KEY}=null: there is no image to build",
            key=KEY,
            hint=f"{KEY}=nemo, or another recipe; or an image of a registry",
        )
    if choice.stored is None:
        return None
    if choice.image == str(choice.stored):
        return Needed(choice, choice.stored, request)
    # The nodes would fetch it by themselves.
    workspace = composition.config.workspace
    key = f"{_WORKSPACE}.{KEY}" if workspace is not None and workspace.container is not None else KEY
    override = f"{key}={hydra_value(str(choice.stored))}"
    return Needed(choice, choice.stored, replace(request, overrides=(*request.overrides, override)))


def make_here(needed: Needed, progress: Progress) -> Imported:
    """Build or import the image on this machine; whoever else does so just now is waited for.

    Raises
    ------
    UserError
        With what to do next; nothing is left behind.
    """
    try:
        return _made_here(needed, progress)
    except UserError as error:
        raise UserError(error.message, key=error.key, also=error.also, hint=_of_launch(error.hint)) from error


def _of_launch(hint: str | None) -> str | None:
    """Advice in words that `slipway launch` takes: it has no options of an import."""
    if hint is None:
        return None
    hint = hint.replace("--plain-http", f"{_PLAIN_HTTP}=yes slipway launch ... --build")
    return hint.replace("--temp-dir DIR", "TMPDIR=DIR slipway launch ... --build")


def _made_here(needed: Needed, progress: Progress) -> Imported:
    from launcher.images.importing import ImportOptions, import_image

    choice, request, options = needed.choice, needed.request, ImportOptions(plain_http=_allows_plain_http())
    if choice.recipe is not None:
        from launcher.images.building import build_into_store
        from launcher.images.store import Store

        recipe = recipe_of(choice.recipe, choice.flavor, request.config_dir, request.template_dir)
        for warning in recipe.warnings:
            progress.note(warning)
        return build_into_store(
            recipe, Store(needed.file.parent), options, progress, config_dir=request.config_dir
        )
    assert choice.source is not None
    return import_image(choice.source, needed.file, options, progress)


def _allows_plain_http() -> bool:
    """Whether the user lets Enroot speak to registries without TLS, as the nodes' Enroot may."""
    return os.environ.get(_PLAIN_HTTP, "").lower() in ("y", "yes", "1", "true", "on")


def refuse_a_job(composition: Composition) -> None:
    """Refuse `--build=job` where nothing could wait for a job.

    Raises
    ------
    UserError
        Also for what is no job itself.
    """
    stage, scheduler = composition.config.stages[0], composition.config.cluster.scheduler
    if scheduler != "slurm" or stage == _WORKSPACE:
        what = f"stages=[{stage}]" if scheduler == "slurm" else f"cluster.scheduler={scheduler}"
        raise UserError(f"--build=job: with {what} nothing waits in a queue", hint="--build=host")
