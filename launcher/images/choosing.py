"""Which file of the store the user's words mean."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UserError, file_mode, nearest, nearest_files, one_line, shown
from launcher.images.choice import recipe_of
from launcher.images.references import SQUASHFS_SUFFIXES, Reference, recipe_and_flavor, whole_path
from launcher.images.store import Store

if TYPE_CHECKING:
    from launcher.images.recipes import Recipe


def locate(text: str, store: Store, config_dir: Path | None = None, template_dir: Path | None = None) -> Path:
    """The squashfs of a path, of a name in the store, of a recipe or of an image of a registry.

    Raises
    ------
    UserError
        If there is none; with what there is, or what makes it.
    """
    if "/" in text or Path(text).is_file():
        # An image of a registry has slashes too.
        path = whole_path(text)
        if file_mode(path) or text.endswith(SQUASHFS_SUFFIXES):
            return _there(path, text)
    for suffix in ("", *SQUASHFS_SUFFIXES):
        path = store.path(f"{text}{suffix}")
        if path.is_file() and path.name.endswith(SQUASHFS_SUFFIXES):
            return path
    found = recipe_and_flavor(text)
    if found is not None and found[0] in _recipes(config_dir):
        return _of_recipe(store, recipe_of(*found, config_dir, template_dir))
    if text.endswith(SQUASHFS_SUFFIXES) or (found is not None and ":" not in text):
        raise _unknown(text, store, config_dir)
    return _of_reference(Reference.parse(text, "image"), store)


def _there(path: Path, text: str) -> Path:
    if not stat.S_ISREG(file_mode(path)):
        raise UserError(f"{one_line(text)}: no such file", hint=nearest_files(path, SQUASHFS_SUFFIXES))
    return path


def _recipes(config_dir: Path | None) -> list[str]:
    # Imported late: most images are named by their files.
    from launcher.config.image import recipe_names

    return recipe_names(config_dir)


def _of_recipe(store: Store, wanted: Recipe) -> Path:
    path = store.path(wanted.file_name)
    if path.is_file():
        return path
    prefix = f"{wanted.name}-{wanted.flavor}-"
    before = [entry.path.name for entry in store.entries() if entry.path.name.startswith(prefix)]
    changed = f", but of the recipe as it was before: {', '.join(before)}" if before else ""
    raise UserError(
        f"{wanted.file_name} is not in {one_line(str(store.directory))}{changed}",
        hint=f"slipway image build {wanted.name}:{wanted.flavor}",
    )


def _of_reference(reference: Reference, store: Store) -> Path:
    path = store.path(reference.file_name)
    if not path.is_file():
        raise UserError(
            f"{path.name} is not in {one_line(str(path.parent))}", hint=f"slipway image import {reference}"
        )
    return path


def _unknown(text: str, store: Store, config_dir: Path | None) -> UserError:
    files = [entry.path.name for entry in store.entries()]
    known = [*files, *_recipes(config_dir)]
    near = nearest(text, known) or nearest(text, [Path(name).stem for name in files])
    listed = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
    return UserError(f"image={shown(text)}: there is no such image and no such recipe", hint=listed)
