"""`slipway image`: from a recipe, or from a registry, to a squashfs that every node can start."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from launcher.cli import image_make, image_store
from launcher.cli import image_options as shared
from launcher.cli.options import Verbs, add_option, add_overrides, add_verb
from launcher.errors import Mistakes, UserError, escape
from launcher.images.inspecting import InspectedImage, inspect, installed_versions, printable_env, verify
from launcher.images.progress import show_progress
from launcher.images.squashfs import read_superblock
from launcher.images.store import Stored, list_images, record_installed
from launcher.images.tools import ending_cleanly
from launcher.secrecy import without_secrets
from launcher.ui.tables import print_listing, print_styled
from launcher.ui.terminal import print_json, print_message, print_stderr

_HELP = """\
Make container images, and keep them as squashfs files that Pyxis and Enroot start.

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


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "image", None, text=_HELP)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add in (image_make.add_parsers, _add_parsers, image_store.add_push, image_store.add_prune):
        add(verbs)


_LIST = """\
examples:
  slipway image list
  slipway image list --images-dir /shared/images
  slipway image list --json | jq -r '.[] | select(.recipe.name == "nemo") | .path'

FROM is a recipe with its flavor, or the image of a registry; - for an image without a record next to it, such
as a colleague's or one that `enroot import` made.

exit code:
  0  listed, even if the list is empty
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
the versions of its packages; nothing of the image is imported. It shows the engines whose programs the image
has, and writes its results into the record of the image. Values of variables that are secrets by their names
are not shown.

exit code:
  0  shown
  2  there is no such image, it is no complete squashfs, or --deep could not start it
"""

_VERIFY = """\
examples:
  slipway image verify                      all images of the store
  slipway image verify nemo --deep          and decompress each of its files
  slipway image verify /shared/x.sqsh --json

It checks the header, the length, the tables, and the checksum if there is a record; --deep decompresses every
file, and writes nothing.

exit code:
  0  all images are complete
  2  one is not, with the reason; or there is no such image
"""


def _add_parsers(verbs: Verbs) -> None:
    parser = add_verb(verbs, "list", _list, "list the images of the store", _LIST)
    add_option(parser, "--json", "print a list of objects")
    add_overrides(parser, shared.OVERRIDES_HELP)
    shared.add_store(parser)

    parser = add_verb(verbs, "inspect", _inspect, "show what an image is", _INSPECT)
    add_option(parser, "--json", "print an object")
    add_overrides(parser, f"{shared.IMAGE_HELP}; and overrides", "IMAGE")
    add_option(parser, "--deep", "ask its Python for the versions in it")
    shared.add_store(parser, recipes=True)

    parser = add_verb(verbs, "verify", _verify, "check that images are complete", _VERIFY)
    add_option(parser, "--json", "print a list of objects")
    add_overrides(parser, f"{shared.IMAGE_HELP} (default: all); and overrides", "IMAGE")
    add_option(parser, "--deep", "decompress every file")
    shared.add_store(parser, recipes=True)


# --- list


def _list(args: argparse.Namespace) -> None:
    store = shared.find_store(args, args.overrides)
    entries = list_images(store)
    if args.json:
        print_json([_entry_to_json(entry) for entry in entries])
    elif entries:
        head = ("IMAGE", "SIZE", "COMPRESSION", "FROM", "CREATED")
        print_listing(head, [_cells(entry) for entry in entries], numbers=1)
    if not entries:
        print_stderr(f"there is no image in {escape(str(store))} yet")


def _cells(entry: Stored) -> tuple[str, ...]:
    compression, created = _compression_and_time(entry)
    record, origin = entry.sidecar, "-"
    if record is not None:
        origin = f"{record.recipe.name}:{record.recipe.flavor}" if record.recipe else record.source
    created = created[:16].replace("T", " ")
    return tuple(map(escape, (entry.path.name, decimal(entry.size), compression, origin, created)))


def _compression_and_time(entry: Stored) -> tuple[str, str]:
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
        **{
            name: None if record is None else getattr(record, name) for name in ("source", "digest", "sha256")
        },
        "recipe": asdict(record.recipe) if record and record.recipe else None,
    }


# --- inspect


def _inspect(args: argparse.Namespace) -> None:
    paths = shared.find_images(args)
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
        print_json({**image.to_json(), **deep})
    else:
        rows = [*_rows(image), *deep.get("installed", {}).items()]
        words = {True: "yes", False: "no", None: "not known"}
        for engine, fit in deep.get("engines", {}).items():
            rows.append((f"engine={engine}", f"{words[fit['fits']]}: {fit['why']}"))
        width = max(len(name) for name, _ in rows)
        print_styled(((f"{name:{width}}  ", "bold"), (escape(value or "-"), "")) for name, value in rows)
    for note in image.notes:
        print_message(note)


def judge_engines(path: Path, versions: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    """Judge for each engine if an image has its programs, as `check` and `doctor` do."""
    from launcher.checks.rules.images import JUDGED, engine_fit
    from launcher.images.resolve import contents_of_file
    from launcher.releases import Contents, add_installed

    contents = add_installed(contents_of_file(path) or Contents(path.name), versions)
    return {engine: engine_fit(contents, engine)._asdict() for engine in JUDGED}


def _rows(image: InspectedImage) -> Iterator[tuple[str, str | None]]:
    config, record, block = image.config, image.record, image.block
    yield "image", str(image.path)
    yield "from", image.source
    if record and (recipe := record.recipe):
        yield "recipe", f"{recipe.name}:{recipe.flavor}, hash {recipe.hash[:12]}"
    yield "digest", record.digest if record else None
    yield "sha256", record.sha256 if record else None
    yield "size", f"{decimal(image.size)} ({image.size:,} bytes)"
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
    paths = shared.find_images(args)
    if not paths:
        print_stderr("there is no image yet")
    with show_progress(quiet=args.json) as progress:
        images = []
        for path in paths:
            images.append(verify(path, deep=args.deep, progress=progress))
            progress.done()
    if args.json:
        rows = [
            {
                "path": str(image.path),
                "is_whole": image.is_whole,
                "checked": image.checked,
                "problem": image.problem and image.problem.message,
                "notes": image.notes,
            }
            for image in images
        ]
        print_json(rows)
    else:
        for image in images:
            result = ("whole", "green") if image.is_whole else ("not whole", "bold red")
            print_styled([((f"{escape(str(image.path))}: ", ""), result)])
            for words in (*image.checked, *(f"not checked: {note}" for note in image.notes)):
                print(f"  {words}")
    problems = [image.problem for image in images if image.problem is not None]
    if problems and not args.json:
        raise Mistakes(problems)
    return 2 if problems else 0
