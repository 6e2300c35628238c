"""Options that the verbs of `slipway image` share, and the images that the user's words mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.options import add_config_dir, add_option, add_tree_options
from launcher.errors import UserError, absolute_path
from launcher.images.store import list_images
from launcher.secrecy import redacted

IMAGE_HELP = "a path, a recipe such as nemo:dev, or a name that `slipway image list` shows"
DOCKERFILES = "Dockerfiles"  # the templates of recipes
OVERRIDES_HELP = "KEY=VALUE, such as images_dir=/shared/images or image.tag=2"


def add_store(parser: argparse.ArgumentParser, *, recipes: bool = False) -> None:
    """Add the directory of the images, and the user's own tree, which may name another one.

    With `recipes` add the user's own Dockerfiles too, which decide the file name of a recipe.
    """
    text = "the store (default: images_dir of the configuration)"
    add_option(parser, "--images-dir DIR", text, type=absolute_path)
    if recipes:
        add_tree_options(parser, DOCKERFILES)
    else:
        add_config_dir(parser)


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the options of a connection to a registry."""
    text = "logins, as `skopeo login --authfile` writes them"
    add_option(parser, "--authfile FILE", text, type=absolute_path)
    add_option(parser, "--plain-http", "the registry has no TLS")


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the recipe, ``image.KEY=VALUE``, and the others."""
    own = [word for word in overrides if word.lstrip("+~").startswith("image.")]
    return own, [word for word in overrides if word not in own]


def find_store(args: argparse.Namespace, overrides: Sequence[str] = ()) -> Path:
    """Return the store that the options and the configuration name; raise UserError if one has a mistake."""
    stray = [word for word in overrides if "=" not in word]
    if stray:
        raise UserError(f"{redacted(stray[0])}: not an override", hint="an override is KEY=VALUE")
    if args.images_dir is not None:
        return Path(args.images_dir)
    # Imported late: composing takes longer than looking at a file.
    from launcher.config.compose import compose

    return Path(compose(list(overrides), args.config_dirs).config.images_dir)


def find_images(args: argparse.Namespace) -> list[Path]:
    """Return the files that the words mean; without words all of the store."""
    from launcher.images.resolve import locate

    # A path needs no store, and so no configuration.
    words = args.overrides
    if words and all(Path(word).is_file() for word in words):
        return [Path(word).absolute() for word in words]
    overrides = [word for word in words if "=" in word]
    names = [word for word in words if word not in overrides]
    store = find_store(args, overrides)
    if not names:
        return [entry.path for entry in list_images(store)]
    return [locate(name, store, args.config_dirs, args.template_dir) for name in names]
