"""`slipway image`: from a recipe, or from a registry, to a squashfs that every node can start."""

from __future__ import annotations

import argparse

from launcher.cli import image_build, image_import, image_look, image_prune, image_push, image_render

_EPILOG = """\
examples:
  slipway image import nvcr.io#nvidia/nemo:25.07      an image of a registry as a squashfs of the store
  slipway image build nemo                            a recipe of conf/image, built and imported
  slipway image build nemo:dev --on-cluster cluster=bcm    the same as a job of the cluster
  slipway image list                                  what is in the store
  slipway image inspect nemo --deep                   and the versions of torch, nemo, ... in it
  slipway image verify                                is each of them whole?
  slipway image push nemo registry.example/team/nemo:1
  slipway image prune --older-than 30d                remove what no run needs

The store is the directory images_dir of the configuration. An IMAGE is the path of a .sqsh file, a recipe's
name (nemo, nemo:dev), an image's name in a registry, or a name that `slipway image list` shows.
`slipway image VERB --help` tells more.
"""

_PARTS = (image_render, image_build, image_import, image_look, image_push, image_prune)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "image",
        help="container images: build, import, look at, push, prune",
        description="Make container images, and keep them as squashfs files that Pyxis and Enroot start.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for part in _PARTS:
        part.add_parsers(verbs)
