"""Images that users name: the file that `container` or a word means, and its known contents."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.overrides import recipe_and_flavor
from launcher.errors import UserError, absolute_path, escape, file_mode, literal, nearest, nearest_files
from launcher.images.references import SQUASHFS_SUFFIXES, Kind, Reference, contents_of_reference
from launcher.images.store import Sidecar, list_images, read_sidecar
from launcher.releases import Contents, add_installed, contents_by_file_name

if TYPE_CHECKING:
    from launcher.images.recipes import Recipe

KEY = "container"
FLAVORS = ("run", "dev")
BASE_NAME = "org.opencontainers.image.base.name"
_CORE = re.compile(r"megatron[-_]core==(\S+)")


@dataclass(frozen=True, slots=True)
class RecipeImage:
    """The image that a recipe is built into: a file in `images_dir`, named by the recipe's hash.

    The recipe is read when one of these facts is first needed; a mistake in it raises UserError then.
    """

    text: str
    images_dir: str
    name: str
    flavor: str | None
    config_dirs: tuple[Path, ...]
    template_dir: Path | None

    @property
    def recipe(self) -> Recipe:
        return read_cached_recipe(self.name, self.flavor, self.config_dirs, self.template_dir)

    @property
    def image(self) -> str:
        return str(self.stored)

    @property
    def stored(self) -> Path:
        return Path(self.images_dir, self.recipe.file_name)

    @property
    def command(self) -> tuple[str, ...]:
        """The words of `slipway` that build the file, wherever they are run."""
        trees = [("--config-dir", tree) for tree in self.config_dirs]
        trees += [("--template-dir", self.template_dir)] if self.template_dir is not None else []
        options = (f"{option}={tree.absolute()}" for option, tree in trees)
        return ("image", "build", self.text, f"--images-dir={self.stored.parent}", *options)

    @property
    def contents(self) -> Contents:
        return contents_of_recipe(self.recipe)


@dataclass(frozen=True, slots=True)
class ReferenceImage:
    """An image that is there already: of a registry, of an engine's storage, or a file."""

    text: str
    source: Reference
    # The job's value: an absolute path, or the name of a registry's image as Pyxis takes it.
    image: str
    # The file in `images_dir` that it is imported into; ``None`` if `container` is the path of a file.
    stored: Path | None = None
    # The words of `slipway` that import it, wherever they are run; empty if `container` is a file.
    command: tuple[str, ...] = ()

    @property
    def contents(self) -> Contents | None:
        return contents_of_reference(self.source)


ResolvedImage = RecipeImage | ReferenceImage


def resolve_container(
    text: str, images_dir: str, config_dirs: tuple[Path, ...] = (), template_dir: Path | None = None
) -> ResolvedImage:
    """Return the image that a `container` means; no file is read yet."""
    named = recipe_and_flavor(text)
    if named is not None:
        return RecipeImage(text, images_dir, *named, config_dirs, template_dir)
    source = Reference.parse(text, KEY)
    if source.kind is Kind.SQUASHFS:
        return ReferenceImage(text, source, text)
    if source.kind in (Kind.OCI_DIRECTORY, Kind.OCI_ARCHIVE, Kind.DOCKER_ARCHIVE):
        source = replace(source, name=str(source.path))  # a job starts in another directory
    file = Path(images_dir, source.file_name)
    # An image that nodes cannot fetch by themselves is imported here.
    command = ("image", "import", str(source), f"--output={file}")
    return ReferenceImage(text, source, source.for_pyxis or str(file), file, command)


@cache
def read_cached_recipe(
    name: str, flavor: str | None, config_dirs: tuple[Path, ...], template_dir: Path | None
) -> Recipe:
    """Read a recipe, once for all facts of its image and all points of a sweep."""
    # Imported late: Hydra composes it, and most containers are files.
    from launcher.images.recipes import read_recipe, recipe_names

    known, tagged = recipe_names(config_dirs), f"{name}:{flavor}" if flavor else name
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
    return read_recipe(name, flavor, (), config_dirs, template_dir)


