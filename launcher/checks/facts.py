"""The facts about files and the cluster that a plan is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launcher.releases import Contents
from launcher.slurm.cluster import ClusterFacts


class MissingPath(NamedTuple):
    """A file or directory that the job may not find, or not as it needs it.

    `key` is where the configuration names it, and `path` how. `certain` is whether this machine can tell: it
    has the directory, or the job runs on it.
    """

    key: str
    path: str
    why: str
    certain: bool
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class PathFacts:
    """Read on this machine: what is not there, or not what it should be.

    A part is ``None`` where the job needs no such thing, and where it is not known: `missing` says why.
    `fetched` is an image of a registry that many nodes would fetch at once, and `results` why nothing can be
    written into the directory of the run. `local` are paths that several nodes share, on disks of this
    machine alone; `is_own_disk` is whether the run is on one. `free_bytes` may still be written where the
    run's checkpoints go: what ends there is the file system or the user's quota, by `free_by`;
    `checkpoints_there` counts those that the run has already. `tokens` are data sets of another tokenizer
    than the training's.
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

    `is_grave` is whether no checkpoint of the one fits the other.
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


@dataclass(frozen=True, slots=True)
class EarlierTraining:
    """The newest launch of the run, None if it was no training, compared with the one that is planned.

    `goes_on` is whether the planned launch may go on from what the run has saved, or is about to save.
    `changes` are without what may change between two launches of a training. `data` names the files that were
    exchanged since `data_since`, the checkpoint or the launch, each as old → new; `accept` is the value of
    `training.resume.accept_data` that accepts that, and `accepted` the one that is set. `saved` is the step
    that our trainer goes on from, and `shards` that checkpoint if its optimizer states are loaded, and only
    by some parallel sizes. `steps` are `trainer.max_steps` before and now where they differ, and `rate` the
    first step whose learning rate that moves, with the rate before and now. `abandoned` are checkpoints of
    the run that the NeMo launcher made, and that no launch of ours would find.
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
    missing: Mapping[str, str] = field(default_factory=dict)


class Interpreter(NamedTuple):
    """The interpreter of the tasks, as this machine has it.

    `path` is None where this machine does not have it, and `problem` says why it cannot be there on the nodes
    either. `missing` are the libraries that it does not find, None if it does not answer. `changed_by` is the
    key or option by which the job may bring what this machine lacks.
    """

    name: str
    is_own: bool
    path: str | None = None
    problem: str | None = None
    nearest: str | None = None
    missing: tuple[str, ...] | None = None
    changed_by: str | None = None


class HostFacts(NamedTuple):
    """The machine that launches; `interpreter` is None where the tasks use none of this machine."""

    in_allocation: bool
    allocation_nodes: int | None = None
    interpreter: Interpreter | None = None
    is_heterogeneous: bool = False


@dataclass(frozen=True, slots=True)
class SubmissionFacts:
    """The answer of the scheduler to a script that it was shown, ``sbatch --test-only``.

    `refusal` is what it objects, None if nothing; `waits` is what would keep the job waiting, `notice` what
    the site says of a job that is accepted; `missing` says why it could not be asked.
    """

    is_refused: bool | None
    refusal: str | None = None
    waits: str | None = None
    notice: str | None = None
    fix: str | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The known contents of the job's image; `missing` says why nothing is known."""

    contents: Contents | None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """Gathered beforehand and read-only; ``None`` is unknown, and skips the checks that need it."""

    # Keys of `trainer`, `exp_manager` and `model` that no shipped file shows and no check reads, such as
    # ``model.micro_batchsize``; and those that the files show or the checks read, to find the nearest.
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
    # How many tasks of job arrays are submitted with this plan's; None if it is a job of its own.
    array_tasks: int | None = None
    # The GPUs of a node, where the cluster's configuration says it, and why our trainer finds no GPU where it
    # runs, if so. Not known, these skip nothing.
    node_gpus: int | None = None
    lacks_gpus: str | None = None
    host: HostFacts | None = None
    # The scheduler's answer to the script; None if it was not shown.
    submission: SubmissionFacts | None = None
    # Why this machine's Python cannot run a job's supervisor; empty if it can.
    supervisor_python: str | None = None
    # The trainer's answer on the configuration, as ``key=value: what is wrong``; empty if it is content, or
    # if another program is going to train.
    trainer_verdict: str | None = None
    # Keys whose values refer to a variable of the shell that nothing expands, with the values.
    unexpanded: tuple[tuple[str, str], ...] | None = None

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Types of GPU that the cluster has; none where they are not known."""
        return (self.cluster.gpu_types if self.cluster is not None else None) or ()
