"""`slipway image build`: a recipe becomes a squashfs of the store."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from launcher.cli.image_making import add_import_options, import_options, tell
from launcher.cli.image_on_cluster import add_on_cluster, check, submit
from launcher.cli.image_options import Verbs, add_verb, chosen_store, of_recipe
from launcher.cli.image_render import add_recipe, chosen_recipe
from launcher.errors import UserError
from launcher.images.builders import BUILDERS
from launcher.images.references import whole_path

if TYPE_CHECKING:
    from launcher.images.importing import Imported
    from launcher.images.recipes import Recipe
    from launcher.images.store import Store

_EPILOG = """\
examples:
  slipway image build nemo                               then: slipway launch ... container=nemo
  slipway image build nemo:dev                           with editors, tmux and git
  slipway image build nemo image.digest=sha256:0123...   on a base that stays as it is
  slipway image build mine --config-dir conf --template-dir containers
  slipway image build megatron --builder buildah images_dir=/shared/images
  slipway image build nemo --on-cluster cluster=bcm      as a job

Nothing is done where the recipe, as it is now, is in the store already. Built with docker, podman or buildah,
the first that works here; the last two need no daemon and no rights. The image also stays in the storage of
the builder, for `slipway image push` and as a cache. The base is fetched with the builder's logins, or with
Enroot's (~/.config/enroot/.credentials) where podman and buildah have none.

exit code:
  0    it is there
  2    it could not be built or imported, and why; the store is as it was
  130  interrupted; the store is as it was
"""


def add_parsers(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs, "build", "build a recipe into the store", "Build a recipe, and import it.", _EPILOG, run
    )
    add_recipe(parser)
    parser.add_argument(
        "--images-dir", type=whole_path, metavar="DIR", help="the store (default: images_dir)"
    )
    parser.add_argument(
        "--builder",
        choices=BUILDERS,
        metavar="NAME",
        help=f"{', '.join(BUILDERS)} (default: image.builder, or the first that works)",
    )
    parser.add_argument(
        "--expect",
        metavar="FILE",
        help="build only if this is the name of the file, which tells one state of a recipe from another",
    )
    add_import_options(parser)
    add_on_cluster(parser)


def run(args: argparse.Namespace) -> int:
    """Build it, and tell where it is; return the exit code."""
    from launcher.images.building import build_into_store
    from launcher.images.progress import told

    check(args)
    own, others = of_recipe(args.overrides)
    store = chosen_store(args, others)
    made = chosen_recipe(args, own)
    if args.expect not in (None, made.file_name):
        tell(_made_before(args.expect, store, made), args.json)
        return 0
    if args.on_cluster:
        # It may change while the job waits.
        expected = f"--expect={made.file_name}"
        words = ("build", args.recipe, *own, f"--images-dir={store.directory}", expected)
        return submit(args, words, store.path(made.file_name), others)
    with told(quiet=args.json) as progress:
        imported = build_into_store(
            made, store, import_options(args), progress, builder=args.builder, config_dir=args.config_dir
        )
    tell(imported, args.json)
    return 0


def _made_before(expected: str, store: Store, made: Recipe) -> Imported:
    """The file that was asked for, of a recipe that is another one by now."""
    from launcher.images.importing import Imported
    from launcher.images.store import stored
    from launcher.images.superblock import is_squashfs

    found = stored(store.path(expected))
    if found is None or not is_squashfs(found.path):
        raise UserError(
            f"--expect={expected}: the recipe {made.name} becomes {made.file_name} now: it has changed since,"
            " or what is copied into the image has",
            hint="launch again, or --on-cluster again; or the recipe as it was",
        )
    return Imported(found.path, found.sidecar.digest if found.sidecar else None, True, found.sidecar)
