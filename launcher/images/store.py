"""The store: a directory of squashfs images, each with a record of its identity."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from launcher.errors import UserError, escape
from launcher.images.references import SQUASHFS_SUFFIXES
from launcher.images.squashfs import AUTO, SQUASH_OPTIONS, read_superblock
from slipway.common.files import write_atomic

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RecipeOrigin:
    """The recipe that an image was built from."""

    name: str
    flavor: str
    hash: str


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The image's own configuration (OCI image specification, config.md); `env` are words ``NAME=VALUE``."""

    architecture: str = ""
    env: tuple[str, ...] = ()
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The record of an image: ``NAME.sqsh.json``."""

    source: str
    # Digest of the manifest for this architecture, ``sha256:...``; ``None`` if it is unknown.
    digest: str | None
    sha256: str
    size: int
    # Compression, such as ``lz4``, and the options of mksquashfs for it.
    compression: str
    squash_options: tuple[str, ...]
    block_size: int
    created: str
    made_by: str
    config: ImageConfig = ImageConfig()
    recipe: RecipeOrigin | None = None
    # Modification time in whole Unix seconds: a file of another time is another one, even of this size.
    modified: int | None = None
    # The digest that registries have of a built image.
    pushed: str | None = None
    # The versions that the image's own Python reported; ``None`` if it was not asked.
    installed: Mapping[str, str | None] | None = None

    def write(self, image: Path) -> None:
        """Write it next to its image."""
        record = {"version": _VERSION, **asdict(self)}
        write_atomic(sidecar_path(image), f"{json.dumps(record, indent=2, ensure_ascii=False)}\n")


@dataclass(frozen=True, slots=True)
class Stored:
    """An image of the store; one that others put there has no record."""

    path: Path
    size: int
    modified: float
    owner: int
    sidecar: Sidecar | None


def list_images(store: Path) -> list[Stored]:
    """Return all images of a store, which need not exist, by name; partial files are hidden and left out."""
    try:
        paths = sorted(store.iterdir())
    except FileNotFoundError:
        return []
    images = (path for path in paths if path.name.endswith(SQUASHFS_SUFFIXES) and path.name[0] != ".")
    return [entry for path in images if (entry := read_stored(path)) is not None]


def read_stored(path: Path) -> Stored | None:
    """Return an image with its record; ``None`` if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return Stored(path, status.st_size, status.st_mtime, status.st_uid, read_sidecar(path))


def sidecar_path(image: Path) -> Path:
    """Return the path of an image's record."""
    return image.with_name(f"{image.name}.json")


def read_sidecar(image: Path, *, exact: bool = False) -> Sidecar | None:
    """Return the record of an image; ``None`` without one, or if it is of another file.

    With `exact`, the file's modification time is compared too, and not only its size: a copy has another.
    """
    try:
        sidecar = _parse_record(json.loads(sidecar_path(image).read_bytes()))
        status = image.stat()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if status.st_size != sidecar.size or (exact and sidecar.modified not in (None, int(status.st_mtime))):
        return None
    return sidecar


def _parse_record(record: dict[str, Any]) -> Sidecar:
    """Return a record; raise any of Python's errors if it is invalid."""
    if record["version"] != _VERSION:
        raise ValueError(f"a record of version {record['version']}")
    values = _fields_of(Sidecar, record)
    # The image's own configuration may have nulls, and labels that are no text.
    config = {
        name: value for name, value in _fields_of(ImageConfig, values["config"]).items() if value is not None
    }
    config["labels"] = text_labels(config.get("labels"))
    config |= {name: texts_of(config.get(name)) for name in ("env", "entrypoint", "cmd", "volumes")}
    values["config"] = ImageConfig(**config)
    if values["recipe"] is not None:
        values["recipe"] = RecipeOrigin(**_fields_of(RecipeOrigin, values["recipe"]))
    installed = values.get("installed")
    # Another program may have written anything there.
    if not isinstance(installed, dict) or not all(
        isinstance(text, str | None) for text in installed.values()
    ):
        values["installed"] = None
    return Sidecar(**values)


def texts_of(items: Any) -> tuple[str, ...]:
    """Return a list of texts, or the names of a mapping; raise TypeError for anything else."""
    if isinstance(items, str) or not all(isinstance(item, str) for item in items or ()):
        raise TypeError(f"not a list of texts: {items!r}")
    return tuple(items or ())


def text_labels(labels: Mapping[str, Any] | None) -> dict[str, str]:
    """Return an image's labels as text."""
    return {name: "" if value is None else str(value) for name, value in (labels or {}).items()}


def _fields_of(kind: type[Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a class in a record; those that a later version adds are ignored."""
    values = {item.name: record[item.name] for item in fields(kind) if item.name in record}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def record_installed(image: Path, installed: Mapping[str, str | None]) -> None:
    """Write the versions in an image into its record, if it has one that the user may change."""
    record = read_sidecar(image, exact=True)
    if record is not None and record.installed != installed:
        with contextlib.suppress(OSError, UserError):
            replace(record, installed=dict(installed)).write(image)


def match_stored(entry: Stored, digest: str | None, compression: str) -> tuple[bool, str]:
    """Return if a file with the name of an image serves as that image, and a message for the user.

    Any compression will do for ``auto``.
    """
    name = escape(entry.path.name)
    try:
        read_superblock(entry.path)
    except UserError as error:
        return False, f"{error.message}: imported again"
    except OSError as error:
        return False, f"{name}: {(error.strerror or str(error)).lower()}: imported again"
    record, by_force = entry.sidecar, "(--force imports it again)"
    if record is None:
        return True, f"{name} has no record: reused by its name {by_force}"
    if digest is None or record.digest is None:
        return True, f"{name} is reused by its name: its digest is unknown {by_force}"
    if record.digest != digest:
        return False, f"the image has changed: it was {record.digest}, and is {digest}"
    if compression not in (AUTO, record.compression):
        return False, f"{name} is packed with {record.compression}: packed again"
    if compression != AUTO and record.squash_options != SQUASH_OPTIONS[compression]:
        return False, f"{name} is packed with {' '.join(record.squash_options)}: packed again"
    return True, ""
