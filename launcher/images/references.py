"""Names of images: one parsed form of the names that people, Pyxis, Enroot and skopeo use.

A registry's image is `nvcr.io#nvidia/nemo:25.07` for Pyxis and `nvcr.io/nvidia/nemo:25.07` for docker.
Without the `#`, Enroot before 4.0 requests an image `nvcr.io/nvidia/nemo` of Docker Hub: we always write it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from launcher.errors import UserError, absolute_path, literal, nearest
from launcher.releases import NVIDIA, Contents, contents_by_file_name, contents_of

DOCKER_HUB = "docker.io"
_HUB_NAMES = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
_HUB_LIBRARY = "library/"  # where Docker Hub keeps the images without an owner

SQUASHFS_SUFFIXES = (".sqsh", ".squashfs", ".sqfs")
_ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")


class Kind(StrEnum):
    """The place of an image: a registry, an engine's own storage, a directory or a file."""

    REGISTRY = "docker"
    DOCKER_ENGINE = "dockerd"
    PODMAN = "podman"  # the storage that podman and buildah share
    OCI_DIRECTORY = "oci"
    OCI_ARCHIVE = "oci-archive"
    DOCKER_ARCHIVE = "docker-archive"
    SQUASHFS = "squashfs"


# The transports of Enroot and skopeo: the words before `:`.
_TRANSPORTS = {
    "docker": Kind.REGISTRY,
    "dockerd": Kind.DOCKER_ENGINE,
    "docker-daemon": Kind.DOCKER_ENGINE,
    "podman": Kind.PODMAN,
    "containers-storage": Kind.PODMAN,
    "oci": Kind.OCI_DIRECTORY,
    "oci-archive": Kind.OCI_ARCHIVE,
    "docker-archive": Kind.DOCKER_ARCHIVE,
}
_OF_SKOPEO = {
    Kind.REGISTRY: "docker://",
    Kind.DOCKER_ENGINE: "docker-daemon:",
    Kind.PODMAN: "containers-storage:",
}
_FILES = (Kind.OCI_DIRECTORY, Kind.OCI_ARCHIVE, Kind.DOCKER_ARCHIVE)
_FORMS = (
    "an image is REGISTRY#NAME:TAG (nvcr.io#nvidia/nemo:25.07), docker://…, dockerd://NAME:TAG, "
    "podman://NAME:TAG, containers-storage:NAME:TAG, oci:DIR[:TAG], oci-archive:FILE, docker-archive:FILE "
    "or the path of a .sqsh file"
)

# The grammar of the OCI distribution specification.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_DIGEST_AS_TAG = re.compile(r":sha\d+:.*")  # NAME:sha256:…, as Enroot before 4.0 needs it
_REGISTRY = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::\d{1,5})?")
_USER = re.compile(r"[\w.!~*'()%;&=+$,-]+", re.ASCII)  # as Enroot's, without `:`


