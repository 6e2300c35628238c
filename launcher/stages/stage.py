"""A stage as planning runs it: one value for each, declared in the module that plans its jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from launcher.config.schema import ClusterConfig, NumaMapping, RunConfig, parse
from launcher.config.stage_schema import (
    ResumeNode,
    RunConfigNode,
    StageConfig,
    StageSection,
    TrainingConfig,
)
from launcher.errors import UserError, literal, setting_error
from launcher.plan import Job, Payload, Profile, Resources
from launcher.runs.paths import LaunchPaths
from launcher.stages.containers import check_saving
from launcher.stages.names_and_paths import JOB_NAME, SAFE_NAME, check_path, check_variables

AnyNode = StageConfig | StageSection
Node = TypeVar("Node", bound=AnyNode)

# File systems take names of 255 bytes; those of the files have a prefix, a suffix and a job's id besides.
_LONGEST_NAME = 200

# Keys of the whole launch; the root's keys of the same names were derived from them.
_OF_THE_LAUNCH = ("scheduler", "slurm_conf", "engine", "container")

_MAPPINGS = ("env_vars", "env_expand", "sbatch", "spank", "gpu_types")


class StageRun(NamedTuple):
    """One launch of a stage, prepared for the function that plans its job.

    `config` has the cluster as `stage_cluster` changes it for the stage, `node` is the stage's own `run`.
    """

    stage: str
    config: RunConfig
    node: RunConfigNode
    paths: LaunchPaths

    @property
    def changes(self) -> Mapping[str, Any]:
        """The stage's changes to the cluster, which win over the stage's own requests."""
        return stage_changes(self.config, self.stage)

    @property
    def results_key(self) -> str:
        """The configuration key that determines the run's directory."""
        is_ours = self.paths.run_dir.is_relative_to(self.config.base_results_dir)
        return "base_results_dir" if is_ours else f"{self.stage}.run.results_dir"


def section(run: StageRun) -> dict[str, Any]:
    """Return the stage's node as its job reads it."""
    node = run.config.model_dump(include={run.stage})[run.stage]
    return {name: value for name, value in node.items() if name != "run"}


