"""What will be run, before anything is rendered, written or submitted: frozen and complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.runs.paths import LaunchPaths


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job asks the cluster for.

    `tasks_per_node` is one task, so one process, per GPU. `memory` is per node, in Slurm's notation, where
    ``"0"`` means all of it. `time_limit` is in Slurm's notation too.
    """

    nodes: int
    tasks_per_node: int
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    gres: str | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    exclusive: bool = False
    time_limit: str | None = None

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node


@dataclass(frozen=True, slots=True)
class Queue:
    """Where in the cluster a job waits, and for what."""

    partition: str | None = None
    account: str | None = None
    dependency: str | None = None


@dataclass(frozen=True, slots=True)
class Mount:
    """A path of the host that the container sees, with Pyxis' flags such as ``ro``."""

    source: str
    target: str
    flags: str | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """The image that the tasks run in, with what it sees of the host."""

    image: str
    mounts: tuple[Mount, ...]


@dataclass(frozen=True, slots=True)
class Payload:
    """What each task runs: an argument vector, never a command line.

    `python_path` is put in front of what the container or the user already has.
    """

    argv: tuple[str, ...]
    working_dir: str
    python_path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a stage.

    Attributes
    ----------
    config
        The interpolated configuration that the payload reads, or ``None`` if it reads none.
    environment
        Exported before the tasks start.
    srun_args
        The site's own arguments to srun.
    directories
        Made, where missing, before the job is submitted; the job writes there.
    """

    stage: str
    engine: str
    resources: Resources
    queue: Queue
    payload: Payload
    container: Container | None = None
    config: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    srun_args: tuple[str, ...] = ()
    merge_stderr: bool = True
    directories: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch of a run: where it goes, and the job that it is.

    The launch's number (in `paths`) and `tag` are inputs, so that a replay can hold them fixed.
    """

    paths: LaunchPaths
    tag: str
    scheduler: str
    slurm_conf: str | None
    job: Job