@dataclass(frozen=True, slots=True)
class Reference:
    """The parsed name of an image."""

    kind: Kind
    # The repository (``nvidia/nemo``), the name in an engine's storage, or a path as it was written.
    name: str
    # Its host and port, `docker.io` for Docker Hub; ``None`` for the other kinds.
    registry: str | None = None
    tag: str | None = None
    # ``sha256:…``: the image itself, independent of its tag.
    digest: str | None = None
    # The user of the registry, such as ``$oauthtoken``; the password is in a credentials file.
    user: str | None = None

    @classmethod
    def parse(cls, text: str, key: str | None = None) -> Reference:
        """Parse an image's name in any of its forms; `key` is the configuration's, for the message.

        Raise UserError for other forms; a password in it is not shown.
        """
        return _Parser(text, key).parse()

    def __str__(self) -> str:
        """Return the name as users write it; parsing that gives the same reference."""
        if self.kind is Kind.SQUASHFS:
            return self.name
        if self.kind in _FILES:
            return f"{self.kind}:{self._add_tag(self.name)}"
        pinned = f"@{self.digest}" if self.digest else ""
        if self.kind is Kind.REGISTRY:
            return f"{self._host}{self._add_tag(self._short)}{pinned}"
        return f"{self.kind}://{self._add_tag(self.name)}{pinned}"

    @property
    def for_pyxis(self) -> str | None:
        """The value of `--container-image`; ``None`` for an image that nodes cannot fetch by themselves."""
        if self.kind is Kind.REGISTRY:
            # Every Enroot sends a digest in a tag's place on to the registry; `@` is read from 4.0 on.
            return f"{self._host}{self._short}:{self.digest or self.tag}"
        return str(self.path) if self.kind is Kind.SQUASHFS else None

    @property
    def for_enroot(self) -> str | None:
        """The URI of `enroot import`; ``None`` for an image that Enroot does not read."""
        if self.kind is Kind.REGISTRY:
            return f"docker://{self.for_pyxis}"
        if self.kind in (Kind.DOCKER_ENGINE, Kind.PODMAN) and self.digest is None:
            return f"{self.kind}://{self._add_tag(self.name)}"
        return None

    @property
    def for_skopeo(self) -> str | None:
        """The name that skopeo, podman and buildah take; ``None`` for a squashfs."""
        if self.kind in _FILES:
            return f"{self.kind}:{self._add_tag(str(self.path))}"
        transport = _OF_SKOPEO.get(self.kind)
        return f"{transport}{self.for_build}" if transport else None

    @property
    def for_build(self) -> str:
        """The name as in a Dockerfile's FROM: registry, name, tag and digest, for every kind."""
        name = f"{self.registry}/{self.name}" if self.registry else self.name
        # A digest decides; skopeo does not read a tag as well.
        return f"{name}@{self.digest}" if self.digest else self._add_tag(name)

    @property
    def file_name(self) -> str:
        """The squashfs' name: `nvidia+nemo+24.07.sqsh`, as Enroot calls it.

        Images of other registries have the registry in front, so that two of one name do not share a file.
        """
        if self.kind is Kind.SQUASHFS:
            return self.path.name
        if self.kind in _FILES:
            base = self.path.name
            stem = next((base.removesuffix(end) for end in _ARCHIVE_SUFFIXES if base.endswith(end)), base)
            return _make_file_name([stem, self.tag])
        name = self._short
        # Docker Hub's own images and NVIDIA's are known by their names alone.
        is_nvidia = self.registry == NVIDIA and not _is_registry(name.split("/")[0])
        if self.kind is Kind.REGISTRY and name == self.name and not is_nvidia:
            name = f"{self.registry}/{name}"
        algorithm, _, digits = (self.digest or "").partition(":")
        return _make_file_name([name, self.tag, f"{algorithm}-{digits[:12]}" if digits else None])

    @property
    def path(self) -> Path:
        """The absolute path of a file or a directory."""
        return absolute_path(self.name)

    @property
    def is_pinned(self) -> bool:
        """True if a digest names it, so that it will be the same image tomorrow."""
        return self.digest is not None

    def pin(self, digest: str) -> Reference:
        """Return the same image, pinned to a digest."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is no digest")
        return replace(self, digest=digest)

    @property
    def _host(self) -> str:
        """The user and the registry with its final `#`; Docker Hub needs none."""
        return f"{self.user}@" * bool(self.user) + f"{self.registry}#" * (self.registry != DOCKER_HUB)

    @property
    def _short(self) -> str:
        return self.name.removeprefix(_HUB_LIBRARY) if self.registry == DOCKER_HUB else self.name

    def _add_tag(self, name: str) -> str:
        return f"{name}:{self.tag}" if self.tag else name


def _make_file_name(parts: list[str | None]) -> str:
    return re.sub(r"[/:@]", "+", "+".join(part for part in parts if part)) + ".sqsh"


def _is_registry(part: str) -> bool:
    """Return True if the first part of a name is a host, by docker's rule."""
    return "." in part or ":" in part or part == "localhost"


