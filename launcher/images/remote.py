"""What an image is before it is fetched: its digest, its sizes and how it wants to be started."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UserError, one_line
from launcher.images import tools
from launcher.images.references import DOCKER_HUB, Kind, Reference
from launcher.images.store import ImageConfig

# As images name them (Go's GOARCH).
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

# How much larger layers become when they are unpacked: of Python, libraries and CUDA gzip makes a half to a
# third.
_UNPACKED = {"gzip": 3.0, "zstd": 3.5}
_PLAIN = 1.0

# For a hint alone.
_LISTING_PATIENCE = "20s"


@dataclass(frozen=True, slots=True)
class Access:
    """How a registry is spoken to.

    Attributes
    ----------
    authfile
        Logins, as ``skopeo login`` writes them; skopeo's own file where it is ``None``.
    descriptors
        What skopeo must be given for it to read that file.
    """

    plain_http: bool = False
    authfile: Path | None = None
    descriptors: tuple[int, ...] = ()

    def words(self, prefix: str = "") -> list[str]:
        """The options of skopeo; `prefix` is ``src-`` or ``dest-`` where it copies."""
        given = ["--authfile", str(self.authfile)] if self.authfile else []
        return given + [f"--{prefix}tls-verify=false"] * self.plain_http


@dataclass(frozen=True, slots=True)
class Remote:
    """An image for this machine's architecture.

    Attributes
    ----------
    digest
        Of its manifest: ``sha256:...``.
    packed, unpacked
        Bytes of its layers, and about as many when they are unpacked; 0 where they cannot be told.
    """

    digest: str
    packed: int
    unpacked: int
    config: ImageConfig


def architecture() -> str:
    """This machine's, as images name it."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def look_up_by_skopeo(source: Reference, access: Access) -> Remote:
    """Ask for an image's manifest and configuration, by skopeo; nothing of its layers is fetched.

    Raises
    ------
    UserError
        If there is no such image, or one may not have it, or the registry cannot be reached.
    """
    name = source.for_skopeo or ""
    doing = f"look up {source}"

    def inspect(flag: str) -> str:
        words = ["skopeo", "inspect", *access.words(), flag, name]
        return tools.run(words, doing=doing, names=names_of(source), keep=access.descriptors)

    raw = inspect("--raw")
    manifest = _parsed(raw, name)
    one = _for_this_machine(manifest) if source.kind is Kind.REGISTRY else None
    if one is not None:
        name = source.at(one).for_skopeo or name
        raw = inspect("--raw")
        manifest = _parsed(raw, name)
    config = _parsed(inspect("--config"), name)
    packed, unpacked = _sizes(manifest.get("layers") or ())
    return Remote(f"sha256:{hashlib.sha256(raw.encode()).hexdigest()}", packed, unpacked, config_of(config))


def tags_of(source: Reference, access: Access) -> list[str]:
    """Return the tags of a repository; none where the registry does not list them."""
    words = ["skopeo", "--command-timeout", _LISTING_PATIENCE, "list-tags", *access.words()]
    words.append(f"docker://{source.registry}/{source.name}")
    try:
        told = tools.run(words, doing=f"list the tags of {source.name}", keep=access.descriptors)
        tags = json.loads(told)["Tags"]
    except (UserError, ValueError, TypeError, KeyError):
        return []
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


def names_of(source: Reference) -> dict[str, str]:
    """What an image of a registry is called in advice."""
    if source.registry is None:
        return {}
    # Enroot asks Docker Hub's logins of another host.
    machine = "auth.docker.io" if source.registry == DOCKER_HUB else host_of(source.registry)
    return {"REGISTRY": source.registry, "HOSTNAME": machine, "NAME": source.name}


def host_of(registry: str) -> str:
    """A registry without its port."""
    return re.sub(r":\d+$", "", registry)


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"{one_line(name)}: what it answers is no manifest", hint="is it a container registry?"
        )
    return found


def _for_this_machine(manifest: Mapping[str, Any]) -> str | None:
    """The digest of this machine's image in a list of those of several architectures."""
    listed = manifest.get("manifests") or ()
    wanted = architecture()
    for entry in listed:
        platform_of = entry.get("platform") or {}
        if platform_of.get("architecture") == wanted and platform_of.get("os", "linux") == "linux":
            return str(entry["digest"])
    if listed:
        names = sorted({str((entry.get("platform") or {}).get("architecture")) for entry in listed})
        raise UserError(
            f"the image is made for {', '.join(names)}, and this machine is {wanted}",
            hint="import it on a machine of that architecture, or choose another tag",
        )
    return None


def _sizes(layers: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    packed, unpacked = 0, 0.0
    for layer in layers:
        size, kind = int(layer.get("size") or 0), str(layer.get("mediaType") or "")
        packed += size
        unpacked += size * next((part for name, part in _UNPACKED.items() if kind.endswith(name)), _PLAIN)
    return packed, int(unpacked)


def config_of(record: Mapping[str, Any]) -> ImageConfig:
    """What an image's configuration says (OCI image specification, config.md)."""
    given = record.get("config") or {}
    return ImageConfig(
        architecture=str(record.get("architecture") or ""),
        env=tuple(given.get("Env") or ()),
        workdir=str(given.get("WorkingDir") or ""),
        entrypoint=tuple(given.get("Entrypoint") or ()),
        cmd=tuple(given.get("Cmd") or ()),
        volumes=tuple(given.get("Volumes") or ()),
        labels=dict(given.get("Labels") or {}),
    )
