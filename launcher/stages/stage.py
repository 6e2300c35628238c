"""A stage as planning runs it: one value for each, declared in the module that plans its jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from launcher.config.schema import ClusterConfig, RunConfig, parse
from launcher.config.stage_schema import ResumeNode, RunConfigNode, StageConfig, TrainingConfig
from launcher.errors import UserError, literal, setting_error
from launcher.plan import Job, Payload, Resources
from launcher.runs.paths import LaunchPaths
from launcher.stages.job_environment import add_environment
from launcher.stages.names_and_paths import SAFE_NAME

Node = TypeVar("Node", bound=StageConfig)

# File systems take names of 255 bytes; those of the files have a prefix, a suffix and a job's id besides.
_LONGEST_NAME = 200

# Keys of the whole launch; the root's keys of the same names were derived from them.
_OF_THE_LAUNCH = ("scheduler", "slurm_conf", "engine", "container")

_MAPPINGS = ("env_vars", "sbatch", "gpu_types")


@dataclass(frozen=True, slots=True)
class StageRun:
    """One launch of a stage, prepared for the function that plans its job.

    `config` has the cluster as `stage_cluster` changes it for the stage, `node` is the stage's own `run`.
    """

    stage: str
    config: RunConfig
    node: RunConfigNode
    paths: LaunchPaths

    @property
    def changes(self) -> Mapping[str, Any]:
        """The stage's own changes to the cluster, which win over what the stage asks for by itself."""
        return stage_changes(self.config, self.stage)

    @property
    def results_key(self) -> str:
        """The configuration key that determines the run's directory."""
        is_ours = self.paths.run_dir.is_relative_to(self.config.base_results_dir)
        return "base_results_dir" if is_ours else f"{self.stage}.run.results_dir"


@dataclass(frozen=True, slots=True)
class Stage(Generic[Node]):
    """One stage of those that `stages` names; `model` is its node in the configuration.

    `plan` plans the job of a launch, without what `add_environment` adds. `split` returns a configuration for
    each job that the stage takes, from one that has this stage alone. `follow` returns the node with what it
    takes from the stages before it: the configuration that it reads has their nodes, and no others. `writes`
    are the files and directories that a later stage may read. `alone` says why none can be launched with it.
    """

    name: str
    model: type[Node]
    plan: Callable[[StageRun, Node], Job]
    split: Callable[[RunConfig, Node], Sequence[RunConfig]] = lambda config, _node: [config]
    follow: Callable[[Node, RunConfig], Node] = lambda node, _before: node
    writes: Callable[[RunConfig, Node], Iterable[Path]] = lambda _config, _node: ()
    alone: str | None = None

    def node(self, config: RunConfig) -> Node:
        """Return the stage's node; raise UserError if its group is not in the configuration."""
        node = getattr(config, self.name)
        if not isinstance(node, self.model):
            message = f"stages=[{self.name}]: the group {self.name} is not in the configuration"
            raise UserError(message, key="stages", also=(self.name,), hint=f"choose: {self.name}=...")
        return node

    def prepare(self, config: RunConfig, number: int) -> StageRun:
        """Prepare a launch; raise UserError if its names or its changes to the cluster are wrong."""
        return prepare(self.name, self.node(config).run, config, number)

    def job(self, run: StageRun) -> Job:
        """Plan the job of a launch."""
        node = self.node(run.config)
        job = add_environment(self.plan(run, node), run.config, run.paths)
        return replace(job, every=getattr(node, "every", None))


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that trains.

    `configure` completes the configuration of a launch, or refuses what the program has no option for.
    `payload` runs the program on the result, with the variables of `environment`. Of a model it leaves the
    nodes `unread` where the data are mock data, which come from no file.
    """

    configure: Callable[[RunConfig, TrainingConfig, dict[str, Any]], dict[str, Any]]
    payload: Callable[[StageRun, TrainingConfig, Mapping[str, Any]], Payload]
    environment: Callable[[Mapping[str, Any], TrainingConfig, Resources], dict[str, str]] = lambda *_: {}
    unread: tuple[str, ...] = ("data",)


def refuse_resume(config: RunConfig, resume: ResumeNode) -> None:
    """Refuse what only our trainer does: NeMo ignores a node that it does not know."""
    for name, value in resume:
        if name != "accept_data" and value != ResumeNode.model_fields[name].default:
            key = f"training.resume.{name}"
            engines = f"engine={config.engine} has no such option; engine=megatron has"
            raise setting_error(f"{key}={literal(value)}: {engines}")


def prepare(stage: str, node: RunConfigNode, config: RunConfig, number: int) -> StageRun:
    """Prepare a launch of a stage; raise UserError if its names or its changes to the cluster are wrong."""
    cluster = stage_cluster(config, stage)
    paths = launch_paths(stage, node, cluster, number)
    return StageRun(stage, config.model_copy(update={"cluster": cluster}), node, paths)


def launch_paths(stage: str, run: RunConfigNode, cluster: ClusterConfig, number: int) -> LaunchPaths:
    """Return the paths of a launch; raise UserError if the run's name, or the job's, is no file name."""
    job_name = f"{cluster.job_name_prefix}{run.name}"
    for key, value, name in (
        (f"{stage}.run.name", run.name, run.name),
        ("cluster.job_name_prefix", cluster.job_name_prefix, job_name),
    ):
        if not SAFE_NAME.fullmatch(name):
            raise setting_error(
                f"{key}={literal(value)}: not a safe file name",
                hint="valid: letters, digits and . _ + = - with a letter or digit first",
            )
        if len(name) > _LONGEST_NAME:
            raise setting_error(
                f"{key}={literal(value)}: {len(name)} characters are too many for the names of its files",
                hint=f"valid: up to {_LONGEST_NAME}, cluster.job_name_prefix included",
            )
    return LaunchPaths(Path(run.results_dir).absolute(), run.name, job_name, number)


def training_paths(config: RunConfig, training: TrainingConfig) -> LaunchPaths:
    """Return the paths of the training's first launch: those of its run are all that a later stage needs."""
    return launch_paths("training", training.run, config.cluster, number=1)


def stage_changes(config: RunConfig, stage: str) -> Mapping[str, Any]:
    """Return the changes of `stage_cluster` for a stage."""
    return next((changes for name, changes in config.stage_cluster.items() if name == stage), {})


def stage_cluster(config: RunConfig, stage: str) -> ClusterConfig:
    """Lay the changes of `stage_cluster` over the cluster; mappings are merged key by key."""
    changes, path = stage_changes(config, stage), f"stage_cluster.{stage}"
    if not changes:
        return config.cluster
    for key in _OF_THE_LAUNCH:
        if key in changes:
            other = f"cluster.{key}" if key in ("scheduler", "slurm_conf") else key
            raise setting_error(f"{path}.{key}: not a stage's own, but the launch's", hint=f"{other}=...")
    ours = config.cluster.model_dump()
    merged = {**ours, **changes}
    for key in _MAPPINGS:
        if isinstance(changes.get(key), Mapping):
            merged[key] = {**ours[key], **changes[key]}
    return parse(ClusterConfig, merged, path)
