"""The plan of a launch, before anything is rendered, written or submitted: frozen and complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from launcher.config.schema import Assumptions, ContainerOptions, NumaMapping
from launcher.config.watch_schema import Watch
from launcher.runs.paths import LaunchPaths
from launcher.slurm.queue_flags import QueueFlags
from slipway.arithmetic.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a job requests.

    `nodes` is the least that it starts with where `max_nodes` is set, and else how many its tasks get;
    `spares` are requested in addition, in place of those that are not healthy.
    `tasks_per_node` is one task, so one process, per GPU. `gpu` is the type of GPU that estimates count with,
    a name of `slipway.arithmetic.gpus`; `gpu_type` is the one that `cluster.gres` names, in the site's words;
    and `gpu_types` are GPUs that the site adds to the table, or changes. `memory` is per node, in Slurm's
    notation, where ``"0"`` means all of it. `time_limit` is in Slurm's notation too. `exclusive` keeps all
    others off the nodes, or all but jobs of the same ``"user"`` or ``"mcs"`` label.
    """

    nodes: int
    tasks_per_node: int
    max_nodes: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    gres: str | None = None
    cpus_per_task: int | None = None
    gpu: str | None = None
    gpu_type: str | None = None
    memory: str | None = None
    exclusive: bool | Literal["user", "mcs", "topo"] = False
    time_limit: str | None = None
    gpu_types: Mapping[str, Gpu] = field(default_factory=dict)
    spares: int = 0

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def node_counts(self) -> range:
        """Every number of nodes that the job may get."""
        return range(self.nodes, (self.max_nodes or self.nodes) + 1)

    @property
    def is_elastic(self) -> bool:
        """True if only the job itself knows its number of nodes."""
        return len(self.node_counts) > 1


@dataclass(frozen=True, kw_only=True)
class Queue(QueueFlags):
    """The queue options of a job, in Slurm's words.

    `exclude` is the user's own: nodes that failed under the run's jobs are excluded when it is submitted.
    `further` holds other flags of sbatch, ``True`` for those without a value.
    """

    dependency: str | None = None
    further: Mapping[str, str | Literal[True]] = field(default_factory=dict)


# Words that Pyxis takes in place of a mount's source: memory, and the removal of a mount.
SOURCES_WITHOUT_PATH = ("tmpfs", "umount")


class Mount(NamedTuple):
    """A path of the host that the container sees, with Pyxis' flags such as ``ro``.

    `source` is a whole path, or one of `SOURCES_WITHOUT_PATH`.
    """

    source: str
    target: str
    flags: str | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """The image that the tasks run in, with its mounts and options."""

    image: str
    mounts: tuple[Mount, ...]
    options: ContainerOptions = field(default_factory=ContainerOptions)

    @property
    def is_file(self) -> bool:
        """True if the image is a file, and not a registry's."""
        return self.image.startswith("/")

    @property
    def is_staged(self) -> bool:
        """True if each node starts its own copy, at a path that only the job knows."""
        return self.options.stage_to is not None and self.is_file


class Payload(NamedTuple):
    """The program of each task: an argument vector, never a command line.

    `python_path` is put in front of the container's or the user's. `save_signal` asks the payload to save, as
    the job is about to end. `nodes_key` is the key of a last argument with the number of nodes, where only
    the job knows it. `array_key` is the option for the number of its task in a job array.
    """

    argv: tuple[str, ...]
    working_dir: str
    python_path: tuple[str, ...] = ()
    save_signal: Literal["USR1", "TERM"] = "USR1"
    nodes_key: str | None = None
    array_key: str | None = None


class Profile(NamedTuple):
    """The ranks that run under nsys, its traces, and the directory of its reports."""

    ranks: tuple[int, ...]
    trace: tuple[str, ...]
    directory: str


@dataclass(frozen=True, slots=True)
class Chain:
    """The continuation of a job as the next link of a chain of jobs with the same script.

    `from_job`: each link submits the next one, and otherwise all are submitted at launch. The chain stops
    after `max_failures` links in a row without a new checkpoint; `checkpoints` is their directory, if any.
    Each starts its tasks again up to `restarts` times. `exclude_file` is a team's file of nodes to avoid.
    """

    links: int = 1
    from_job: bool = True
    max_failures: int = 3
    exclude_hours: float = 24.0
    exclude_file: str | None = None
    checkpoints: str | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """The request to each node for its health: the paths that the tasks need, and the site's own tool."""

    paths: tuple[str, ...]
    command: tuple[str, ...] = ()


# A reference to a variable of the shell.
REFERENCE = r"(?a:\$(?:\{(?P<braced>[A-Za-z_]\w*)\}|(?P<name>[A-Za-z_]\w*)))"
# Variables that the supervisor exports for all tasks.
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a stage.

    A training reads the interpolated `config`, the program of another stage its `stage_config`. `environment`
    is exported before the tasks start; the values of `environment_files` are read in the job from the first
    lines of files, as secrets are never in a script; `gpu_environment` is exported by the compute capability
    of the GPUs (9 is Hopper), unless it is set. `vboost` gives more of their power budget to their compute
    engines. A stage behind a training with `every` is also submitted after each so many checkpoints.
    Each task exports the `expansions`, values with references to its own variables. The lines of `setup` run
    before the tasks; the words of `task_prefix` start each task.
    `directories` are made before the job is submitted, and it writes there: each has the key that it comes
    from, or ``None`` below the run's own directory.
    """

    stage: str
    engine: str
    resources: Resources
    queue: Queue
    payload: Payload
    container: Container | None = None
    config: Mapping[str, Any] | None = None
    stage_config: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_files: Mapping[str, str] = field(default_factory=dict)
    gpu_environment: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    expansions: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    mpi: str | None = None
    srun_args: tuple[str, ...] = ()
    task_prefix: tuple[str, ...] = ()
    binding: NumaMapping | None = None
    profile: Profile | None = None
    vboost: bool = False
    chain: Chain = Chain()
    health: Health | None = None
    every: int | None = None
    merge_stderr: bool = True
    directories: Mapping[Path, str | None] = field(default_factory=dict)

    @property
    def payload_config(self) -> Mapping[str, Any] | None:
        return self.config if self.config is not None else self.stage_config

    @property
    def container_variables(self) -> tuple[str, ...]:
        """The variables that have the job's values in the container, not the image's."""
        chosen = self.container.options.env if self.container is not None else ()
        return tuple(
            dict.fromkeys([*chosen, *RENDEZVOUS, *self.environment, *self.environment_files]),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch of a run: its paths and its job.

    The launch's number (in `paths`) and `tag` are inputs, so that a replay can hold them fixed.
    """

    paths: LaunchPaths
    tag: str
    scheduler: str
    slurm_conf: str | None
    job: Job
    assumptions: Assumptions = field(default_factory=Assumptions)
    watch: Watch = field(default_factory=Watch)
