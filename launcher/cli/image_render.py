"""`slipway image render`: the Dockerfile that a recipe becomes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from launcher.cli.image_options import Verbs, add_config_dir, add_template_dir, add_verb, of_recipe
from launcher.errors import UserError
from launcher.secrecy import redacted
from launcher.ui.tables import print_code

if TYPE_CHECKING:
    from launcher.images.recipes import Recipe

_EPILOG = """\
examples:
  slipway image render nemo                              the run flavor
  slipway image render nemo:dev                          with editors, tmux and git
  slipway image render nemo-aws image.versions.nccl=2.27.7-1
  slipway image render nemo > Dockerfile
  slipway image render nemo --json | jq -r .file_name    what it is called in the store

docs/recipes.md has the recipes and their keys.

exit code:
  0  printed
  2  a mistake in what was asked for
"""

RECIPE_HELP = "a recipe, NAME[:FLAVOR]: nemo, nemo-aws, megatron or one of your own"


def add_parsers(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs, "render", "print a recipe's Dockerfile", "Print the Dockerfile of a recipe.", _EPILOG, run
    )
    add_recipe(parser)
    parser.add_argument("--json", action="store_true", help="print an object with the names and the hash too")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe that a verb is about, and the trees that it is looked for in."""
    parser.add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="KEY=VALUE, such as image.digest=sha256:..."
    )
    add_config_dir(parser)
    add_template_dir(parser)


def chosen_recipe(args: argparse.Namespace, overrides: list[str]) -> Recipe:
    """The recipe with its overrides; what it warns of is told.

    Raises
    ------
    UserError
        If there is none, or a value is not valid.
    """
    from launcher.images.recipes import recipe
    from launcher.images.references import recipe_and_flavor

    named = recipe_and_flavor(args.recipe)
    if named is None:
        word = redacted(args.recipe)
        raise UserError(
            f"{word}: this is no recipe's name",
            hint=f"a recipe is NAME[:FLAVOR]; an image of a registry: slipway image import {word}",
        )
    made = recipe(*named, overrides, args.config_dir, args.template_dir)
    for warning in made.warnings:
        print(f"slipway: warning: {warning}", file=sys.stderr)
    return made


def run(args: argparse.Namespace) -> int:
    """Print it; return the exit code."""
    own, others = of_recipe(args.overrides)
    if others:
        raise UserError(f"{redacted(others[0])}: this is no key of a recipe", hint="such as image.tag=2")
    made = chosen_recipe(args, own)
    if args.json:
        names = ("name", "flavor", "hash", "file_name", "image_name", "labels", "dockerfile")
        record = {name: getattr(made, name) for name in names}
        print(json.dumps({**record, "base": str(made.base), "warnings": list(made.warnings)}, indent=2))
    else:
        print_code(made.dockerfile, "docker")
    return 0
