"""What an image is: its file, what it says of itself, and where it is from."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.images import squashfs, tools
from launcher.images.store import ImageConfig, RecipeOrigin, read_sidecar
from launcher.images.superblock import Superblock, read_superblock
from launcher.secrecy import MASK, is_secret_name, without_secrets

# Where Enroot leaves what an image says of itself (its src/docker.sh, docker::configure).
_ENVIRONMENT = "etc/environment"
_RC = "etc/rc"
# The second is where the first leads on most systems.
_RELEASES = ("etc/os-release", "usr/lib/os-release")

_PROVENANCE = re.compile(r"# enroot-provenance: (.*)")
_LABEL = re.compile(r"# (\S+) (.*)")
_WORKDIR = re.compile(r"cd (.*?)( && unset OLDPWD.*)?")
_EXEC = re.compile(r"exec (.*)")
_ARGUMENTS = '"$@"'


@dataclass(frozen=True, slots=True)
class Inspected:
    """An image as it lies there.

    Attributes
    ----------
    digest
        Of the image that it was made from, where that is known.
    config
        Labels, environment, working directory, entry point.
    release
        The system in it, such as ``Ubuntu 22.04.4 LTS``.
    notes
        What could not be told, and why.
    """

    path: Path
    size: int
    block: Superblock
    source: str | None
    digest: str | None
    made_by: str | None
    sha256: str | None
    recipe: RecipeOrigin | None
    config: ImageConfig
    release: str | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same for programs, without secrets."""
        config = self.config
        return {
            "path": str(self.path),
            "size": self.size,
            "created": self.block.created.isoformat().replace("+00:00", "Z"),
            "compression": self.block.compression,
            "block_size": self.block.block_size,
            "source": self.source,
            "digest": self.digest,
            "sha256": self.sha256,
            "made_by": self.made_by,
            "recipe": {name: getattr(self.recipe, name) for name in ("name", "flavor", "hash")}
            if self.recipe
            else None,
            "release": self.release,
            "architecture": config.architecture or None,
            "labels": {name: without_secrets(value) for name, value in config.labels.items()},
            "entrypoint": list(config.entrypoint),
            "cmd": list(config.cmd),
            "workdir": config.workdir or None,
            "volumes": list(config.volumes),
            "env": shown_env(config.env),
            "notes": list(self.notes),
        }


def inspect(path: Path) -> Inspected:
    """Read what an image is from its record, and from the image itself where it has none.

    Raises
    ------
    UserError
        If it is no whole squashfs.
    OSError
        If it cannot be read.
    """
    block = read_superblock(path)
    sidecar = read_sidecar(path)
    texts: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    if tools.which("unsquashfs") is not None:
        texts = squashfs.read_files(path, (_ENVIRONMENT, _RC, *_RELEASES))
    else:
        notes = (f"what is in it was not read: unsquashfs is missing; {tools.how_to_get('unsquashfs')}",)
    source, config = _own_words(texts.get(_RC, ""), texts.get(_ENVIRONMENT, ""))
    release = next((_release(texts[name]) for name in _RELEASES if name in texts), None)
    return Inspected(
        path=path,
        size=path.stat().st_size,
        block=block,
        source=sidecar.source if sidecar else source,
        digest=sidecar.digest if sidecar else None,
        made_by=sidecar.made_by if sidecar else None,
        sha256=sidecar.sha256 if sidecar else None,
        recipe=sidecar.recipe if sidecar else None,
        config=sidecar.config if sidecar else config,
        release=release,
        notes=notes,
    )


def shown_env(env: Sequence[str]) -> dict[str, str]:
    """The variables of an image; what is a secret by its name is not shown."""
    pairs = [word.partition("=")[::2] for word in env]
    return {name: MASK if is_secret_name(name.upper()) else without_secrets(text) for name, text in pairs}


def _own_words(rc: str, environment: str) -> tuple[str | None, ImageConfig]:
    """Where an image is from and how it wants to be started, as Enroot wrote it down in the image."""
    source: str | None = None
    labels: dict[str, str] = {}
    lines = iter(rc.splitlines())
    for line in lines:
        if found := _PROVENANCE.fullmatch(line):
            source = found[1] or None
        elif found := _LABEL.fullmatch(line):
            labels[found[1]] = found[2]
        else:
            break
    workdir, commands = "", []
    for line in (each.strip() for each in lines):
        if not workdir and (found := _WORKDIR.fullmatch(line)):
            workdir = " ".join(_words(found[1]))
        elif found := _EXEC.fullmatch(line):
            commands.append(found[1])
    # With arguments it is the entry point that gets them; without, it is followed by the command.
    entry = next(
        (_words(line.removesuffix(_ARGUMENTS)) for line in commands if line.endswith(_ARGUMENTS)), ()
    )
    whole = next((_words(line) for line in commands if not line.endswith(_ARGUMENTS)), ())
    return source, ImageConfig(
        env=tuple(line for line in environment.splitlines() if "=" in line),
        workdir=workdir,
        entrypoint=entry,
        cmd=whole[len(entry) :],
        labels=labels,
    )


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:  # somebody's own script
        return ()


def _release(text: str) -> str | None:
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return " ".join(_words(value)) or None
    return None
