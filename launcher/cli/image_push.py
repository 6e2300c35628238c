"""`slipway image push`: an image to one or more registries, the same in all of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.cli.image_options import (
    Verbs,
    add_access,
    add_store,
    add_template_dir,
    add_verb,
    find_store,
    split_overrides,
)
from launcher.errors import Mistakes, UserError, one_line
from launcher.images.references import Reference, absolute_path, recipe_and_flavor
from launcher.images.tools import BUILDERS, ending_cleanly

if TYPE_CHECKING:
    from launcher.images.recipes import Recipe
    from launcher.images.registry import Pushed
    from launcher.images.store import Store

_EPILOG = """\
examples:
  slipway image push nemo registry.example/team/nemo:25.07      the recipe's image, as it was built here
  slipway image push nemo                                       to image.registry and all of image.registries
  slipway image push nvcr.io#nvidia/nemo:25.07 eu.example/nemo:25.07 us.example/nemo:25.07
  slipway image push oci-archive:nemo.tar registry.example/team/nemo:1 --json

The layers are packed once and sent to each registry unchanged; the digest is read back from each, and is
the same in all. If an image of this digest has this name already, nothing is sent.

exit code:
  0  all registries have it
  1  some have it, and some refused; run it again
  2  none has it, or a mistake in the arguments
"""


def add_parsers(verbs: Verbs) -> None:
    """Add the verb."""
    description, json_help = (
        "Push an image to registries, by skopeo.",
        "print a list of objects, and no progress",
    )
    parser = add_verb(verbs, "push", "push an image to registries", description, _EPILOG, _push, json_help)
    parser.add_argument("source", metavar="IMAGE", help="a recipe that was built here, or a reference")
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TO",
        help="REGISTRY/NAME:TAG (default: the recipe's); and overrides such as image.tag=2 or images_dir=DIR",
    )
    add_store(parser)
    add_template_dir(parser)
    parser.add_argument(
        "--temp-dir", type=absolute_path, metavar="DIR", help="where to pack (default: where there is room)"
    )
    parser.add_argument(
        "--builder", choices=BUILDERS, metavar="NAME", help="the builder whose storage has a recipe's image"
    )
    add_access(parser)


def _push(args: argparse.Namespace) -> int:
    from launcher.images import registry
    from launcher.images.progress import show_progress
    from launcher.images.tools import NO_IMAGE, ToolError

    overrides = [word for word in args.targets if "=" in word]
    targets = [Reference.parse(text, "TO") for text in args.targets if text not in overrides]
    own, others = split_overrides(overrides)
    recipe = _recipe(args, own)
    if recipe is not None and not targets:
        names = filter(None, [recipe.config.registry, *recipe.config.registries])
        targets = [Reference.parse(recipe.name_in(name), "image.registries") for name in names]
    if not targets:
        raise UserError("where to? no registry is named", hint="such as registry.example/team/nemo:25.07")
    registry.check_targets(targets)  # before a builder is looked for
    access = registry.Access(args.plain_http, args.authfile)
    with show_progress(quiet=args.json) as progress, ending_cleanly(), ExitStack() as storage:
        source = Reference.parse(args.source, "image") if recipe is None else _built(args, recipe, storage)
        try:
            pushed = registry.push(source, targets, progress, access, args.temp_dir)
        except ToolError as error:
            if recipe is None or error.why != NO_IMAGE:
                raise
            hint = f"build it first: slipway image build {args.source}"
            raise UserError(error.message, hint=hint) from error
        if recipe is not None:
            _record(find_store(args, others), recipe.file_name, source, pushed)
        progress.done()
    return _print_pushed(pushed, args.json)


def _recipe(args: argparse.Namespace, overrides: list[str]) -> Recipe | None:
    """Return the recipe; ``None`` if the source is no recipe."""
    named = recipe_and_flavor(args.source)
    if named is None:
        if overrides:
            raise UserError(f"{overrides[0]}: {args.source} is no recipe, and has no such keys")
        return None
    from launcher.images.recipes import read_recipe

    return read_recipe(*named, overrides, args.config_dir, args.template_dir)


def _built(args: argparse.Namespace, recipe: Recipe, storage: ExitStack) -> Reference:
    """Return the recipe's image in its builder's storage, and let skopeo find that storage."""
    from launcher.images.building import find_builder

    builder = find_builder(args.builder or recipe.config.builder)
    storage.enter_context(builder.environment())
    return builder.reference(recipe.image_name)


def _record(store: Store, file_name: str, source: Reference, pushed: Sequence[Pushed]) -> None:
    """Write the digest that registries have into the record of the file that was made of the same image.

    A builder's storage and a registry pack an image differently, so that its digests differ.
    """
    from launcher.images.registry import Access, look_up
    from launcher.images.store import read_sidecar

    image = store.path(file_name)
    record = read_sidecar(image)
    digest = next((push.digest for push in pushed if push.digest is not None), None)
    if record is None or digest in (None, record.pushed):
        return
    if look_up(source, Access()).digest == record.digest:
        try:
            replace(record, pushed=digest).write(image)
        except OSError as error:
            message = f"{one_line(str(image))}: its record does not get the digest: {error.strerror}"
            print(f"slipway: warning: {message}", file=sys.stderr)


def _print_pushed(pushed: Sequence[Pushed], as_json: bool) -> int:
    errors = [push.error for push in pushed if push.error is not None]
    if as_json:
        rows = [
            {
                "target": str(push.target),
                "digest": push.digest,
                "was_there": push.was_there,
                "error": push.error.message if push.error else None,
            }
            for push in pushed
        ]
        print(json.dumps(rows, indent=2))
    else:
        for push in pushed:
            if push.error is None:
                has = "has it already" if push.was_there else "has it now"
                print(f"{one_line(str(push.target))} {has}: {push.digest}")
    if len(errors) == len(pushed):
        raise Mistakes(errors)
    for error in errors:
        print(f"slipway: {error}", file=sys.stderr)
    return 1 if errors else 0
