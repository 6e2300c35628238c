"""The image of a job: a file that is there and whole; no registry's, which all nodes would fetch at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.checks.facts import ImageFacts, Lack
from launcher.checks.gathering.path_resolver import Ground, opened, tells_of, told
from launcher.drafting import choice_of
from launcher.errors import nearest_files
from launcher.releases import contents_by_file_name, contents_by_name

if TYPE_CHECKING:
    from launcher.images.resolve import ResolvedImage
    from launcher.releases import Contents

_SUFFIXES = (".sqsh", ".squashfs")
_NOT_RECORDED = "nobody recorded what is in {}: slipway image inspect --deep looks, and writes it down"
_REGISTRY = "an image of a registry is such as container=nvcr.io#nvidia/nemo:25.07"


def lost_image(ground: Ground) -> tuple[Lack, ...] | None:
    """An image that is a file must be there, and be one; those of registries are left to Enroot."""
    container = ground.plan.job.container
    if container is None or not ground.in_container or not container.is_file:
        return None
    path = Path(container.image)
    choice = _made_by_us(ground)
    if choice is None and not tells_of(path):
        return (Lack("container", container.image, "not on this machine; every node must have it", False),)
    fix = f"{nearest_files(path, _SUFFIXES)}\n{_REGISTRY}"
    # Imported late: many launches have no image that is a file.
    from launcher.images.squashfs import SUPERBLOCK_BYTES, squashfs_fault

    try:
        with opened(path) as stream:
            why = squashfs_fault(stream.read(SUPERBLOCK_BYTES), stream.seek(0, 2))
            fix = f"make it anew: slipway image import IMAGE --output {shlex.quote(str(path))} --force"
    except OSError as error:
        why = told(error)
    if why is None:
        return ()
    if choice is not None:
        told_of = f"its image is {path}: {why}"
        return (ground.lost("container", choice.text, told_of, certain=True, fix=_made_by(choice, ground)),)
    return (ground.lost("container", container.image, why, certain=ground.tells_of(path), fix=fix),)


def _made_by_us(ground: Ground) -> ResolvedImage | None:
    """What a file in `images_dir` is to be made from; ``None`` where the user gave its path."""
    container = ground.plan.job.container
    assert container is not None
    if ground.made.composition.config.container == container.image:
        return None
    return choice_of(ground.made.composition, ground.made.template_dir)


def _made_by(choice: ResolvedImage, ground: Ground) -> str:
    words = choice.command(ground.made.composition.config_dir, ground.made.template_dir)
    return f"slipway {shlex.join(words)}; or the same launch with --build"


def image_facts(ground: Ground, *, look: bool) -> ImageFacts | None:
    """Return what is known to be in the job's image, if the job trains in one.

    Parameters
    ----------
    look
        Read the record beside an image that is a file; without, nothing is told of such an image.
    """
    container = ground.plan.job.container
    if container is None or not ground.in_container or ground.plan.job.config is None:
        return None
    contents = _contents(ground, container.image, look=look)
    if contents is None and container.is_file and not look:
        return None
    missing = {} if contents is not None else {"contents": _NOT_RECORDED.format(container.image)}
    return ImageFacts(contents, missing)


def _contents(ground: Ground, image: str, *, look: bool) -> Contents | None:
    if not image.startswith("/"):
        # The job is told of a digest alone where the user named a tag as well.
        return contents_by_name(ground.made.composition.config.container or image)
    if look:
        found = _of_file(Path(image))
        if found is not None and found.is_certain:
            return found
    choice = _made_by_us(ground)
    return contents_by_file_name(Path(image).name) if choice is None else _of_choice(choice, ground)


def _of_file(path: Path) -> Contents | None:
    # Imported late: many launches have no image that is a file.
    from launcher.images.resolve import contents_of_file

    return contents_of_file(path)


def _of_choice(choice: ResolvedImage, ground: Ground) -> Contents | None:
    from launcher.images.resolve import cached_recipe, contents_of_recipe, contents_of_reference

    if choice.recipe is not None:
        trees = ground.made.composition.config_dir, ground.made.template_dir
        return contents_of_recipe(cached_recipe(choice.recipe, choice.flavor, *trees))
    return contents_of_reference(choice.source) if choice.source is not None else None


def fetched_at_once(ground: Ground) -> tuple[Lack, ...] | None:
    """Of an image of a registry each node makes a file of its own, before its tasks start."""
    container, most = ground.plan.job.container, max(ground.plan.job.resources.node_counts)
    if container is None or not ground.in_container or container.is_file:
        return None
    # The nodes keep what has a name.
    if most < 2 or container.options.name is not None:
        return ()
    choice = choice_of(ground.made.composition, ground.made.template_dir)
    if choice is None or choice.stored is None:
        return ()
    told_of = f"each of the job's {most} nodes fetches and unpacks it by itself, all at once"
    if choice.stored.is_file():
        fix = f"it is a file already: container={choice.stored}"
    else:
        fix = f"once for all of them: {_made_by(choice, ground)}"
    return (Lack("container", choice.text, told_of, False, fix),)
