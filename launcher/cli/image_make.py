"""`slipway image render`, `build` and `import`: Dockerfiles, and images of the store."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from launcher.cli import image_options as shared
from launcher.cli.options import Verbs, add_option, add_overrides, add_tree_options, add_verb
from launcher.config.overrides import recipe_and_flavor
from launcher.errors import UserError, absolute_path, escape
from launcher.images.backends import BACKENDS
from launcher.images.importing import Imported, ImportOptions, import_image, reuse
from launcher.images.progress import show_progress
from launcher.images.references import Kind, Reference
from launcher.images.squashfs import AUTO, COMPRESSIONS, is_squashfs
from launcher.images.store import read_stored
from launcher.images.tools import BUILDERS
from launcher.secrecy import redacted
from launcher.ui.tables import print_code
from launcher.ui.terminal import print_json, print_message

if TYPE_CHECKING:
    from launcher.images.recipes import Recipe

_RENDER = """\
Print the Dockerfile of a recipe.

examples:
  slipway image render nemo                              the run flavor
  slipway image render nemo:dev                          with editors, tmux and git
  slipway image render nemo-aws image.versions.nccl=2.27.7-1
  slipway image render nemo > Dockerfile
  slipway image render nemo --json | jq -r .file_name    its file name in the store

docs/recipes.md describes the recipes and their keys.

exit code:
  0  printed
  2  a mistake in the arguments
"""

_BUILD = """\
Build a recipe, and import it.

examples:
  slipway image build nemo                               then: slipway launch ... container=nemo
  slipway image build nemo:dev                           with editors, tmux and git
  slipway image build nemo image.digest=sha256:0123...   on a base that stays as it is
  slipway image build mine --config-dir conf --template-dir containers
  slipway image build megatron --builder buildah images_dir=/shared/images
  slipway image build nemo --on-cluster cluster=bcm      as a job

Nothing is done if the recipe, as it is now, is in the store already. The builder is the first of docker,
podman and buildah that works here; the last two need no daemon and no rights. The image also stays in the
storage of the builder, for `slipway image push` and as a cache. The base is fetched with the builder's
logins, or with Enroot's (~/.config/enroot/.credentials) if podman and buildah have no login.

exit code:
  0    the image is in the store
  2    it could not be built or imported, and why; the store is unchanged
  130  interrupted; the store is unchanged
"""

_IMPORT = """\
Import an image: through Enroot where it is installed, else by skopeo, umoci and mksquashfs.

examples:
  slipway image import nvcr.io#nvidia/nemo:25.07           as Pyxis writes it; with a / instead of # too
  slipway image import docker://nvcr.io/nvidia/nemo:25.07
  slipway image import podman://localhost/me/nemo:1        from podman's storage; dockerd:// from docker's
  slipway image import oci-archive:nemo.tar --output /shared/images/nemo.sqsh
  slipway image import nvcr.io#nvidia/nemo:25.07 images_dir=/shared/images
  slipway image import nvcr.io#nvidia/nemo:25.07 --on-cluster cluster=bcm    as a job

Nothing is done if the image is in the store already, with this digest. Others who import it at the same time
wait, and take the same file. It is renamed to its name at the end: no job ever sees a part of it.

Logins are Enroot's (~/.config/enroot/.credentials) or those of `skopeo login`, `docker login nvcr.io`.

exit code:
  0    the image is in the store
  2    it could not be imported, and why; nothing is left behind
  130  interrupted; nothing is left behind
