"""What the key `container` stands for: a file, an image of a registry, or what a recipe becomes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UserError
from launcher.images.references import Kind, Reference, recipe_and_flavor

if TYPE_CHECKING:
    from launcher.images.recipes import Recipe

KEY = "container"
FLAVORS = ("run", "dev")


@dataclass(frozen=True, slots=True)
class Choice:
    """An image as the user chose it.

    Attributes
    ----------
    text
        What `container` says.
    image
        What the job is told: a whole path, or the name of a registry's image as Pyxis takes it.
    stored
        Its file in `images_dir`; ``None`` where `container` is the path of a file.
    source
        What that file is imported from; ``None`` where a recipe is built, or `container` is a file.
    recipe, flavor
        Those of the recipe, where it is one.
    """

    text: str
    image: str
    stored: Path | None = None
    source: Reference | None = None
    recipe: str | None = None
    flavor: str | None = None

    def command(self, config_dir: Path | None = None, template_dir: Path | None = None) -> tuple[str, ...]:
        """What `slipway` makes the file with, wherever it is run; empty where it makes none.

        Parameters
        ----------
        config_dir, template_dir
            The trees that the recipe was found in.
        """
        if self.stored is None:
            return ()
        if self.recipe is None:
            return ("image", "import", str(self.source), f"--output={self.stored}")
        trees = {"--config-dir": config_dir, "--template-dir": template_dir}
        given = (f"{option}={tree.absolute()}" for option, tree in trees.items() if tree is not None)
        return ("image", "build", self.text, f"--images-dir={self.stored.parent}", *given)


def choose(
    text: str, images_dir: str, config_dir: Path | None = None, template_dir: Path | None = None
) -> Choice:
    """Find out what a `container` stands for; nothing is read but the files of a recipe.

    Parameters
    ----------
    text
        The value of `container`.
    images_dir
        Where images are that were built or imported.
    config_dir, template_dir
        Trees of the user's own, looked at before ours.

    Raises
    ------
    UserError
        If it is no image, or there is no such recipe.
    """
    named = recipe_and_flavor(text)
    if named is not None:
        made = recipe_of(*named, config_dir, template_dir)
        file = Path(images_dir, made.file_name)
        return Choice(text, str(file), file, recipe=made.name, flavor=made.flavor)
    source = Reference.parse(text, KEY)
    if source.kind is Kind.SQUASHFS:
        return Choice(text, text)
    if source.kind in (Kind.OCI_DIRECTORY, Kind.OCI_ARCHIVE, Kind.DOCKER_ARCHIVE):
        source = replace(source, name=str(source.path))  # a job starts elsewhere than the user stands
    file = Path(images_dir, source.file_name)
    # What the nodes cannot fetch by themselves is imported here.
    return Choice(text, source.for_pyxis or str(file), file, source)


@cache
def recipe_of(name: str, flavor: str | None, config_dir: Path | None, template_dir: Path | None) -> Recipe:
    """Read a recipe, once for all points of a sweep.

    Raises
    ------
    UserError
        If there is none of this name; it may be an image of Docker Hub's that was meant.
    """
    # Imported late: Hydra composes it, and most containers are files.
    from launcher.images.recipes import recipe, recipe_names

    known, tagged = recipe_names(config_dir), f"{name}:{flavor}" if flavor else name
    if flavor is not None and name in known and flavor not in FLAVORS:
        hint = f"valid: {', '.join(FLAVORS)}"
        raise UserError(f"{KEY}={tagged}: a recipe has no such flavor", key=KEY, hint=hint)
    if name not in known:
        raise UserError(
            f"{KEY}={tagged}: there is no such recipe",
            key=KEY,
            hint=f"valid: {', '.join(known)}; or the path of a .sqsh file, or an image of a registry: Docker"
            f" Hub's would be docker.io/library/{tagged}",
        )
    return recipe(name, flavor, (), config_dir, template_dir)


def digest_of(image: str | None) -> str | None:
    """The digest of an image that is a file, as the record beside it tells, if that is of this file."""
    if image is None or not image.startswith("/"):
        return None
    # Imported late: few launches have an image that is a file.
    from launcher.images.store import read_exact_sidecar

    found = read_exact_sidecar(Path(image))
    return None if found is None else found.pushed or found.digest or f"sha256:{found.sha256}"
