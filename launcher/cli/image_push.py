"""`slipway image push`: an image to one or more registries, the same in all of them."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.cli.image_making import add_access
from launcher.cli.image_options import Verbs, add_store, add_template_dir, add_verb, chosen_store, of_recipe
from launcher.errors import Mistakes, UserError, one_line
from launcher.images.builders import BUILDERS
from launcher.images.references import whole_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.images.pushing import Pushed
    from launcher.images.references import Reference
    from launcher.images.store import Store

_EPILOG = """\
examples:
  slipway image push nemo registry.example/team/nemo:25.07      the recipe's image, as it was built here
  slipway image push nemo                                       to image.registry and all of image.registries
  slipway image push nvcr.io#nvidia/nemo:25.07 eu.example/nemo:25.07 us.example/nemo:25.07
  slipway image push oci-archive:nemo.tar registry.example/team/nemo:1 --json

The layers are packed once and sent to each registry as they are; the digest is read back from each, and is
the same in all. Where an image of this digest has this name already, nothing is sent.

exit code:
  0  it is in all of them
  1  some have it, and some refused; run it again
  2  none has it, or a mistake in what was asked for
"""


def add_parsers(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "push", "to registries", "Push an image to registries, by skopeo.", _EPILOG, run)
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
        "--temp-dir", type=whole_path, metavar="DIR", help="where to pack (default: where is room)"
    )
    parser.add_argument(
        "--builder", choices=BUILDERS, metavar="NAME", help="in whose storage a recipe's image is"
    )
    add_access(parser)
    parser.add_argument("--json", action="store_true", help="print a list of objects, and no progress")


def run(args: argparse.Namespace) -> int:
    """Push it, and tell of each registry; return the exit code."""
    from launcher.images.builders import builder_for
    from launcher.images.complaints import NO_IMAGE, Complaint
    from launcher.images.interrupts import ending_cleanly
    from launcher.images.progress import told
    from launcher.images.pushing import check_places, push
    from launcher.images.recipes import recipe
    from launcher.images.references import Reference, recipe_and_flavor
    from launcher.images.remote import Access

    overrides = [word for word in args.targets if "=" in word]
    targets = [Reference.parse(text, "TO") for text in args.targets if text not in overrides]
    named = recipe_and_flavor(args.source)
    own, others = of_recipe(overrides)
    if own and not named:
        raise UserError(f"{own[0]}: {args.source} is no recipe, and has no such keys")
    made = recipe(*named, own, args.config_dir, args.template_dir) if named else None
    if made is not None and not targets:
        registries = [made.config.registry, *made.config.registries]
        targets = [Reference.parse(made.name_in(name), "image.registries") for name in registries if name]
    if not targets:
        raise UserError("where to? no registry is named", hint="such as registry.example/team/nemo:25.07")
    check_places(targets)  # before a builder is looked for
    access = Access(args.plain_http, args.authfile)
    with told(quiet=args.json) as progress, ending_cleanly(), ExitStack() as storage:
        if made is not None:
            builder = builder_for(args.builder or made.config.builder)
            storage.enter_context(builder.environment())
            source = builder.reference(made.image_name)
        else:
            source = Reference.parse(args.source, "image")
        try:
            done = push(source, targets, progress, access, args.temp_dir)
        except Complaint as error:
            if made is None or error.why != NO_IMAGE:
                raise
            hint = f"build it first: slipway image build {args.source}"
            raise UserError(error.message, hint=hint) from error
        if made is not None:
            _record(chosen_store(args, others), made.file_name, source, done)
        progress.done()
    return _tell(done, args.json)


def _record(store: Store, file_name: str, source: Reference, done: Sequence[Pushed]) -> None:
    """Write the digest that registries have beside the file that was made of the same image.

    A builder's storage and a registry pack an image differently, so that its digests differ.
    """
    from launcher.images.remote import Access, look_up_by_skopeo
    from launcher.images.store import read_sidecar

    image = store.path(file_name)
    sidecar = read_sidecar(image)
    digest = next((one.digest for one in done if one.digest is not None), None)
    if sidecar is None or digest in (None, sidecar.pushed):
        return
    if look_up_by_skopeo(source, Access()).digest == sidecar.digest:
        try:
            replace(sidecar, pushed=digest).write(image)
        except OSError as error:
            told = f"{one_line(str(image))}: its record does not get the digest: {error.strerror}"
            print(f"slipway: warning: {told}", file=sys.stderr)


def _tell(done: Sequence[Pushed], as_json: bool) -> int:
    errors = [one.error for one in done if one.error is not None]
    if as_json:
        print(json.dumps([_to_json(one) for one in done], indent=2))
    for one in done:
        if one.error is None and not as_json:
            how = "has it already" if one.was_there else "has it now"
            print(f"{one_line(str(one.target))} {how}: {one.digest}")
    if len(errors) == len(done):
        raise Mistakes(errors)
    for error in errors:
        print(f"slipway: {error}", file=sys.stderr)
    return 1 if errors else 0


def _to_json(one: Pushed) -> dict[str, Any]:
    return {
        "target": str(one.target),
        "digest": one.digest,
        "was_there": one.was_there,
        "error": one.error.message if one.error else None,
    }
