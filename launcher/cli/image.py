"""`slipway image`: from a recipe, or from a registry, to a squashfs that every node can start."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli import image_make, image_store
from launcher.cli.image_options import (
    IMAGE_HELP,
    Verbs,
    add_overrides,
    add_store,
    add_template_dir,
    add_verb,
    find_images,
    find_store,
)
from launcher.errors import Mistakes, UserError, one_line
from launcher.images.progress import format_size, show_progress
from launcher.images.squashfs import read_superblock
from launcher.images.tools import ending_cleanly
from launcher.secrecy import without_secrets
from launcher.ui.tables import print_listing, print_styled

if TYPE_CHECKING:
    from launcher.images.inspecting import InspectedImage, VerifiedImage
    from launcher.images.store import Stored

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
    parser = subparsers.add_parser(
        "image",
        help="build, import, inspect, push and prune container images",
        description="Make container images, and keep them as squashfs files that Pyxis and Enroot start.",
        epilog=_EPILOG,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add in (image_make.add_parsers, add_parsers, image_store.add_push, image_store.add_parsers):
        add(verbs)


_LIST = """\
examples:
  slipway image list
  slipway image list --images-dir /shared/images
  slipway image list --json | jq -r '.[] | select(.recipe.name == "nemo") | .path'

FROM is a recipe with its flavor, or the image of a registry; - for an image without a record beside it, such
as a colleague's or one that `enroot import` made.

exit code:
  0  listed, also if there is none
  2  a mistake in the arguments
"""

_INSPECT = """\
examples:
  slipway image inspect nemo                            the recipe's image, as the recipe is now
  slipway image inspect nvidia+nemo+24.07.sqsh
  slipway image inspect /shared/images/theirs.sqsh      one that others made
  slipway image inspect nemo --deep                     and the versions of torch, CUDA, nemo, ... in it
  slipway image inspect nemo --json | jq -r .digest

--deep starts the Python of the image (with squashfuse and unshare, with enroot or with apptainer) and reads
the versions of what is installed; nothing of the image is imported. It shows which engines the image has the
programs of, and writes what it read into the record beside the image. Values of variables that are secrets by
their names are not shown.

exit code:
  0  shown
  2  there is no such image, it is no complete squashfs, or --deep could not start it
"""

_VERIFY = """\
examples:
  slipway image verify                      all images of the store
  slipway image verify nemo --deep          and decompress each of its files
  slipway image verify /shared/x.sqsh --json

Checked are its header and its length, its tables, and its checksum, if it has a record; --deep decompresses
every file, and writes nothing.

exit code:
  0  all images are complete
  2  one is not, with what is wrong; or there is no such image