"""

RECIPE_HELP = "a recipe, NAME[:FLAVOR]: nemo, nemo-aws, megatron or one of your own"
_OBJECT_WITHOUT_PROGRESS = "print an object, and no progress"

# Options that the job gets too. Paths are made absolute: it starts in another directory.
_JOB_OPTIONS = ("temp_dir", "authfile", "template_dir", "compression", "via", "builder")
_JOB_FLAGS = ("force", "plain_http")


def add_parsers(verbs: Verbs) -> None:
    render = add_verb(verbs, "render", _render, "print a recipe's Dockerfile", _RENDER)
    add_option(render, "--json", "print an object with the names and the hash too")
    _add_recipe(render)

    build = add_verb(verbs, "build", _build, "build a recipe into the store", _BUILD)
    add_option(build, "--json", _OBJECT_WITHOUT_PROGRESS)
    _add_recipe(build)
    add_option(build, "--images-dir DIR", "the store (default: images_dir)", type=absolute_path)
    text = f"{', '.join(BUILDERS)} (default: image.builder, or the first that works)"
    add_option(build, "--builder NAME", text, choices=BUILDERS)
    text = "build only if this is the file name of the recipe as it is now"
    add_option(build, "--expect FILE", text, type=str)
    _add_import_options(build)

    parser = add_verb(verbs, "import", _import, "import an image into the store", _IMPORT)
    add_option(parser, "--json", _OBJECT_WITHOUT_PROGRESS)
    parser.add_argument("source", metavar="REFERENCE", help="the image, such as nvcr.io#nvidia/nemo:25.07")
    add_overrides(parser, shared.OVERRIDES_HELP)
    shared.add_store(parser)
    add_option(parser, "--output FILE", "the file, instead of one in the store", type=absolute_path)
    text = f"{', '.join(BACKENDS)} (default: {AUTO})"
    add_option(parser, "--via BACKEND", text, choices=BACKENDS, default=AUTO)
    _add_import_options(parser)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=RECIPE_HELP)
    add_overrides(parser, "KEY=VALUE, such as image.digest=sha256:...")
    add_tree_options(parser, shared.DOCKERFILES)


def _add_import_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--force", "make it again, even if it is there")
    text = f"{', '.join(COMPRESSIONS)} (default: {AUTO}, what suits the file system of the image)"
    add_option(parser, "--compression NAME", text, choices=COMPRESSIONS, default=AUTO)
    text = "where to unpack (default: where there is most room)"
    add_option(parser, "--temp-dir DIR", text, type=absolute_path)
    shared.add_access(parser)
    group = parser.add_argument_group("as a job", "without GPUs, as image_job and stage_cluster.image say")
    add_option(group, "--on-cluster", "submit it, and do not wait")
    add_option(group, "--dry-run", "print the job's script; submit nothing")


def _render(args: argparse.Namespace) -> None:
    own, others = shared.split_overrides(args.overrides)
    if others:
        raise UserError(f"{redacted(others[0])}: not a key of a recipe", hint="such as image.tag=2")
    recipe = _read_recipe(args, own)
    if args.json:
        names = ("name", "flavor", "hash", "file_name", "image_name", "labels", "dockerfile")
        record = {name: getattr(recipe, name) for name in names}
        print_json({**record, "base": str(recipe.base), "warnings": list(recipe.warnings)})
    else:
        print_code(recipe.dockerfile, "docker")


def _read_recipe(args: argparse.Namespace, overrides: list[str]) -> Recipe:
    """Read the recipe with its overrides, and print its warnings."""
    from launcher.images.recipes import read_recipe

    named = recipe_and_flavor(args.recipe)
    if named is None:
        word = redacted(args.recipe)
        raise UserError(
            f"{word}: not the name of a recipe",
            hint=f"a recipe is NAME[:FLAVOR]; an image of a registry: slipway image import {word}",
        )
    recipe = read_recipe(*named, overrides, args.config_dirs, args.template_dir)
    for warning in recipe.warnings:
        print_message(f"warning: {warning}")
    return recipe


def _build(args: argparse.Namespace) -> None:
    from launcher.images.building import build_into_store  # late, as it composes configurations

    _check_dry_run(args)
    own, others = shared.split_overrides(args.overrides)
    store = shared.find_store(args, others)
    recipe = _read_recipe(args, own)
    if args.expect not in (None, recipe.file_name):
        return _print_imported(_find_built(args.expect, store, recipe), args.json)
    if args.on_cluster:
        # The recipe may change while the job waits.
        expected = f"--expect={recipe.file_name}"
        words = ("build", args.recipe, *own, f"--images-dir={store}", expected)
        return _submit(args, words, store / recipe.file_name, others)
    with show_progress(quiet=args.json) as progress:
        options = _import_options(args)
        imported = build_into_store(
            recipe, store, options, progress, builder=args.builder, config_dirs=args.config_dirs
        )
    return _print_imported(imported, args.json)


def _find_built(expected: str, store: Path, recipe: Recipe) -> Imported:
    """Return the expected file of a recipe that has changed since."""
    entry = read_stored(store / expected)
    if entry is None or not is_squashfs(entry.path):
        raise UserError(
            f"--expect={expected}: the recipe {recipe.name} becomes {recipe.file_name} now: it has changed"
            " since, or a file that is copied into the image has",
            hint="launch again, or --on-cluster again; or restore the recipe",
        )
    return reuse(entry)


def _import(args: argparse.Namespace) -> None:
    _check_dry_run(args)
    source = Reference.parse(args.source, "image")
    target = (args.output or shared.find_store(args, args.overrides) / source.file_name).absolute()
    if args.on_cluster:
        words = ("import", _reference_for_job(source), f"--output={target}")
        return _submit(args, words, target, args.overrides)
    with show_progress(quiet=args.json) as progress:
        imported = import_image(source, target, _import_options(args), progress)
    return _print_imported(imported, args.json)


def _reference_for_job(source: Reference) -> str:
    if source.kind in (Kind.PODMAN, Kind.DOCKER_ENGINE):
        raise UserError(
            f"{source} is in the storage of this machine, which a job does not see",
            hint="without --on-cluster; or push it first: slipway image push",
        )
    # The job starts in another directory.
    return str(source if source.kind is Kind.REGISTRY else replace(source, name=str(source.path)))


def _import_options(args: argparse.Namespace) -> ImportOptions:
    names = ("compression", "temp_dir", "force", "plain_http", "authfile")
    return ImportOptions(via=getattr(args, "via", AUTO), **{name: getattr(args, name) for name in names})


def _print_imported(imported: Imported, as_json: bool) -> None:
    """Print the image, and how to launch with it."""
    record, size = imported.sidecar, imported.path.stat().st_size
    if as_json:
        values = {
            "path": str(imported.path),
            "digest": imported.digest,
            "reused": imported.reused,
            "sha256": record and record.sha256,
            "size": size,
            "compression": record and record.compression,
            "notes": list(imported.notes),
        }
        print_json(values)
        return
    path = escape(str(imported.path))
    was_there = "there already: " if imported.reused else ""
    print(f"{was_there}{path} ({decimal(size)}{f', {record.compression}' if record else ''})")
    print(f"use it: container={path}")


# --- as a job


def _check_dry_run(args: argparse.Namespace) -> None:
    if args.dry_run and not args.on_cluster:
        hint = "with --on-cluster; a Dockerfile: slipway image render"
        raise UserError("--dry-run shows the script of a job", hint=hint)


def _submit(args: argparse.Namespace, words: Sequence[str], target: Path, overrides: Sequence[str]) -> None:
    """Submit a job that runs `slipway` with these words and the options of the call."""
    # Imported late: most images are made on this machine.
    from launcher.cli.launch import print_outcomes
    from launcher.cli.requests import print_drafts, read_request
    from launcher.drafting import draft
    from launcher.launching import launch
    from launcher.stages.image import ImageWork

    work = ImageWork(target.stem, ("image", *words, *_job_options(args)), target)
    request = replace(read_request(args, list(overrides)), work=work)
    job = draft(request)
    if args.dry_run:
        print_drafts([(job, job.script)], "bash")
        return
    launched = launch(job, request)
    print_outcomes([launched], as_json=args.json)
    if not args.json:
        print(f"  then       container={escape(str(target))}")


def _job_options(args: argparse.Namespace) -> Iterator[str]:
    yield from (f"--config-dir={tree.absolute()}" for tree in args.config_dirs)
    for name in (*_JOB_OPTIONS, *_JOB_FLAGS):
        option, value = f"--{name.replace('_', '-')}", getattr(args, name, None)
        if value is True:
            yield option
        elif value:
            yield f"{option}={absolute_path(value) if isinstance(value, Path) else value}"
