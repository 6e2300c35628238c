"""`slipway image import`: an image of a registry, of an engine's storage or of a file as a squashfs."""

from __future__ import annotations

import argparse
from dataclasses import replace

from launcher.cli.image_making import add_import_options, import_options, tell
from launcher.cli.image_on_cluster import add_on_cluster, check, submit
from launcher.cli.image_options import Verbs, add_overrides, add_store, add_verb, chosen_store
from launcher.errors import UserError
from launcher.images.references import Kind, Reference, whole_path
from launcher.images.routes import ROUTES

_EPILOG = """\
examples:
  slipway image import nvcr.io#nvidia/nemo:25.07           as Pyxis writes it; with a / instead of # too
  slipway image import docker://nvcr.io/nvidia/nemo:25.07
  slipway image import podman://localhost/me/nemo:1        of podman's storage; dockerd:// of docker's
  slipway image import oci-archive:nemo.tar --output /shared/images/nemo.sqsh
  slipway image import nvcr.io#nvidia/nemo:25.07 images_dir=/shared/images
  slipway image import nvcr.io#nvidia/nemo:25.07 --on-cluster cluster=bcm    as a job

Nothing is done where the image is in the store already, with this digest. Who imports it at the same time
waits, and takes the same file. It gets its name at the end: no job ever sees half of it.

Logins are Enroot's (~/.config/enroot/.credentials) or those of `skopeo login`, `docker login nvcr.io`.

exit code:
  0    it is there
  2    it could not be imported, and why; nothing is left behind
  130  interrupted; nothing is left behind
"""


def add_parsers(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "import",
        "an image as a squashfs of the store",
        "Import an image: through Enroot where it is installed, else by skopeo, umoci and mksquashfs.",
        _EPILOG,
        run,
    )
    parser.add_argument("source", metavar="REFERENCE", help="the image, such as nvcr.io#nvidia/nemo:25.07")
    add_overrides(parser)
    add_store(parser)
    parser.add_argument(
        "--output", type=whole_path, metavar="FILE", help="the file, instead of one of the store"
    )
    parser.add_argument(
        "--via", choices=ROUTES, default=ROUTES[0], metavar="WAY", help=f"{', '.join(ROUTES)}: the programs"
    )
    add_import_options(parser)
    add_on_cluster(parser)


def run(args: argparse.Namespace) -> int:
    """Import it, and tell where it is; return the exit code."""
    from launcher.images.importing import import_image
    from launcher.images.progress import told

    check(args)
    source = Reference.parse(args.source, "image")
    target = args.output or chosen_store(args, args.overrides).path(source.file_name)
    if args.on_cluster:
        target = target.absolute()
        return submit(args, ("import", _for_a_job(source), f"--output={target}"), target, args.overrides)
    with told(quiet=args.json) as progress:
        imported = import_image(source, target, import_options(args, args.via), progress)
    tell(imported, args.json)
    return 0


def _for_a_job(source: Reference) -> str:
    """The image as a node finds it: the job starts elsewhere than the user stands."""
    if source.kind in (Kind.PODMAN, Kind.DOCKER_ENGINE):
        raise UserError(
            f"{source} is in the storage of this machine, which a job does not see",
            hint="without --on-cluster; or push it first: slipway image push",
        )
    if source.kind is not Kind.REGISTRY:
        source = replace(source, name=str(source.path))
    return str(source)
