"""Find faults of a job's image: a missing or torn file, a registry's that all nodes fetch at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.checks.facts import ImageFacts, MissingPath
from launcher.checks.gathering.path_resolver import PathResolver, opened, why_unreadable
from launcher.drafting import Draft
from launcher.errors import UserError, nearest_files
from launcher.releases import contents_by_file_name

if TYPE_CHECKING:
    from launcher.images.resolve import ResolvedImage
    from launcher.releases import Contents

_SUFFIXES = (".sqsh", ".squashfs", ".sif")
# Behind the interpreter's line of a file in the Singularity Image Format (sylabs/sif, pkg/sif/sif.go).
_SIF_MAGIC = slice(32, 41)
_NOT_RECORDED = "the contents of {} are not recorded: slipway image inspect --deep records them"


def find_missing_image(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return faults of an image that is a file; Enroot checks those of registries."""
    container = resolver.plan.job.container
    if container is None or not resolver.in_container or not container.is_file:
        return None
    path = Path(container.image)
    choice = _find_built_image(resolver.draft, container.image)
    registry = "an image of a registry is such as container=nvcr.io#nvidia/nemo:25.07"
    options = container.options
    fix = f"{nearest_files(path, _SUFFIXES)}\n{registry}"
    # Imported late: many launches have no image that is a file.
    from launcher.images.squashfs import SUPERBLOCK_BYTES, squashfs_fault

    try:
        if options.runtime != "pyxis" and options.stage_to is None and path.is_dir():
            return ()  # Apptainer starts a directory too
        with opened(path) as stream:
            header = stream.read(SUPERBLOCK_BYTES)
            fault = squashfs_fault(header, stream.seek(0, 2))
            # A user's own file is never to be overwritten.
            fix = "import it again, to another file: slipway image import IMAGE --output FILE"
        if header[_SIF_MAGIC] == b"SIF_MAGIC":
            fault = "an image of Apptainer's (SIF), which Pyxis does not start"
            fix = "container_options.runtime=apptainer, or singularity"
            if options.runtime != "pyxis":
                return ()
    except OSError as error:
        fault = why_unreadable(error)
    if fault is None:
        return ()
    if choice is not None:
        why = f"its image is {path}: {fault}"
        return (resolver.missing("container", choice.text, why, _build_command(choice)),)
    return (resolver.missing("container", container.image, fault, fix, at=path),)


def _find_built_image(draft: Draft, image: str) -> ResolvedImage | None:
    """Return the image from which we made a file in `images_dir`; None if the user gave its path."""
    return None if draft.composition.config.container == image else draft.image


def _build_command(choice: ResolvedImage) -> str:
    return f"slipway {shlex.join(choice.command)}; or the same launch with --build"


def image_facts(draft: Draft, *, look: bool) -> ImageFacts | None:
    """Return the known contents of the job's image, if the job trains in one.

    Without `look` the record of an image file is not read; its contents are then not reported as unknown.
    """
    resolver = PathResolver(draft)
    container = resolver.plan.job.container
    if container is None or not resolver.in_container or resolver.plan.job.config is None:
        return None
    contents = _contents(draft, container.image, look=look)
    if contents is None and container.is_file and not look:
        return None
    missing = {} if contents is not None else {"contents": _NOT_RECORDED.format(container.image)}
    return ImageFacts(contents, missing)


def _contents(draft: Draft, image: str, *, look: bool) -> Contents | None:
    # Imported late: many launches have no image, and most images are known by their names.
    from launcher.images.references import Reference, contents_of_reference

    if not image.startswith("/"):
        # If the user named tag and digest, the job has the digest only.
        try:
            return contents_of_reference(Reference.parse(draft.composition.config.container or image))
        except UserError:  # Enroot judges other names
            return None
    from launcher.images.resolve import contents_of_file

    if look:
        contents = contents_of_file(Path(image))
        if contents is not None and contents.is_certain:
            return contents
    choice = _find_built_image(draft, image)
    return choice.contents if choice is not None else contents_by_file_name(Path(image).name)


def find_fetched_at_once(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return a registry's image that every node would import before its tasks start."""
    container, most = resolver.plan.job.container, max(resolver.plan.job.resources.node_counts)
    if container is None or not resolver.in_container or container.is_file:
        return None
    # The nodes keep a named container.
    if most < 2 or container.options.name is not None:
        return ()
    choice = resolver.draft.image
    if choice is None or choice.stored is None:
        return ()
    why = f"each of the job's {most} nodes fetches and unpacks it by itself, all at once"
    fix = f"once for all of them: {_build_command(choice)}"
    if choice.stored.is_file():
        fix = f"it is a file already: container={choice.stored}"
    return (MissingPath("container", choice.text, why, False, fix),)
