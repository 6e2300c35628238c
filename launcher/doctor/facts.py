"""What was gathered of machines, of Slurm and of an image: what judging is a function of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.file_systems import Mount
from launcher.releases import Contents


@dataclass(frozen=True, slots=True)
class Tool:
    """A program; `version` is ``None`` where it was not asked for, or not told."""

    path: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A directory, and the file system that it is on, or would be: `there` is the part of it that exists."""

    path: str
    there: str
    kind: str
    point: str
    source: str
    free: int | None
    size: int | None
    writable: bool

    @property
    def is_local(self) -> bool:
        return Mount(self.kind, Path(self.point), self.source).is_local

    @property
    def is_memory(self) -> bool:
        return self.kind in ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Enroot:
    """Enroot as it is configured; `trouble` is why that could not be read."""

    version: str | None = None
    conf: str | None = None
    trouble: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    binds_mqueue: bool = False


@dataclass(frozen=True, slots=True)
class Gpus:
    """What nvidia-smi told: the driver, its own CUDA, and the GPUs; or `trouble`, why it did not."""

    driver: str | None = None
    names: tuple[str, ...] = ()
    cuda: str | None = None
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Plugstack:
    """Where Slurm is told of Pyxis: the file and line, the plugin (and whether it is there), its options."""

    at: str | None = None
    plugin: str | None = None
    there: bool | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, as `probe` tells of it.

    Attributes
    ----------
    job_python
        The version and the path of the Python that keeps jobs; ``None`` where there is none, empty where
        nobody looked.
    docker_daemon
        The version of the daemon that answers; after a ``!`` why none does; ``None`` without docker.
    compressors
        Those of mksquashfs.
    sysctls
        Numbers of the kernel's; those that it has not are left out.
    no_namespaces
        What unshare said when the user could not have a namespace of their own.
    subordinate_ids
        The user has ids for what other users own in an image.
    mqueue
        /dev/mqueue is mounted.
    files
        The sizes of files that were asked for, ``None`` where there is none.
    """

    host: str
    uid: int
    kernel: str
    python: str | None
    job_python: str | None = ""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    docker_daemon: str | None = None
    compressors: tuple[str, ...] = ()
    sysctls: Mapping[str, int] = field(default_factory=dict)
    file_systems: tuple[str, ...] = ()
    no_namespaces: str | None = None
    fuse: bool = False
    subordinate_ids: bool = False
    mqueue: bool = False
    places: Mapping[str, Place] = field(default_factory=dict)
    files: Mapping[str, int | None] = field(default_factory=dict)
    enroot: Enroot | None = None
    gpus: Gpus | None = None
    plugstack: Plugstack = Plugstack()


def machine_of(content: Mapping[str, Any]) -> Machine:
    """Read what `probe` told.

    Raises
    ------
    ValueError
        If it is something else.
    """
    from pydantic import TypeAdapter

    return TypeAdapter(Machine).validate_python(dict(content))


@dataclass(frozen=True, slots=True)
class Slurm:
    """What Slurm told of itself; `why` it told nothing, or nothing of a part.

    Attributes
    ----------
    settings
        Names and values of ``scontrol show config``.
    pyxis
        Whether srun has Pyxis' options; ``None`` if that could not be told.
    nodes
        The partitions, and of each how many nodes there are and how many of them take jobs.
    gpus
        Types of GPUs that nodes have, ``""`` where a type has no name.
    """

    why: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    pyxis: bool | None = None
    nodes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Image:
    """An image, and what it says of CUDA in its environment; `why` that could not be read.

    Attributes
    ----------
    size
        Of its squashfs in bytes, ``None`` if it is in a registry.
    registry
        The one it comes from.
    for_pyxis
        How Pyxis takes it; ``None`` if nodes cannot fetch it.
    cuda
        ``CUDA_VERSION``, the release that it was built with.
    compat_driver
        ``CUDA_DRIVER_VERSION``: the driver whose libraries NVIDIA's images carry for older ones.
    requires
        ``NVIDIA_REQUIRE_CUDA``, which nvidia-container-cli holds a driver to.
    devices
        ``NVIDIA_VISIBLE_DEVICES``, the GPUs that Enroot is to bring into the container, as the launch or the
        image says it.
    is_broken
        Its file is here, and no image.
    contents
        What its name, or the record beside it, tells of what is in it.
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
        """Whether Enroot's hook calls nvidia-container-cli for it, also where there are no GPUs."""
        return (self.devices or "void") != "void"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A file of credentials: whose it is, for which registries it has some, who may read it."""

    owner: str
    path: str
    registries: tuple[str, ...]
    is_private: bool = True


@dataclass(frozen=True, slots=True)
class Needs:
    """What a launch cannot do without.

    Attributes
    ----------
    scheduler
        ``slurm``, ``allocation`` or ``local``.
    image
        Its tasks run in a container.
    runtime
        What starts it.
    trainer
        Its tasks run our trainer on the nodes' own Python.
    engine
        The engine that its image must have the programs of; ``None`` if it brings them, or has no image.
    """

    scheduler: str = "slurm"
    image: bool = False
    runtime: str = "pyxis"
    trainer: bool = False
    engine: str | None = None

    @property
    def enroot(self) -> bool:
        return self.image and self.runtime == "pyxis"
