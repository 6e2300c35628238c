"""The programs that build images: which of them works here, and how each is told what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import UserError, did_you_mean, shown
from launcher.images import tools
from launcher.images.references import Kind, Reference
from launcher.images.remote import Access, architecture

# In the order in which they are tried: who has a docker that works has layers in its cache.
BUILDERS = ("docker", "podman", "buildah")

# Where the kernel lets nobody mount an overlay, plain copies of the layers do: slower, and they always work.
_PLAIN_STORAGE = {"STORAGE_DRIVER": "vfs"}
# Without namespaces of its own, and without a runtime that would have to be installed.
_ISOLATION = {"BUILDAH_ISOLATION": "chroot"}
_OUR_HOSTS = ("localhost", "127.0.0.1")
# In what `podman info` and `buildah info` tell.
_DRIVER = re.compile(r"graphDriverName\W+(\w+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Builder:
    """A program that builds images.

    Attributes
    ----------
    env
        The variables that it needs on this machine.
    copies
        Whether its storage keeps a whole copy of the image for each layer.
    """

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    copies: bool = False

    def reference(self, name: str) -> Reference:
        """An image in its storage, by the name that it was built with."""
        transport = Kind.DOCKER_ENGINE if self.name == "docker" else Kind.PODMAN
        return Reference.parse(f"{transport}://{name}")

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Let other programs find its storage meanwhile: skopeo takes the driver from the environment too."""
        before = {name: os.environ.get(name) for name in self.env}
        os.environ.update(self.env)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def command(
        self,
        context: Path,
        dockerfile: Path,
        name: str,
        *,
        base: Reference,
        labels: Mapping[str, str],
        platform: str,
        access: Access | None = None,
    ) -> list[str]:
        """The argument vector that builds a directory into an image of that name.

        A base that a tag names is asked for anew: a stale one of months ago is what a cache gives otherwise.

        Raises
        ------
        UserError
            If this builder does not take what the registry of the base needs.
        """
        access = access or Access()
        # Without --force-rm a build that fails leaves its containers, and their mounts.
        words = {
            "docker": ["docker", "build", "--progress", "plain"],
            "podman": ["podman", "build", "--format", "docker", "--force-rm", self._layers],
            "buildah": ["buildah", "bud", "--format", "docker", "--force-rm", self._layers],
        }[self.name]
        words = [*words, *self._pull(base), *self._access(access), "--file", str(dockerfile), "--tag", name]
        words += [word for item in labels.items() for word in ("--label", "=".join(item))]
        # Of this machine's own nothing need be said.
        words += ["--platform", platform] if platform != f"linux/{architecture()}" else []
        return [*words, str(context)]

    @property
    def cleanup(self) -> str:
        """The command that removes what earlier builds left and no image needs."""
        # `buildah prune` is not in 1.28 (Debian 12).
        prunes = {"docker": "docker builder prune", "podman": "podman image prune"}
        return prunes.get(self.name, "buildah rmi --prune")

    @property
    def takes_logins(self) -> bool:
        """Whether it can be lent some; docker has its own alone."""
        return self.name != "docker"

    def _access(self, access: Access) -> list[str]:
        words = access.words()
        if words and not self.takes_logins:
            raise UserError(
                f"docker build does not take {words[0].partition('=')[0]}",
                hint="what docker knows counts: `docker login`, insecure-registries; or --builder buildah",
            )
        return words

    @property
    def _layers(self) -> str:
        """One layer for each instruction is a cache, and a full disk where each is a copy of all."""
        return f"--layers={str(not self.copies).lower()}"

    def _pull(self, base: Reference) -> list[str]:
        host = (base.registry or "").partition(":")[0]
        if base.is_pinned or base.kind is not Kind.REGISTRY or host in _OUR_HOSTS:
            return []
        return ["--pull=newer"] if self.name == "podman" else ["--pull"]


def builder_for(preferred: str | None = None) -> Builder:
    """The first builder that works here, or the one that is asked for.

    Raises
    ------
    UserError
        If none does; with what each of them said.
    """
    if preferred is not None and preferred not in BUILDERS:
        raise UserError(
            f"image.builder={shown(preferred)}: there is no such builder",
            key="image.builder",
            hint=did_you_mean(preferred, BUILDERS),
        )
    asked = (preferred,) if preferred else BUILDERS
    said: list[str] = []
    for name in asked:
        found = _working(name)
        if isinstance(found, Builder):
            return found
        said.append(f"{name}: {found}")
    told = f"{preferred} does not work here" if preferred else "no program that builds images works here"
    raise UserError(
        "\n".join([told, *said]),
        hint=f"{tools.how_to_get('buildah')}\nor do it where one is: slipway image build ... --on-cluster",
    )


def _working(name: str) -> Builder | str:
    """A builder, or why it does not work."""
    path = tools.which(name)
    if path is None:
        return "not on PATH"
    if name == "docker":
        return _docker()
    words = (str(path), "info")
    env = {**_ISOLATION, **{key: os.environ[key] for key in _ISOLATION if key in os.environ}}
    try:
        return Builder(name, env, _copies(tools.run(words, doing="ask it", env=env)))
    except UserError as error:
        failed = error
    if "STORAGE_DRIVER" not in os.environ:
        env |= _PLAIN_STORAGE
        with suppress(UserError):
            return Builder(name, env, _copies(tools.run(words, doing="ask it", env=env)))
    return _last_line(failed)


def _docker() -> Builder | str:
    try:
        told = tools.run(["docker", "version"], doing="ask docker's daemon")
    except UserError as error:
        return _last_line(error)
    # Where podman answers to the name of docker, its images are in podman's storage.
    return _working("podman") if "podman" in told.lower() else Builder("docker")


def _copies(told: str) -> bool:
    found = _DRIVER.search(told)
    return found is not None and found[1] == "vfs"


def _last_line(error: UserError) -> str:
    return error.message.splitlines()[-1]
