"""`slipway image`: from a recipe, or from a registry, to a squashfs that every node can start."""

from __future__ import annotations

import argparse

from launcher.cli import image_look, image_make, image_prune, image_push

_EPILOG = """\
examples:
  slipway image import nvcr.io#nvidia/nemo:25.07      import a registry's image into the store
  slipway image build nemo                            build and import a recipe of conf/image
  slipway image build nemo:dev --on-cluster cluster=bcm    the same as a job of the cluster
  slipway image list                                  list the images of the store
  slipway image inspect nemo --deep                   show an image, with its versions of torch, nemo, ...
  slipway image verify                                check that all images are complete
  slipway image push nemo registry.example/team/nemo:1
  slipway image prune --older-than 30d                remove images that no run needs

The store is the directory images_dir of the configuration. An IMAGE is the path of a .sqsh file, a recipe's
name (nemo, nemo:dev), an image's name in a registry, or a name that `slipway image list` shows.
For more: `slipway image VERB --help`.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "image",
        help="build, import, inspect, push and prune container images",
        description="Make container images, and keep them as squashfs files that Pyxis and Enroot start.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for module in (image_make, image_look, image_push, image_prune):
        module.add_parsers(verbs)