"""


def add_parsers(verbs: Verbs) -> None:
    objects = "print a list of objects"
    summary, description = "list the images of the store", "List the images of the store."
    parser = add_verb(verbs, "list", summary, description, _LIST, _list, objects)
    add_overrides(parser)
    add_store(parser)

    summary, description = "show what an image is", "Show what an image is."
    parser = add_verb(verbs, "inspect", summary, description, _INSPECT, _inspect, "print an object")
    add_overrides(parser, "IMAGE", f"{IMAGE_HELP}; and overrides")
    parser.add_argument("--deep", action="store_true", help="ask its Python for the versions in it")
    add_store(parser)
    add_template_dir(parser)

    summary, description = "check that images are complete", "Check that images are complete."
    parser = add_verb(verbs, "verify", summary, description, _VERIFY, _verify, objects)
    add_overrides(parser, "IMAGE", f"{IMAGE_HELP} (default: all); and overrides")
    parser.add_argument("--deep", action="store_true", help="decompress every file")
    add_store(parser)
    add_template_dir(parser)


# --- list


def _list(args: argparse.Namespace) -> int:
    store = find_store(args, args.overrides)
    entries = store.entries()
    if args.json:
        print(json.dumps([_entry_to_json(entry) for entry in entries], indent=2))
    elif entries:
        head = ("IMAGE", "SIZE", "COMPRESSION", "FROM", "CREATED")
        print_listing(head, [_cells(entry) for entry in entries], numbers=1)
    if not entries:
        print(f"there is no image in {one_line(str(store.directory))} yet", file=sys.stderr)
    return 0


def _cells(entry: Stored) -> tuple[str, ...]:
    compression, created = _compression_and_time(entry)
    record, origin = entry.sidecar, "-"
    if record is not None:
        origin = f"{record.recipe.name}:{record.recipe.flavor}" if record.recipe else record.source
    created = created[:16].replace("T", " ")
    cells = (entry.path.name, format_size(entry.size), compression, origin, created)
    return tuple(map(one_line, cells))


def _compression_and_time(entry: Stored) -> tuple[str, str]:
    """Return the compression and the time of an image, or what is wrong with it."""
    try:
        block = read_superblock(entry.path)
    except UserError:
        return "not whole", "-"
    except OSError as error:
        return (error.strerror or "unreadable").lower(), "-"
    return block.compression, entry.sidecar.created if entry.sidecar else block.created.isoformat()


def _entry_to_json(entry: Stored) -> dict[str, Any]:
    compression, created = _compression_and_time(entry)
    record = entry.sidecar
    return {
        "path": str(entry.path),
        "size": entry.size,
        "is_whole": compression != "not whole",
        "compression": record.compression if record else compression,
        "created": created,
        "source": record.source if record else None,
        "digest": record.digest if record else None,
        "sha256": record.sha256 if record else None,
        "recipe": asdict(record.recipe) if record and record.recipe else None,
    }


# --- inspect


def _inspect(args: argparse.Namespace) -> int:
    from launcher.images.inspecting import inspect, installed_versions
    from launcher.images.store import record_installed

    paths = find_images(args)
    if len(paths) != 1 or all("=" in word for word in args.overrides):
        raise UserError("one image at a time: slipway image inspect IMAGE")
    [path] = paths
    deep: dict[str, Any] = {}
    with ending_cleanly():  # files of it are copied, and it may be mounted, meanwhile
        image = inspect(path)
        if args.deep:
            versions = installed_versions(path, image.config)
            record_installed(path, versions)
            deep = {"installed": versions, "engines": judge_engines(path, versions)}
    if args.json:
        print(json.dumps({**image.to_json(), **deep}, indent=2))
    else:
        rows = [*_rows(image), *deep.get("installed", {}).items(), *_engine_rows(deep.get("engines", {}))]
        width = max(len(name) for name, _ in rows)
        print_styled(((f"{name:{width}}  ", "bold"), (one_line(value or "-"), "")) for name, value in rows)
    for note in image.notes:
        print(f"slipway: {note}", file=sys.stderr)
    return 0


def judge_engines(path: Path, versions: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    """Judge for each engine if an image has its programs, as `check` and `doctor` do."""
    from launcher.checks.rules.files import JUDGED, engine_fit
    from launcher.images.resolve import contents_of_file
    from launcher.releases import Contents, with_installed

    contents = with_installed(contents_of_file(path) or Contents(path.name), versions)
    return {engine: engine_fit(contents, engine)._asdict() for engine in JUDGED}


def _engine_rows(engines: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str | None]]:
    words = {True: "yes", False: "no", None: "not known"}
    for engine, fit in engines.items():
        yield f"engine={engine}", f"{words[fit['fits']]}: {fit['why']}"


def _rows(image: InspectedImage) -> Iterator[tuple[str, str | None]]:
    from launcher.images.inspecting import printable_env

    config, record, block = image.config, image.record, image.block
    yield "image", str(image.path)
    yield "from", image.source
    if record and (recipe := record.recipe):
        yield "recipe", f"{recipe.name}:{recipe.flavor}, hash {recipe.hash[:12]}"
    yield "digest", record.digest if record else None
    yield "sha256", record.sha256 if record else None
    yield "size", f"{format_size(image.size)} ({image.size:,} bytes)"
    yield "compression", f"{block.compression}, blocks of {block.block_size // 1024} KiB"
    yield "created", f"{block.created:%Y-%m-%d %H:%M} UTC"
    yield "made by", record.made_by if record else None
    yield "system", " ".join(part for part in (image.release, config.architecture) if part)
    yield "entry point", shlex.join(config.entrypoint)
    yield "command", shlex.join(config.cmd)
    yield "workdir", config.workdir
    yield "volumes", " ".join(map(shlex.quote, config.volumes))
    for index, (name, value) in enumerate(printable_env(config.env).items()):
        yield "" if index else "env", f"{name}={value}"
    for index, (name, value) in enumerate(config.labels.items()):
        yield "" if index else "labels", f"{name}={without_secrets(value)}"


# --- verify


def _verify(args: argparse.Namespace) -> int:
    from launcher.images.inspecting import verify

    paths = find_images(args)
    if not paths:
        print("there is no image yet", file=sys.stderr)
    with show_progress(quiet=args.json) as progress:
        images = []
        for path in paths:
            images.append(verify(path, deep=args.deep, progress=progress))
            progress.done()
    if args.json:
        print(json.dumps([_verified_to_json(image) for image in images], indent=2))
    else:
        _print_verified(images)
    problems = [image.problem for image in images if image.problem is not None]
    if problems and not args.json:
        raise Mistakes(problems)
    return 2 if problems else 0


def _print_verified(images: list[VerifiedImage]) -> None:
    for image in images:
        result = ("whole", "green") if image.is_whole else ("not whole", "bold red")
        print_styled([((f"{one_line(str(image.path))}: ", ""), result)])
        for words in image.checked:
            print(f"  {words}")
        for words in image.notes:
            print(f"  not checked: {words}")


def _verified_to_json(image: VerifiedImage) -> dict[str, Any]:
    return {
        "path": str(image.path),
        "is_whole": image.is_whole,
        "checked": list(image.checked),
        "problem": image.problem.message if image.problem else None,
        "notes": list(image.notes),
    }
