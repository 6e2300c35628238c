"""Facts about machines and an image, which the rules are functions of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.file_systems import MountedFileSystem
from launcher.releases import Contents


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory, and the file system that it is on, or would be; `there` is the part that exists."""

    path: str
    there: str
    kind: str
    point: str
    source: str
    free: int | None
    writable: bool

    @property
    def is_local(self) -> bool:
        """True on a disk of the machine's own."""
        return MountedFileSystem(self.kind, Path(self.point), self.source).is_local

    @property
    def is_memory(self) -> bool:
        """True on a file system in memory."""
        return self.kind in ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Enroot:
    """Enroot's configuration; `trouble` is why it could not be read."""

    version: str | None = None
    conf: str | None = None
    trouble: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    binds_mqueue: bool = False


@dataclass(frozen=True, slots=True)
class Gpus:
    """The driver, its own CUDA, and the GPUs, from nvidia-smi; or `trouble`, its error."""

    driver: str | None = None
    names: tuple[str, ...] = ()
    cuda: str | None = None
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Plugstack:
    """The line of plugstack.conf that loads Pyxis: file and number, the plugin, if it is `there`, options."""

    at: str | None = None
    plugin: str | None = None
    there: bool | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, as `probe` reports it.

    `tools` are the versions of programs, None if unknown. `job_python` is version and path of the Python that
    supervises jobs; None if missing, empty if not examined. `docker_daemon` is the version of the daemon that
    answers, or its error after a ``!``; None without docker. `no_namespaces` is the error of unshare if the
    user may not have namespaces; `subordinate_ids` is True if the user has ids for the other users of an
    image. `files` has the sizes of the requested files, None for a missing one.
    """

    host: str
    uid: int
    python: str | None
    job_python: str | None = ""
    tools: Mapping[str, str | None] = field(default_factory=dict)
    docker_daemon: str | None = None
    compressors: tuple[str, ...] = ()
    sysctls: Mapping[str, int] = field(default_factory=dict)
    file_systems: tuple[str, ...] = ()
    no_namespaces: str | None = None
    fuse: bool = False
    subordinate_ids: bool = False
    mqueue: bool = False
    places: Mapping[str, Directory] = field(default_factory=dict)
    files: Mapping[str, int | None] = field(default_factory=dict)
    enroot: Enroot | None = None
    gpus: Gpus | None = None
    plugstack: Plugstack = Plugstack()


def machine_of(content: Mapping[str, Any]) -> Machine:
    """Return the machine of a report of `probe`; raise ValueError if it is no such report."""
    from pydantic import TypeAdapter

    return TypeAdapter(Machine).validate_python(dict(content))


@dataclass(frozen=True, slots=True)
class Image:
    """An image, and the CUDA of its environment; `why` is the reason if that could not be read.

    `size` is that of its squashfs in bytes, None if it is in a registry; `for_pyxis` its name for Pyxis, None
    if nodes cannot fetch it. Of its environment `cuda` is ``CUDA_VERSION``, the release of its build;
    `compat_driver` ``CUDA_DRIVER_VERSION``, the driver with libraries in NVIDIA's images for older drivers;
    `requires` ``NVIDIA_REQUIRE_CUDA``, which nvidia-container-cli checks the driver against; `devices`
    ``NVIDIA_VISIBLE_DEVICES`` of the launch, else of the image: the GPUs that Enroot brings into the
    container. `contents` are those that its name or its record names.
    """

    name: str
    path: str | None = None
    size: int | None = None
    registry: str | None = None
    for_pyxis: str | None = None
    cuda: str | None = None
    compat_driver: str | None = None
    requires: str | None = None
    devices: str | None = None
    why: str | None = None
    is_broken: bool = False
    contents: Contents | None = None

    @property
    def wants_gpus(self) -> bool:
        """True if Enroot's hook calls nvidia-container-cli for it, with or without GPUs."""
        return (self.devices or "void") != "void"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A file of credentials: the registries, and if others may not read it."""

    path: str
    registries: tuple[str, ...]
    is_private: bool = True


@dataclass(frozen=True, slots=True)
class Requirements:
    """The requirements of a launch.

    `trainer` is True if its tasks run our trainer on the nodes' own Python; the image must have the
    programs of `engine`, None if the launch brings them, or has no image.
    """

    scheduler: str = "slurm"
    image: bool = False
    runtime: str = "pyxis"
    trainer: bool = False
    engine: str | None = None

    @property
    def enroot(self) -> bool:
        """True if Enroot starts the container."""
        return self.image and self.runtime == "pyxis"