def read_recorded_digest(image: str | None) -> str | None:
    """Return the digest in the record of an image file, if it is the record of this file."""
    if image is None or not image.startswith("/"):
        return None
    record = read_sidecar(Path(image), exact=True)
    return None if record is None else record.pushed or record.digest or f"sha256:{record.sha256}"


def locate(
    text: str, store: Path, config_dirs: tuple[Path, ...] = (), template_dir: Path | None = None
) -> Path:
    """Return the squashfs of a path, of a name in the store, of a recipe or image; or raise UserError."""
    if "/" in text or Path(text).is_file():
        # A registry's image has slashes too.
        path = absolute_path(text)
        mode = file_mode(path)
        if stat.S_ISREG(mode):
            return path
        if mode or text.endswith(SQUASHFS_SUFFIXES):
            raise UserError(f"{escape(text)}: no such file", hint=nearest_files(path, SQUASHFS_SUFFIXES))
    for suffix in ("", *SQUASHFS_SUFFIXES):
        path = store / f"{text}{suffix}"
        if path.is_file() and path.name.endswith(SQUASHFS_SUFFIXES):
            return path
    # Imported late: most images are named by their files.
    from launcher.images.recipes import recipe_names

    named, recipes = recipe_and_flavor(text), recipe_names(config_dirs)
    if named is not None and named[0] in recipes:
        return _locate_recipe(store, read_cached_recipe(*named, config_dirs, template_dir))
    if text.endswith(SQUASHFS_SUFFIXES) or (named is not None and ":" not in text):
        files = [entry.path.name for entry in list_images(store)]
        known = [*files, *recipes]
        near = nearest(text, known) or nearest(text, [Path(name).stem for name in files])
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
        raise UserError(f"image={literal(text)}: there is no such image and no such recipe", hint=hint)
    reference = Reference.parse(text, "image")
    path = store / reference.file_name
    if path.is_file():
        return path
    raise UserError(f"{path.name} is not in {escape(str(store))}", hint=f"slipway image import {reference}")


def _locate_recipe(store: Path, recipe: Recipe) -> Path:
    path = store / recipe.file_name
    if path.is_file():
        return path
    prefix = f"{recipe.name}-{recipe.flavor}-"
    older = [entry.path.name for entry in list_images(store) if entry.path.name.startswith(prefix)]
    changed = f", but of the recipe as it was before: {', '.join(older)}" if older else ""
    raise UserError(
        f"{recipe.file_name} is not in {escape(str(store))}{changed}",
        hint=f"slipway image build {recipe.name}:{recipe.flavor}",
    )


def contents_of_recipe(recipe: Recipe) -> Contents:
    """Return the contents of a recipe's image: its base's, and the packages that it adds."""
    contents = contents_of_reference(recipe.base) or Contents(f"the recipe {recipe.name}")
    cores = [match[1] for line in recipe.config.python_packages if (match := _CORE.fullmatch(line))]
    # Templates install it by itself, after all else.
    core = recipe.config.versions.get("megatron_core") or (cores[-1] if cores else None)
    return contents._replace(megatron_core=core) if core else contents


def contents_of_file(path: Path) -> Contents | None:
    """Return the contents of a squashfs by its record, or else by its file's name."""
    record = read_sidecar(path, exact=True)
    contents = (_contents_of_record(record) if record else None) or contents_by_file_name(path.name)
    if record is None or record.installed is None:
        return contents
    return add_installed(contents or Contents(path.name), record.installed)


def _contents_of_record(record: Sidecar) -> Contents | None:
    # The base of a recipe says more than the name of the built image.
    for name in (record.config.labels.get(BASE_NAME), record.source):
        try:
            contents = contents_of_reference(Reference.parse(name)) if name else None
        except UserError:
            continue
        if contents is not None:
            return contents
    return None