class _Parser:
    """A parser of one text."""

    def __init__(self, text: str, key: str | None) -> None:
        self._text, self._key = text, key

    def parse(self) -> Reference:
        text = self._text
        if not text.strip() or text != text.strip() or not text.isprintable():
            raise self._mistake("not the name of an image")
        if text.startswith(("/", "./", "../", "~")) or (
            text.endswith((*SQUASHFS_SUFFIXES, ".sif")) and ":" not in text
        ):
            if text.endswith(_ARCHIVE_SUFFIXES):
                names = f"oci-archive:{text}, or docker-archive:{text}"
                raise self._mistake("an archive must be named with its kind", names)
            return Reference(Kind.SQUASHFS, text)
        word, colon, rest = text.partition(":")
        kind = _TRANSPORTS.get(word) if colon else None
        if rest.startswith("//") and kind is None:
            hint = nearest(word, _TRANSPORTS)
            # The whole text is not shown: a web address may have a password in it.
            raise UserError(
                f"{self._key or 'image'}={literal(f'{word}://…')}: there is no such transport",
                key=self._key,
                hint=f"did you mean {hint[0]}://…?" if hint else _FORMS,
            )
        if kind in _FILES:
            path, _, tag = rest.partition(":")
            if not path:
                raise self._mistake("a path is missing")
            if tag and kind is Kind.OCI_DIRECTORY:
                self._check(_TAG, tag, "tag")
            return Reference(kind, path, tag=tag or None)
        if kind is None or (kind is Kind.REGISTRY and not rest.startswith("//")):
            return self._registry(text)
        rest = rest.removeprefix("//")
        return self._registry(rest) if kind is Kind.REGISTRY else self._parse_stored(kind, rest)

    def _parse_stored(self, kind: Kind, rest: str) -> Reference:
        name, tag, digest = self._split(rest)
        host, _, below = name.partition("/")
        if below and _is_registry(host):
            self._check(_REGISTRY, host, "registry")
        else:
            below = name
        self._check_name(below)
        return Reference(kind, name, tag=tag or (None if digest else "latest"), digest=digest)

    def _registry(self, rest: str) -> Reference:
        user, rest = self._user(rest)
        if "#" in rest:
            registry, _, name = rest.partition("#")
        else:
            registry, _, name = rest.partition("/")
            if not name or not _is_registry(registry):
                registry, name = DOCKER_HUB, rest
        self._check(_REGISTRY, registry, "registry")
        name, tag, digest = self._split(name)
        if registry in _HUB_NAMES:
            registry = DOCKER_HUB
            name = name if "/" in name else f"{_HUB_LIBRARY}{name}"
        self._check_name(name)
        tag = tag or (None if digest else "latest")
        return Reference(Kind.REGISTRY, name, registry, tag, digest, user)

    def _user(self, rest: str) -> tuple[str | None, str]:
        """Split `USER@` off the front; the other `@` is a digest's."""
        before, at, after = rest.partition("@")
        if not at or re.match(r"sha\d+:", after):
            return None, rest
        if ":" in before:
            raise UserError(
                f"{self._key or 'image'}: a password does not belong in an image's name",
                key=self._key,
                hint="it belongs in ~/.config/enroot/.credentials: machine HOST login USER password …",
            )
        self._check(_USER, before, "user")
        return before, after

    def _split(self, rest: str) -> tuple[str, str | None, str | None]:
        """Split `NAME[:TAG][@DIGEST]`."""
        rest, at, digest = rest.partition("@")
        if not at and (match := _DIGEST_AS_TAG.search(rest)):
            rest, at, digest = rest[: match.start()], "@", match[0][1:]
        if at:
            self._check(_DIGEST, digest, "digest")
        before, colon, tag = rest.rpartition(":")
        # A colon before a `/` is a port's.
        if colon and "/" not in tag:
            self._check(_TAG, tag, "tag")
            return before, tag, digest or None
        return rest, None, digest or None

    def _check_name(self, name: str) -> None:
        if _NAME.fullmatch(name):
            return
        lower = name.lower()
        hint = self._text.replace(name, lower) if _NAME.fullmatch(lower) else _FORMS
        why = f"the names of images are lower case, and {literal(name)} is not" if lower != name else None
        raise self._mistake(why or f"{literal(name)} is not the name of an image", hint)

    def _check(self, pattern: re.Pattern[str], part: str, what: str) -> None:
        if pattern.fullmatch(part):
            return
        hints = {
            "digest": "a digest is sha256: and 64 hexadecimal digits",
            "tag": "a tag is letters, digits, `_`, `.` and `-`, 128 at most",
        }
        raise self._mistake(f"{literal(part)} is no {what}", hints.get(what, _FORMS))

    def _mistake(self, why: str, hint: str = _FORMS) -> UserError:
        return UserError(f"{self._key or 'image'}={literal(self._text)}: {why}", key=self._key, hint=hint)


def contents_of_reference(reference: Reference) -> Contents | None:
    """Return an NVIDIA image's contents by its name; ``None`` for other images."""
    if reference.kind is Kind.SQUASHFS:
        return contents_by_file_name(reference.path.name)
    return contents_of(reference.registry, reference.name, reference.tag, reference.digest)
