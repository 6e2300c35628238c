"""What the verbs of `slipway image` share: options, and which images the user's words mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from launcher.errors import UserError
from launcher.images.references import whole_path
from launcher.secrecy import redacted

if TYPE_CHECKING:
    from launcher.images.store import Store

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

IMAGE_HELP = "a path, a recipe such as nemo:dev, or a name that `slipway image list` shows"


def add_verb(
    verbs: Verbs,
    name: str,
    summary: str,
    description: str,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Add one of the verbs, with its examples."""
    parser = verbs.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add what says where the images are."""
    parser.add_argument(
        "--images-dir",
        type=whole_path,
        metavar="DIR",
        help="the store (default: images_dir of the configuration)",
    )
    add_config_dir(parser)


def add_template_dir(parser: argparse.ArgumentParser) -> None:
    """Add the user's own Dockerfiles, which decide what the file of a recipe is called."""
    parser.add_argument(
        "--template-dir", type=Path, metavar="DIR", help="Dockerfiles of your own, read first"
    )


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add the user's own tree."""
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a conf tree of your own, read first")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the words that set keys of the configuration."""
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="such as images_dir=/shared/images, or image.tag=2"
    )


def of_recipe(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides that are about the recipe, ``image.KEY=VALUE``, and the others."""
    theirs = [word for word in overrides if word.lstrip("+~").startswith("image.")]
    return theirs, [word for word in overrides if word not in theirs]


def chosen_store(args: argparse.Namespace, overrides: Sequence[str] = ()) -> Store:
    """The store that the options and the configuration name.

    Raises
    ------
    UserError
        If the configuration has a mistake, or a word is no override.
    """
    from launcher.images.store import Store

    stray = [word for word in overrides if "=" not in word]
    if stray:
        raise UserError(f"{redacted(stray[0])}: this is no override", hint="an override is KEY=VALUE")
    if args.images_dir is not None:
        return Store(args.images_dir)
    # Imported late: composing takes longer than looking at a file.
    from launcher.config.compose import compose

    return Store(Path(compose(list(overrides), args.config_dir).config.images_dir))


def chosen_images(args: argparse.Namespace, words: Sequence[str]) -> list[Path]:
    """The files that the words mean; without words all of the store."""
    from launcher.images.choosing import locate

    # A path needs no store, and so no configuration.
    if words and all(Path(word).is_file() for word in words):
        return [Path(word).absolute() for word in words]
    overrides = [word for word in words if "=" in word]
    words = [word for word in words if word not in overrides]
    store = chosen_store(args, overrides)
    if not words:
        return [entry.path for entry in store.entries()]
    return [locate(word, store, args.config_dir, args.template_dir) for word in words]
