"""The facts about files and the cluster that a plan is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launcher.releases import Contents
from launcher.slurm.cluster import ClusterFacts
from slipway.common.node.excluded import ExcludedNode


class MissingPath(NamedTuple):
    """A file or directory that the job may not find, or that is not valid.

    `key` is the configuration key that names it, `path` the value. It is `certain` if this machine has the
    directory, or runs the job.
    """

    key: str
    path: str
    why: str
    certain: bool
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class PathFacts:
    """Missing or invalid paths, as this machine sees them.

    A part is ``None`` if the job does not use it, or if it is unknown: `missing` gives the reason.
    `fetched` is an image of a registry that many nodes would fetch at once; `results` explains why the run
    directory is not writable. `local` are paths that several nodes share, on disks of this machine alone;
    `is_own_disk` is True if the run is on one. `free_bytes` is the room for the run's checkpoints, limited by
    `free_by`, the file system or the user's quota; `checkpoints_there` counts the run's present checkpoints.
    `tokens` are data sets that another tokenizer than the training's made.
    """

    tokenizer: tuple[MissingPath, ...] | None = None
    data: tuple[MissingPath, ...] | None = None
    tokens: tuple[MissingPath, ...] | None = None
    checkpoint: tuple[MissingPath, ...] | None = None
    image: tuple[MissingPath, ...] | None = None
    fetched: tuple[MissingPath, ...] | None = None
    script: tuple[MissingPath, ...] | None = None
    mounts: tuple[MissingPath, ...] | None = None
    sources: tuple[MissingPath, ...] | None = None
    secrets: tuple[MissingPath, ...] | None = None
    results: tuple[MissingPath, ...] | None = None
    local: tuple[MissingPath, ...] | None = None
    is_own_disk: bool = False
    free_bytes: int | None = None
    free_by: str = "file system"
    checkpoints_there: int | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


class Change(NamedTuple):
    """A key of the configuration that an earlier launch of the run had another value of.

    `is_grave` is True if no checkpoint of the one fits the other.
    """

    key: str
    old: Any
    new: Any
    is_grave: bool


class SavedShards(NamedTuple):
    """A checkpoint whose optimizer states are in shards that these parallel sizes alone can load.

    `virtual` is 1 where a pipeline stage held one chunk of layers.
    """

    checkpoint: str
    tensor: int
    pipeline: int
    virtual: int


class RewrittenPast(NamedTuple):
    """A key that contradicts what the checkpoint was trained on from which our trainer would resume.

    That is `recorded`, up to sample `consumed`.
    """

    key: str
    recorded: Any
    consumed: int
    checkpoint: str


@dataclass(frozen=True, slots=True)
class EarlierTraining:
    """The newest launch of the run, None if it was no training, compared with the planned one.

    `goes_on` is True if the planned launch may resume from a checkpoint that the run has saved or will save.
    `changes` omits keys that may change between two launches of a training. `data` names the files exchanged
    since `data_since`, the checkpoint or the launch, each as old → new; `accept` is the value of
    `training.resume.accept_data` that accepts them, `accepted` the value that is set. Our trainer resumes
    from step `saved`; `shards` is that checkpoint if only some parallel sizes can load its optimizer states.
    `rewritten` is a key that contradicts what that checkpoint was trained on.
    `steps` are `trainer.max_steps` before and now where they differ, `rate` the first step with another
    learning rate, with the rate before and now. `abandoned` are checkpoints of the run that the NeMo launcher
    made, and that no launch of ours would find.
    """

    launch: int | None
    goes_on: bool
    changes: tuple[Change, ...] | None = None
    data: tuple[str, ...] | None = None
    data_since: str = ""
    accept: str | None = None
    accepted: str | None = None
    saved: int | None = None
    shards: SavedShards | None = None
    steps: tuple[int, int] | None = None
    rate: tuple[int, float, float] | None = None
    abandoned: str | None = None
    rewritten: RewrittenPast | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


class Interpreter(NamedTuple):
    """The interpreter of the tasks, as this machine has it.

    `path` is None if this machine does not have it; `problem` says why the nodes cannot have it either.
    `missing` are the libraries that it does not find, None if it does not answer. `changed_by` is the key or
    option with which the job may add libraries that this machine does not have.
    """

    name: str
    is_own: bool
    path: str | None = None
    problem: str | None = None
    nearest: str | None = None
    missing: tuple[str, ...] | None = None
    changed_by: str | None = None


class HostFacts(NamedTuple):
    """The machine that launches; `interpreter` is None if the tasks do not use this machine's."""

    in_allocation: bool
    allocation_nodes: int | None = None
    interpreter: Interpreter | None = None
    is_heterogeneous: bool = False


@dataclass(frozen=True, slots=True)
class SubmissionFacts:
    """The scheduler's answer to a script, from ``sbatch --test-only``.

    `refusal` is its objection, None without one; `waits` is the reason that would keep the job waiting,
    `notice` the site's message on an accepted job; `missing` says why the scheduler could not be asked.
    """

    is_refused: bool | None
    refusal: str | None = None
    waits: str | None = None
    notice: str | None = None
    fix: str | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


class ExcludeFile(NamedTuple):
    """The nodes that the team's file excludes now; `problem` says why it cannot be read, `fix` what can."""

    path: str
    nodes: tuple[ExcludedNode, ...] = ()
    problem: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The known contents of the job's image; `missing` says why nothing is known."""

    contents: Contents | None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """Gathered beforehand and read-only; ``None`` is unknown, and skips the checks that need it."""

    # Keys of `trainer`, `exp_manager` and `model` that no shipped file has and no check reads, such as
    # ``model.micro_batchsize``; and those that the files have or the checks read, to find the nearest.
    added_keys: tuple[str, ...] | None = None
    shipped_keys: frozenset[str] | None = None
    # Other run directories whose newest launch has the name of this plan's job.
    same_job_name: tuple[str, ...] | None = None
    # Files of secrets that others may read, by their variable.
    open_secrets: Mapping[str, str] | None = None
    paths: PathFacts | None = None
    image: ImageFacts | None = None
    # The newest launch of the run; None if no training is planned.
    earlier: EarlierTraining | None = None
    cluster: ClusterFacts | None = None
    # The number of array tasks that are submitted with this plan's; None if its job is no array.
    array_tasks: int | None = None
    # The GPUs of a node in the cluster's configuration, and the reason why our trainer finds no GPU there.
    # Unknown, these skip no check.
    node_gpus: int | None = None
    lacks_gpus: str | None = None
    host: HostFacts | None = None
    # The scheduler's answer to the script; None if it was not shown.
    submission: SubmissionFacts | None = None
    # The team's file of nodes to avoid; None if the job has none.
    exclude_file: ExcludeFile | None = None
    # Why this machine's Python cannot run a job's supervisor; empty if it can.
    supervisor_python: str | None = None
    # The trainer's answer on the configuration, as ``key=value: the mistake``; empty if it accepts it, or if
    # another program is going to train.
    trainer_verdict: str | None = None
    # Keys with values that contain an unexpanded shell variable, and the values.
    unexpanded: tuple[tuple[str, str], ...] | None = None

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Types of GPU that the cluster has; empty if unknown."""
        return (self.cluster.gpu_types if self.cluster is not None else None) or ()

    @property
    def shared_exclusions(self) -> tuple[ExcludedNode, ...]:
        """Return the nodes of the team's file that the cluster has: Slurm refuses a job for other names."""
        nodes = self.exclude_file.nodes if self.exclude_file is not None else ()
        there = self.cluster.node_names if self.cluster is not None else None
        return tuple(excluded for excluded in nodes if there is None or excluded.node in there)