class Stage(NamedTuple, Generic[Node]):
    """One stage of those that `stages` names; `model` is its node in the configuration.

    `plan` plans the job of a launch, before `add_environment`. `split` returns a configuration for each job
    of the stage, from one that has this stage alone. `follow` completes the node from the stages before it:
    the configuration that it reads has their nodes, and no others. `writes` are the files and directories
    that a later stage may read. `alone` says why no other stage can be launched with it.
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


class Engine(NamedTuple):
    """A program that trains.

    `configure` completes the configuration of a launch, or refuses keys that the program has no option for.
    `payload` runs the program on the result, with the variables of `environment`. Of a model it leaves the
    nodes `unread` where the data are mock data, which come from no file.
    """

    configure: Callable[[RunConfig, TrainingConfig, dict[str, Any]], dict[str, Any]]
    payload: Callable[[StageRun, TrainingConfig, Mapping[str, Any]], Payload]
    environment: Callable[[Mapping[str, Any], TrainingConfig, Resources], dict[str, str]] = lambda *_: {}
    unread: tuple[str, ...] = ("data",)


def remove_own_keys(config: RunConfig, training: TrainingConfig, written: Mapping[str, Any]) -> None:
    """Remove the options of our trainer, and refuse those that are set: other engines would ignore them."""
    own = {
        f"training.resume.{name}": value
        for name, value in training.resume
        if name != "accept_data" and value != ResumeNode.model_fields[name].default
    }
    if training.model.get("teacher") is not None:
        own["training.model.teacher"] = training.model["teacher"]
    for key, value in own.items():
        engines = f"engine={config.engine} has no such option; engine=megatron has"
        raise setting_error(f"{key}={literal(value)}: {engines}")
    for name in ("teacher", "distillation"):
        written["model"].pop(name, None)


def prepare(stage: str, node: RunConfigNode, config: RunConfig, number: int) -> StageRun:
    """Prepare a launch of a stage; raise UserError if its names or its changes to the cluster are wrong."""
    _check_tell(config)
    cluster = stage_cluster(config, stage)
    paths = launch_paths(stage, node, cluster, number)
    return StageRun(stage, config.model_copy(update={"cluster": cluster}), node, paths)


def launch_paths(stage: str, run: RunConfigNode, cluster: ClusterConfig, number: int) -> LaunchPaths:
    """Return the paths of a launch; raise UserError if the run's name, or the job's, is no file name."""
    job_name = f"{cluster.job_name_prefix}{run.name}"
    for key, value, name, valid, what, signs in (
        (f"{stage}.run.name", run.name, run.name, SAFE_NAME, "not a safe file name", ". _ + = -"),
        (
            "cluster.job_name_prefix",
            cluster.job_name_prefix,
            job_name,
            JOB_NAME,
            "not a safe job name",
            ". _ + = - : @",
        ),
    ):
        if not valid.fullmatch(name):
            hint = f"valid: letters, digits and {signs} with a letter or digit first"
            raise setting_error(f"{key}={literal(value)}: {what}", hint=hint)
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


# --- the environment of a job besides its payload: variables, cores, a profiler

_HOPPER, _BLACKWELL, _BLACKWELL_WORKSTATION = 9, 10, 12


def add_environment(job: Job, config: RunConfig, paths: LaunchPaths) -> Job:
    """Complete a job that a stage planned.

    The variables derived from the model come first: the cluster's and the user's win over them, and a null
    leaves one out.
    """
    check_saving(job.container, job.resources)
    job = replace(job, mpi=_mpi(job, config), environment_files=_environment_files(config, job))
    training = config.training
    if training is None or training.trainer.get("accelerator", "gpu") != "gpu":
        return job
    own_variables = {*config.cluster.env_vars, *config.env_vars}
    derived = {
        name: value for name, value in _environment(training.model).items() if name not in own_variables
    }
    job = replace(
        job,
        environment={**derived, **job.environment},
        gpu_environment=_gpu_environment(training.model, own_variables),
    )
    if config.workspace is not None:
        return job  # its shell is no task to be bound to cores, traced or boosted
    profile = _profile(training.model, paths)
    return replace(
        job,
        binding=_binding(config),
        profile=profile,
        vboost=config.enable_vboost,
        directories={**job.directories, **({paths.profiles: None} if profile else {})},
    )


def _environment_files(config: RunConfig, job: Job) -> dict[str, str]:
    files = dict(config.env_files)
    check_variables("env_files", files)
    if config.wandb_api_key_file is not None:
        files.setdefault("WANDB_API_KEY", config.wandb_api_key_file)
    by_name = {name: path for name, path in files.items() if path is not None}
    for name, path in by_name.items():
        key = f"env_files.{name}" if name in config.env_files else "wandb_api_key_file"
        check_path(path, key)
        if name in job.environment:
            raise setting_error(f"{key}: env_vars.{name} is set too", hint=f"env_vars.{name}=null")
    return by_name


def _check_tell(config: RunConfig) -> None:
    """Refuse ways to tell people that cannot work.

    Raises
    ------
    UserError
        If a mail has no address, or a path cannot be one.
    """
    tell = config.watch.tell
    for key, path in tell.files().items():
        check_path(path, key)
    if tell.mail.server is not None:
        for key, value in (("to", tell.mail.to), ("sender", tell.mail.sender)):
            if not value:
                key = f"watch.tell.mail.{key}"
                raise setting_error(
                    f"{key} is not set, and watch.tell.mail.server is", hint=f"{key}=me@site.org"
                )
    if tell.webhook.style == "pagerduty" and tell.webhook.url_file and not tell.webhook.key_file:
        key = "watch.tell.webhook.key_file"
        raise setting_error(f"{key} is not set: PagerDuty needs a routing key", hint=f"{key}=FILE")


def _mpi(job: Job, config: RunConfig) -> str | None:
    """Return the value of `srun --mpi`: PMIx where NeMo starts user buffers, as its launcher does."""
    cluster, model = config.cluster, (job.config or {}).get("model", {})
    is_set = cluster.mpi is not None or any(text.startswith("--mpi") for text in cluster.srun_args)
    if is_set or job.engine != "nemo" or cluster.scheduler == "local" or not model.get("ub_tp_comm_overlap"):
        return cluster.mpi
    return "pmix" if model.get("ub_tp_comm_bootstrap_backend") in (None, "mpi") else None


def _environment(model: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that the NeMo launcher sets by the model's layout (its stages.py, 2025-04)."""
    if model.get("fsdp"):
        return {}
    parallel = max(_count(model, "tensor_model_parallel_size"), _count(model, "context_parallel_size"))
    # One queue to the GPU, so that communication starts before the computation that it hides behind.
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if parallel > 1 else {}


