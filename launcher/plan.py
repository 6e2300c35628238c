"""What will be run, before anything is rendered, written or submitted: frozen and complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launcher.runs.paths import LaunchPaths


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job asks the cluster for.

    `tasks_per_node` is one task, so one process, per GPU. `memory` is per node, in Slurm's notation, where
    ``"0"`` means all of it. `time_limit` is in Slurm's notation too. `exclusive` keeps all others off the
    nodes, or all but jobs of the same ``"user"`` or ``"mcs"`` label.
    """

    nodes: int
    tasks_per_node: int
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    gres: str | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    exclusive: bool | Literal["user", "mcs"] = False
    time_limit: str | None = None

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node


@dataclass(frozen=True, slots=True)
class Queue:
    """Where in the cluster a job waits, for what, and what becomes of it; in Slurm's words.

    `further` holds other flags of sbatch, ``True`` for those without a value.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    switches: str | None = None
    licenses: str | None = None
    begin: str | None = None
    deadline: str | None = None
    dependency: str | None = None
    requeue: bool | None = None
    signal: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    comment: str | None = None
    further: Mapping[str, str | Literal[True]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mount:
    """A path of the host that the container sees, with Pyxis' flags such as ``ro``."""

    source: str
    target: str
    flags: str | None = None


@dataclass(frozen=True, slots=True)
class ContainerOptions:
    """How the container runs; ``None`` leaves it to the site."""

    mount_home: bool | None = None
    writable: bool | None = None
    remap_root: bool | None = None
    entrypoint: bool | None = None
    workdir: str | None = None
    name: str | None = None
    env: tuple[str, ...] = ()
    save: str | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """The image that the tasks run in, with what it sees of the host."""

    image: str
    mounts: tuple[Mount, ...]
    options: ContainerOptions = ContainerOptions()


@dataclass(frozen=True, slots=True)
class Payload:
    """What each task runs: an argument vector, never a command line.

    `python_path` is put in front of what the container or the user already has. `save_signal` is what the
    payload takes as: save now, the job is about to end.
    """

    argv: tuple[str, ...]
    working_dir: str
    python_path: tuple[str, ...] = ()
    save_signal: Literal["USR1", "TERM"] = "USR1"


@dataclass(frozen=True, slots=True)
class Binding:
    """The cores of each task: whole physical ones of its GPU's NUMA node, shared with no other task.

    `all_threads` takes in all hardware threads of a core. `balanced` gives each task as many cores;
    `max_cores` is ``None`` for all there are.
    """

    all_threads: bool
    balanced: bool
    min_cores: int
    max_cores: int | None


@dataclass(frozen=True, slots=True)
class Profile:
    """Which ranks run under nsys, what it traces, and where its reports go."""

    ranks: tuple[int, ...]
    trace: tuple[str, ...]
    directory: str


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a stage.

    Attributes
    ----------
    config
        The interpolated configuration that the payload reads, or ``None`` if it reads none.
    environment
        Exported before the tasks start.
    environment_files
        Variables whose values the job reads from the first lines of files: secrets are never in a script.
    gpu_environment
        By the compute capability of the GPUs (9 is Hopper), what is exported there unless it is set.
    mpi
        How srun starts MPI processes.
    srun_args
        The site's own arguments to srun.
    vboost
        Give more of the GPUs' power budget to their compute engines beforehand.
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
    environment_files: Mapping[str, str] = field(default_factory=dict)
    gpu_environment: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    mpi: str | None = None
    srun_args: tuple[str, ...] = ()
    binding: Binding | None = None
    profile: Profile | None = None
    vboost: bool = False
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
