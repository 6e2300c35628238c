"""`slipway image list`, `inspect` and `verify`: what is in the store, and what is in an image."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from launcher.cli.image_options import (
    IMAGE_HELP,
    Verbs,
    add_overrides,
    add_store,
    add_template_dir,
    add_verb,
    chosen_images,
    chosen_store,
)
from launcher.errors import Mistakes, UserError, one_line
from launcher.ui.tables import print_listing, print_styled

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.images.inspecting import Inspected
    from launcher.images.store import Stored
    from launcher.images.verifying import Verified

_LIST = """\
examples:
  slipway image list
  slipway image list --images-dir /shared/images
  slipway image list --json | jq -r '.[] | select(.recipe.name == "nemo") | .path'

FROM is a recipe with its flavor, or the image of a registry; - of an image that has no record beside it, such
as a colleague's or one that `enroot import` made.

exit code:
  0  listed, also if there is none
  2  a mistake in what was asked for
"""

_INSPECT = """\
examples:
  slipway image inspect nemo                            the recipe's image, as the recipe is now
  slipway image inspect nvidia+nemo+24.07.sqsh
  slipway image inspect /shared/images/theirs.sqsh      one that others made
  slipway image inspect nemo --deep                     and the versions of torch, CUDA, nemo, ... in it
  slipway image inspect nemo --json | jq -r .digest

--deep starts the Python of the image (with squashfuse and unshare, with enroot or with apptainer) and reads
the versions of what is installed; nothing of the image is imported. It tells which engines the image has the
programs of, and writes what it read into the record beside the image. Values of variables that are secrets by
their names are not shown.

exit code:
  0  shown
  2  there is no such image, it is no whole squashfs, or --deep could not start it
"""

_VERIFY = """\
examples:
  slipway image verify                      all images of the store
  slipway image verify nemo --deep          and each of its files is read
  slipway image verify /shared/x.sqsh --json

Looked at are how it begins and how long it is, its tables, and its checksum, where it has a record; with
--deep every file is decompressed, and nothing written.

exit code:
  0  all are whole
  2  one is not, with what is wrong; or there is no such image
