"""The contents of an image that is not opened: from its name, the record beside it, or its recipe."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UserError
from launcher.images.references import Kind, Reference
from launcher.images.store import Sidecar, read_exact_sidecar
from launcher.releases import Contents, contents_by_file_name, contents_of, with_installed

if TYPE_CHECKING:
    from launcher.images.recipes import Recipe

BASE_NAME = "org.opencontainers.image.base.name"
_CORE = re.compile(r"megatron[-_]core==(\S+)")


def of_reference(reference: Reference) -> Contents | None:
    """Return what is known of an image by its name; ``None`` for an image that is not NVIDIA's."""
    if reference.kind is Kind.SQUASHFS:
        return contents_by_file_name(reference.path.name)
    return contents_of(reference.registry, reference.name, reference.tag, reference.digest)


def of_recipe(made: Recipe) -> Contents:
    """Return what is known of an image that a recipe becomes: its base's, and the packages that it adds."""
    contents = of_reference(made.base) or Contents(f"the recipe {made.name}")
    cores = [found[1] for each in made.config.python_packages if (found := _CORE.fullmatch(each))]
    return replace(contents, megatron_core=cores[-1]) if cores else contents


def of_file(path: Path) -> Contents | None:
    """Return what the record beside a squashfs tells of it, or else the name of its file."""
    record = read_exact_sidecar(path)
    contents = (_of_record(record) if record is not None else None) or contents_by_file_name(path.name)
    if record is None or record.installed is None:
        return contents
    return with_installed(contents or Contents(path.name), record.installed)


def _of_record(record: Sidecar) -> Contents | None:
    # What a recipe was built on says more than the name that the built image has.
    for name in (record.config.labels.get(BASE_NAME), record.source):
        try:
            contents = of_reference(Reference.parse(name)) if name else None
        except UserError:
            continue
        if contents is not None:
            return contents
    return None
