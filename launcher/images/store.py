"""Images as files: a directory of squashfs files, each with a record of what it is beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.images.references import SQUASHFS_SUFFIXES
from supervisor.files import write_atomic

SUFFIXES = SQUASHFS_SUFFIXES

_SIDECAR_SUFFIX = ".json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class RecipeOrigin:
    """The recipe that an image was built from."""

    name: str
    flavor: str
    hash: str


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What the image says of itself: how it wants to be started.

    `env` are words such as ``PATH=/usr/bin``; empty where the image says nothing.
    """

    architecture: str = ""
    env: tuple[str, ...] = ()
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The record of an image: ``NAME.sqsh.json``.

    Attributes
    ----------
    source
        The reference that it was imported from.
    digest
        Of the manifest for this architecture, ``sha256:...``; ``None`` where it could not be told.
    sha256, size
        Of the file.
    compression, squash_options
        Such as ``lz4``, and the words for mksquashfs that say so.
    created
        When, in UTC, ISO 8601.
    made_by
        The programs that made it, with their versions.
    modified
        When the file was written last, in whole seconds since 1970: a file of another time is not this one,
        whatever its size. ``None`` in records of earlier versions.
    pushed
        The digest that registries have of a built image; ``None`` where it was not pushed.
    installed
        What the image's own Python told is installed; ``None`` where nobody asked it.
    """

    source: str
    digest: str | None
    sha256: str
    size: int
    compression: str
    squash_options: tuple[str, ...]
    block_size: int
    created: str
    made_by: str
    config: ImageConfig = ImageConfig()
    recipe: RecipeOrigin | None = None
    modified: int | None = None
    pushed: str | None = None
    installed: Mapping[str, str | None] | None = None

    def write(self, image: Path) -> None:
        """Write it beside its image."""
        record = {"version": _VERSION, **dataclasses.asdict(self)}
        write_atomic(sidecar_path(image), f"{json.dumps(record, indent=2, ensure_ascii=False)}\n")


@dataclass(frozen=True, slots=True)
class Stored:
    """An image of the store. One that others put there has no record."""

    path: Path
    size: int
    modified: float
    sidecar: Sidecar | None


@dataclass(frozen=True, slots=True)
class Store:
    """A directory of images. It need not be there yet."""

    directory: Path

    def path(self, file_name: str) -> Path:
        return self.directory / file_name

    def entries(self) -> list[Stored]:
        """All images, by name; what is half written has a hidden name and is none."""
        return sorted(self._found(), key=lambda entry: entry.path.name)

    def _found(self) -> Iterator[Stored]:
        try:
            paths = [path for path in self.directory.iterdir() if path.name.endswith(SUFFIXES)]
        except FileNotFoundError:
            return
        for path in paths:
            entry = None if path.name.startswith(".") else stored(path)
            if entry is not None:
                yield entry


def stored(path: Path) -> Stored | None:
    """What there is of an image; ``None`` if it is not there, or no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Stored(path, found.st_size, found.st_mtime, read_sidecar(path)) if path.is_file() else None


def sidecar_path(image: Path) -> Path:
    return image.with_name(image.name + _SIDECAR_SUFFIX)


def read_sidecar(image: Path) -> Sidecar | None:
    """The record of an image; ``None`` if it has none, or one that is not of the file that is there."""
    try:
        record = json.loads(sidecar_path(image).read_text(encoding="utf-8"))
        sidecar = _from_record(record)
        return sidecar if image.stat().st_size == sidecar.size else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def read_exact_sidecar(image: Path) -> Sidecar | None:
    """The record of an image, if neither the size nor the time of the file is another one's."""
    found = read_sidecar(image)
    try:
        is_same = found is not None and found.modified in (None, int(image.stat().st_mtime))
    except OSError:
        return None
    return found if is_same else None


def remember_installed(image: Path, installed: Mapping[str, str | None]) -> None:
    """Write what is installed in an image into its record, where it has one that the user may change."""
    record = read_exact_sidecar(image)
    if record is None or record.installed == installed:
        return
    with contextlib.suppress(OSError, UserError):
        dataclasses.replace(record, installed=dict(installed)).write(image)


def _from_record(record: dict[str, Any]) -> Sidecar:
    """Fields that a later version has in addition are passed over."""
    if record["version"] != _VERSION:
        raise ValueError(f"a record of version {record['version']}")
    values = _known(Sidecar, record)
    values["config"] = ImageConfig(**_known(ImageConfig, values["config"]))
    if values["recipe"] is not None:
        values["recipe"] = RecipeOrigin(**_known(RecipeOrigin, values["recipe"]))
    values["installed"] = _texts(values.get("installed"))
    return Sidecar(**values)


def _known(kind: type[Any], record: Mapping[str, Any]) -> dict[str, Any]:
    names = [each.name for each in dataclasses.fields(kind) if each.name in record or _is_needed(each)]
    values = {name: record[name] for name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _texts(value: Any) -> dict[str, str | None] | None:
    """Return what is a table of texts; ``None`` for what another program wrote there, which nobody asked."""
    is_table = isinstance(value, dict) and all(isinstance(each, str | None) for each in value.values())
    return value if is_table else None


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.name not in ("modified", "pushed", "installed")  # what earlier versions did not write
