"""The environment of a job besides its payload: variables, cores, a profiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.config.schema import RunConfig
from launcher.errors import literal, setting_error
from launcher.plan import Binding, Job, Profile
from launcher.runs.paths import LaunchPaths
from launcher.stages.containers import check_saving
from launcher.stages.names_and_paths import check_variables, checked_path

_HOPPER, _BLACKWELL, _BLACKWELL_WORKSTATION = 9, 10, 12


def add_environment(job: Job, config: RunConfig, paths: LaunchPaths) -> Job:
    """Complete a job that a stage planned.

    What follows from the model comes first: the cluster's variables and the user's win over it, and a null
    of theirs leaves it out.
    """
    check_saving(job.container, job.resources)
    job = replace(job, mpi=config.cluster.mpi, environment_files=_environment_files(config, job))
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
        checked_path(path, key)
        if name in job.environment:
            raise setting_error(f"{key}: env_vars.{name} is set too", hint=f"env_vars.{name}=null")
    return by_name


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
    """Return a parallel size, or 1 for what is not a number: the checks report it."""
    value = model.get(key)
    return value if isinstance(value, int) else 1


def _binding(config: RunConfig) -> Binding | None:
    mapping = config.numa_mapping
    if mapping.max_cores is not None and mapping.max_cores < mapping.min_cores:
        raise setting_error(
            f"numa_mapping.max_cores={mapping.max_cores}: less than min_cores, {mapping.min_cores}",
            also=("numa_mapping.min_cores",),
        )
    # A site that tells srun how to bind knows its reasons; without a scheduler nobody keeps two runs apart.
    by_srun = any(text.startswith("--cpu-bind") for text in config.cluster.srun_args)
    if not mapping.enable or by_srun or config.cluster.scheduler == "local":
        return None
    return Binding(
        all_threads=mapping.cores == "all_logical",
        balanced=mapping.balanced,
        min_cores=mapping.min_cores,
        max_cores=mapping.max_cores,
    )


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