"""

_ENV_SHOWN = 12


def add_parsers(verbs: Verbs) -> None:
    """Add the verbs."""
    parser = add_verb(verbs, "list", "the images there are", "List the images of the store.", _LIST, _list)
    add_overrides(parser)
    add_store(parser)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser = add_verb(verbs, "inspect", "what an image is", "Show what an image is.", _INSPECT, _inspect)
    parser.add_argument("overrides", nargs="+", metavar="IMAGE", help=f"{IMAGE_HELP}; and overrides")
    add_store(parser)
    add_template_dir(parser)
    parser.add_argument("--deep", action="store_true", help="ask its Python what is installed in it")
    parser.add_argument("--json", action="store_true", help="print an object")
    parser = add_verb(verbs, "verify", "is it whole?", "Look whether images are whole.", _VERIFY, _verify)
    parser.add_argument(
        "overrides", nargs="*", metavar="IMAGE", help=f"{IMAGE_HELP} (default: all); and overrides"
    )
    add_store(parser)
    add_template_dir(parser)
    parser.add_argument("--deep", action="store_true", help="decompress every file")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def _list(args: argparse.Namespace) -> int:
    store = chosen_store(args, args.overrides)
    entries = store.entries()
    if args.json:
        print(json.dumps([_entry_json(entry) for entry in entries], indent=2))
    elif entries:
        print_listing(
            ("IMAGE", "SIZE", "COMPRESSION", "FROM", "CREATED"), [_cells(e) for e in entries], numbers=1
        )
    if not entries:
        print(f"there is no image in {one_line(str(store.directory))} yet", file=sys.stderr)
    return 0


def _cells(entry: Stored) -> tuple[str, ...]:
    from launcher.images.progress import megabytes

    compression, created = _of_file(entry)
    values = (entry.path.name, megabytes(entry.size), compression, _origin(entry), created[:16])
    return tuple(one_line(value) for value in (*values[:4], values[4].replace("T", " ")))


def _origin(entry: Stored) -> str:
    record = entry.sidecar
    if record is None:
        return "-"
    return f"{record.recipe.name}:{record.recipe.flavor}" if record.recipe else record.source


def _of_file(entry: Stored) -> tuple[str, str]:
    """The compression and the time of an image: a broken one says what is wrong with it."""
    from launcher.images.superblock import read_superblock

    try:
        block = read_superblock(entry.path)
    except UserError:
        return "not whole", "-"
    except OSError as error:
        return (error.strerror or "unreadable").lower(), "-"
    record = entry.sidecar
    return block.compression, record.created if record else block.created.isoformat()


def _entry_json(entry: Stored) -> dict[str, Any]:
    from dataclasses import asdict

    compression, created = _of_file(entry)
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


def _inspect(args: argparse.Namespace) -> int:
    from launcher.images.inspecting import inspect
    from launcher.images.interrupts import ending_cleanly

    # One list for both, as the app knows it: an override may follow an option.
    paths = chosen_images(args, args.overrides)
    if len(paths) != 1 or all("=" in word for word in args.overrides):
        raise UserError("one image at a time: slipway image inspect IMAGE")
    path = paths[0]
    versions, engines = None, None
    with ending_cleanly():  # files of it are copied, and it may be mounted, meanwhile
        found = inspect(path)
        if args.deep:
            from launcher.images.probing import installed
            from launcher.images.store import remember_installed

            versions = installed(path, found.config)
            remember_installed(path, versions)
            engines = _engines(path, versions)
    if args.json:
        record = found.to_json()
        deep = {} if engines is None else {"installed": versions, "engines": engines}
        print(json.dumps({**record, **deep}, indent=2))
    else:
        rows = [*_rows(found), *(versions or {}).items(), *_engine_rows(engines or {})]
        width = max(len(name) for name, _ in rows)
        print_styled(((f"{name:{width}}  ", "bold"), (one_line(value or "-"), "")) for name, value in rows)
    for note in found.notes:
        print(f"slipway: {note}", file=sys.stderr)
    return 0


def _engines(path: Path, versions: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    """Judge for each engine whether an image has its programs, as `check` and `doctor` do."""
    from launcher.checks.rules.images import JUDGED, engine_fit
    from launcher.images.contents import of_file
    from launcher.releases import Contents, with_installed

    contents = with_installed(of_file(path) or Contents(path.name), versions)
    return {engine: engine_fit(contents, engine)._asdict() for engine in JUDGED}


def _engine_rows(engines: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str | None]]:
    words = {True: "yes", False: "no", None: "not known"}
    for engine, fit in engines.items():
        yield f"engine={engine}", f"{words[fit['fits']]}: {fit['why']}"


def _rows(found: Inspected) -> Iterator[tuple[str, str | None]]:
    import shlex

    from launcher.images.inspecting import shown_env
    from launcher.images.progress import megabytes
    from launcher.secrecy import without_secrets

    config, recipe = found.config, found.recipe
    block = found.block
    yield "image", str(found.path)
    yield "from", found.source
    if recipe is not None:
        yield "recipe", f"{recipe.name}:{recipe.flavor}, hash {recipe.hash[:12]}"
    yield "digest", found.digest
    yield "sha256", found.sha256
    yield "size", f"{megabytes(found.size)} ({found.size:,} bytes)"
    yield "compression", f"{block.compression}, blocks of {block.block_size // 1024} KiB"
    yield "created", f"{block.created:%Y-%m-%d %H:%M} UTC"
    yield "made by", found.made_by
    yield "system", " ".join(part for part in (found.release, config.architecture) if part)
    yield "entry point", shlex.join(config.entrypoint)
    yield "command", shlex.join(config.cmd)
    yield "workdir", config.workdir
    yield "volumes", " ".join(map(shlex.quote, config.volumes))
    for index, (name, value) in enumerate(shown_env(config.env).items()):
        yield "" if index else "env", f"{name}={value}"
    for index, (name, value) in enumerate(config.labels.items()):
        yield "" if index else "labels", f"{name}={without_secrets(value)}"


def _verify(args: argparse.Namespace) -> int:
    from launcher.images.progress import told
    from launcher.images.verifying import verify

    paths = chosen_images(args, args.overrides)
    if not paths:
        print("there is no image yet", file=sys.stderr)
    with told(quiet=args.json) as progress:
        seen = []
        for path in paths:
            seen.append(verify(path, deep=args.deep, progress=progress))
            progress.done()
    if args.json:
        print(json.dumps([_verified_json(one) for one in seen], indent=2))
    else:
        _tell(seen)
    problems = [one.problem for one in seen if one.problem is not None]
    if problems and not args.json:
        raise Mistakes(problems)
    return 2 if problems else 0


def _tell(seen: list[Verified]) -> None:
    for one in seen:
        if one.is_whole:
            print_styled([((f"{one_line(str(one.path))}: ", ""), ("whole", "green"))])
        else:
            print_styled([((f"{one_line(str(one.path))}: ", ""), ("not whole", "bold red"))])
        for words in one.checked:
            print(f"  {words}")
        for words in one.notes:
            print(f"  not looked at: {words}")


def _verified_json(one: Verified) -> dict[str, Any]:
    problem = one.problem.message if one.problem else None
    return {
        "path": str(one.path),
        "is_whole": one.is_whole,
        "checked": list(one.checked),
        "problem": problem,
        "notes": list(one.notes),
    }