def _gpu_environment(model: Mapping[str, Any], own_variables: set[str]) -> dict[int, dict[str, str]]:
    """Return the variables that NeMo's launcher sets by the layout and, in the job, the GPU's generation."""
    pipeline = _count(model, "pipeline_model_parallel_size")
    margins, hopper = {}, {}
    if pipeline > 1 and _count(model, "virtual_pipeline_model_parallel_size") > 1:
        # Multiprocessors that layer norms leave to the communication between pipeline stages.
        margins = {"NVTE_FWD_LAYERNORM_SM_MARGIN": "8", "NVTE_BWD_LAYERNORM_SM_MARGIN": "8"}
    if pipeline > 1 and model.get("ub_tp_comm_overlap") and not model.get("fp8"):
        # The ring exchange of tensor parallel all-gathers gets in the way of the pipeline's there, in bf16.
        hopper = {"NVTE_UB_SPLIT_AG": "0"}
    by_generation = {_HOPPER: {**margins, **hopper}, _BLACKWELL: margins, _BLACKWELL_WORKSTATION: margins}
    added = {
        generation: {name: value for name, value in variables.items() if name not in own_variables}
        for generation, variables in by_generation.items()
    }
    return {generation: variables for generation, variables in added.items() if variables}


def _count(model: Mapping[str, Any], key: str) -> int:
    """Return a parallel size, or 1 if it is not a number: the checks report that."""
    value = model.get(key)
    return value if isinstance(value, int) else 1


def _binding(config: RunConfig) -> NumaMapping | None:
    mapping = config.numa_mapping
    if mapping.max_cores is not None and mapping.max_cores < mapping.min_cores:
        raise setting_error(
            f"numa_mapping.max_cores={mapping.max_cores}: less than min_cores, {mapping.min_cores}",
            also=("numa_mapping.min_cores",),
        )
    # A site's own binding by srun wins; without a scheduler two runs could share cores.
    by_srun = any(text.startswith("--cpu-bind") for text in config.cluster.srun_args)
    if not mapping.enable or by_srun or config.cluster.scheduler == "local":
        return None
    return mapping


def _profile(model: Mapping[str, Any], paths: LaunchPaths) -> Profile | None:
    """Nsight Systems around the tasks of some ranks; the engine starts and stops the capture itself."""
    node = model.get("nsys_profile")
    if not isinstance(node, Mapping) or not node.get("enabled"):
        return None
    ranks, trace = node.get("ranks", [0]), node.get("trace", ["nvtx", "cuda"])
    key = "training.model.nsys_profile"
    if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks) or not ranks:
        raise setting_error(f"{key}.ranks={literal(ranks)}: expected a list of ranks, such as [0]")
    if not isinstance(trace, list) or not all(isinstance(name, str) for name in trace) or not trace:
        hint = f"{key}.trace=[nvtx,cuda]"
        raise setting_error(f"{key}.trace={literal(trace)}: expected a list of names", hint=hint)
    return Profile(tuple(ranks), tuple(trace), str(paths.profiles))
