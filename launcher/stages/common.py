"""The parts of a job that all stages share: resources, queue, environment, container."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from launcher.config.schema import ClusterConfig, ContainerOptions, RunConfig
from launcher.config.stage_schema import RunConfigNode
from launcher.errors import literal, nearest, setting_error
from launcher.plan import REFERENCE, RENDEZVOUS, Chain, Job, Payload, Queue, Resources
from launcher.runs.paths import LaunchPaths
from launcher.slurm.cluster import gpus_in_gres
from launcher.slurm.queue_flags import QueueFlags
from launcher.slurm.srun_options import STEP_SET_BY, ProgramWord, step_options
from launcher.stages.containers import container
from launcher.stages.health import add_spares, health_of
from launcher.stages.names_and_paths import check_path, check_variables, is_program, require_program
from launcher.stages.stage import StageRun
from slipway.arithmetic.gpus import GPUS, Gpu, MissingFigures, add_site, find_gpus, gres_type, normalize

# GPUs that are not in the table, with names as near as a slip: an A10, of 24 GB of GDDR6, is no A100
# (https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/, read in November 2026).
_OTHERS = ("a10",)

# The part in front of the number: all of `gpu` and `gpu:h100`, and that of `gpu:8` and `gpu:h100:8`.
_OF_GPUS = re.compile(r"(gpu(?::[\w.-]*[A-Za-z_][\w.-]*)?)(?::\d+)?")


def drop_gpus(cluster: ClusterConfig) -> dict[str, Any]:
    requests = dict.fromkeys(("gpus_per_node", "gpus_per_task", "gpu_request"))
    return {**requests, "gres": drop_gpu_gres(cluster.gres), "exclusive": False}


def stage_job(
    run: StageRun,
    requested: Resources,
    payload: Payload,
    *,
    cluster: ClusterConfig | None = None,
    variables: Mapping[str, str] | None = None,
    directories: Mapping[Path, str | None] | None = None,
    readable: Mapping[Path, str] | None = None,
    engine: str = "megatron",
    stage_config: Mapping[str, Any] | None = None,
) -> Job:
    """Return the job of a stage, with what the jobs of all stages have.

    `cluster` and `variables` replace those of `run`; `directories` and `readable` are further outputs and
    inputs, each with the key that it comes from.
    """
    config, cluster = run.config, cluster or run.config.cluster
    _check_step(cluster, config.container_options)
    directories = directories or {}
    writable = {
        Path(config.base_results_dir): "base_results_dir",
        run.paths.run_dir: f"{run.stage}.run.results_dir",
        **{path: key for path, key in directories.items() if key is not None},
    }
    image = container(config, writable, readable or {})
    return Job(
        stage=run.stage,
        engine=engine,
        resources=add_spares(config, run.stage, requested),
        queue=queue(cluster, run.node),
        payload=payload,
        container=image,
        stage_config=stage_config,
        environment=environment(config) if variables is None else variables,
        expansions=_expansions(config),
        setup=tuple(cluster.setup),
        srun_args=tuple(cluster.srun_args),
        task_prefix=tuple(cluster.task_prefix),
        merge_stderr=cluster.stderr_to_stdout,
        chain=base_chain(config),
        health=health_of(config, run.stage, image, [run.paths.run_dir, *directories, *(readable or {})]),
        directories=directories,
    )


def base_chain(config: RunConfig) -> Chain:
    """Return the chain of a job that is alone: the nodes that it avoids."""
    resilience, path = config.resilience, config.resilience.exclude_file
    if path is not None:
        path = check_path(path, "resilience.exclude_file")
    return Chain(exclude_hours=resilience.exclude_hours, exclude_file=path)


def _check_step(cluster: ClusterConfig, container_options: ContainerOptions) -> None:
    """Refuse options that another key sets, and a word that srun would take for the tasks' script."""
    for first in cluster.task_prefix[:1]:
        if first.startswith("-") or not is_program(first):
            message = f"cluster.task_prefix: {literal(first)}: a program's name or whole path is needed first"
            raise setting_error(message, "options of srun itself are in cluster.srun_args")
    set_by, key = dict(STEP_SET_BY), "cluster.srun_args"
    for name in ("cpus_per_task", "mpi"):
        if getattr(cluster, name) is not None:
            set_by[name.replace("_", "-")] = f"cluster.{name}"
    for name in ("workdir", "save"):
        if getattr(container_options, name) is not None:
            set_by[f"container-{name}"] = f"container_options.{name}"
    try:
        options = list(step_options(cluster.srun_args))
    except ProgramWord as error:
        whole = ",".join([*([error.before] if error.before else []), *error.words])
        hint = f"a value with commas needs quotes, those of YAML: '{key}=[\"{whole}\"]'"
        raise setting_error(
            f"{key}: srun would take {literal(error.words[0])} for the program, in place of the tasks",
            hint=hint if "=" in (error.before or "") else "words before each task: cluster.task_prefix",
        ) from error
    for option in options:
        if re.match(r"export=ALL(,|$)|open-mode=append$", f"{option.name}={option.value}"):
            continue  # as Slipway has it, or with more
        if (by := set_by.get(option.name)) is not None:
            value = f"{by}={option.value}" if option.value and " " not in by else None
            also = () if " " in by else (by,)
            words = " ".join(option.words) or f"-{option.name}"
            raise setting_error(f"{key}: {literal(words)}: --{option.name} is set by {by}", value, also)


def trainer_payload(run: StageRun, *module: str, options: Sequence[str] = ()) -> Payload:
    """Return a payload that runs a module of ours on the launch's configuration.

    It is the launch's own copy: a queued job must not run what someone edits meanwhile.
    """
    code = str(run.paths.code)
    argv = (python(run.config), "-u", "-m", *module, *config_arguments(run.paths), *options)
    return Payload(argv, working_dir=code, python_path=(code,))


def resources(cluster: ClusterConfig, run: RunConfigNode, *, nodes: int, tasks: int) -> Resources:
    """Return the resources of a job on this cluster, with `tasks` tasks per node."""
    request, table = _requesting_key(cluster), _gpu_types(cluster)
    return Resources(
        nodes=nodes,
        tasks_per_node=tasks,
        # One way of asking for GPUs at a time: together they would add up or be refused.
        gpus_per_node=cluster.gpus_per_node if request == "gpus_per_node" else None,
        gpus_per_task=cluster.gpus_per_task if request == "gpus_per_task" else None,
        gres=cluster.gres if request == "gres" else drop_gpu_gres(cluster.gres),
        cpus_per_task=cluster.cpus_per_task,
        gpu=_gpu(cluster.gpu, {**GPUS, **table}) if cluster.gpu is not None else None,
        gpu_type=gres_type(cluster.gres),
        memory=cluster.mem,
        exclusive=cluster.exclusive,
        time_limit=run.time_limit,
        gpu_types=table,
    )


def _gpu_types(cluster: ClusterConfig) -> dict[str, Gpu]:
    """Return the GPUs that the site adds to the table, or changes."""
    rows = {name: row.model_dump(exclude_none=True) for name, row in cluster.gpu_types.items()}
    try:
        return add_site(rows)
    except MissingFigures as error:
        key = f"cluster.gpu_types.{error.name}"
        near = _find_misspelt(error.name, GPUS)
        raise setting_error(
            f"{key}: not in the table, and without {', '.join(error.keys)}",
            hint=f"did you mean {near[0]}?" if near else _suggest_row(error.name),
        ) from error


def _gpu(name: str, table: Mapping[str, Gpu]) -> str:
    meant = find_gpus(name, table)
    if len(meant) == 1:
        return meant[0].name
    if meant:
        names = [gpu.name for gpu in meant]
        what, hint = " or ".join(names), " or ".join(f"cluster.gpu={gpu_name}" for gpu_name in names)
    else:
        short = {gpu.generation for gpu in table.values() if find_gpus(gpu.generation, table)}
        what, near = "not a GPU that is known here", _find_misspelt(name, [*table, *sorted(short)])
        valid = f"valid: {', '.join(table)}\n{_suggest_row(name)}"
        hint = f"did you mean {near[0]}?\n{valid}" if near else valid
    raise setting_error(f"cluster.gpu={literal(name)}: {what}", hint=hint)


def _suggest_row(name: str) -> str:
    """Return the override that adds a GPU to the table."""
    key = f"+cluster.gpu_types.{name if re.fullmatch('[A-Za-z][A-Za-z0-9_-]*', name) else 'NAME'}"
    row = "{memory_mib: 81559, peak_tflops: {bf16: 989.4}, memory_gb_s: 3350}"
    return f"another GPU, with its own figures in place of an H100's: {shlex.quote(f'{key}={row}')}"


def _find_misspelt(name: str, valid: Iterable[str]) -> list[str]:
    """Return the GPUs that a name may be a slip of: one of other letters and other digits is another GPU."""
    letters, digits = _parts(name)
    if letters + digits in _OTHERS:
        return []
    parts = {candidate: _parts(candidate) for candidate in nearest(name, valid, count=5)}
    return [
        candidate
        for candidate, (its_letters, its_digits) in parts.items()
        if letters == its_letters or digits == its_digits
    ]


def _parts(name: str) -> tuple[str, str]:
    """Return the letters and the digits at the start of a GPU's name: ``h``, ``100``."""
    model = normalize(name).partition(" ")[0]
    return re.sub(r"\d", "", model), re.sub(r"\D", "", model)


def _requesting_key(cluster: ClusterConfig) -> str:
    """Return the key that requests GPUs, or ``none``; raise UserError if two keys contradict each other."""
    gpus = cluster.gpus_per_node
    find_gpus = gpus_in_gres(cluster.gres or "")
    if gpus is not None and find_gpus and sum(number for _, number in find_gpus) != gpus:
        raise setting_error(
            f"cluster.gres={cluster.gres!r} and cluster.gpus_per_node={gpus} contradict each other",
            hint="make them agree, or set one of them to null",
            also=("cluster.gpus_per_node",),
        )
    set_keys = [
        key for key in ("gpus_per_task", "gpus_per_node", "gres") if getattr(cluster, key) is not None
    ]
    request = cluster.gpu_request
    if request is None:
        return set_keys[0] if set_keys else "none"
    if request != "none" and request not in set_keys:
        raise setting_error(
            f"cluster.gpu_request={request}: cluster.{request} is null",
            hint=f"set it, cluster.{request}=..., or choose one of {', '.join([*set_keys, 'none'])}",
            also=(f"cluster.{request}",),
        )
    return request


def gpus_as_requested(gpus: int, gres: str | None) -> tuple[int | None, str | None]:
    """Return a number of GPUs in the words in which the cluster requests them."""
    parts = (gres or "").split(",")
    kinds = [match[1] for part in parts if (match := _OF_GPUS.fullmatch(part))]
    if not kinds:
        return gpus or None, gres
    others = drop_gpu_gres(gres)
    return None, ",".join([f"{kinds[0]}:{gpus}", *([others] if others else [])]) if gpus else others


def drop_gpu_gres(gres: str | None) -> str | None:
    """Return the part of a value of `--gres` without GPUs, such as ``tmpfs:200g``."""
    return ",".join(part for part in (gres or "").split(",") if not _OF_GPUS.fullmatch(part)) or None


def request_gpu_per_task(requested: Resources) -> Resources:
    """Return a request for a GPU for each task: a small job does not need the whole node."""
    if requested.gpus_per_task is not None:
        return requested
    gpus, gres = gpus_as_requested(requested.tasks_per_node, requested.gres)
    return replace(
        requested, gpus_per_node=gpus if requested.gpus_per_node else None, gres=gres, exclusive=False
    )


# A key of `cluster`, or of `cluster.sbatch`, and a further flag of sbatch that contradicts it.
_EXCLUSIVE_FLAGS = (
    *(("mem", "mem-per-cpu"), ("mem", "mem-per-gpu"), ("mem_per_cpu", "mem-per-gpu")),
    *(("cpus_per_task", "cpus-per-gpu"), ("exclusive", "oversubscribe")),
)


def queue(cluster: ClusterConfig, run: RunConfigNode) -> Queue:
    """Return the queue options: the cluster's keys of the same names, and the run's dependency."""
    same = {field.name: getattr(cluster, field.name) for field in fields(QueueFlags)}
    further = {
        flag: value
        for flag, value in (*cluster.sbatch.items(), *cluster.spank.items())
        if value is not None and value is not False
    }
    for key, flag in _EXCLUSIVE_FLAGS:
        own = further.get(key.replace("_", "-")) or getattr(cluster, key, None)
        if own and flag in further:
            ours = key if hasattr(cluster, key) else f"sbatch.{key}"
            theirs = f"cluster.sbatch.{flag.replace('-', '_')}"
            raise setting_error(
                f"cluster.{ours}={literal(own)} and {theirs}={literal(further[flag])} exclude each other",
                hint=f"cluster.{ours}={'False' if own is True else 'null'}, or {theirs}=null",
                also=(theirs,),
            )
    return Queue(**same, dependency=run.dependency, further=further)


def environment(config: RunConfig) -> dict[str, str]:
    """Return the variables of a job: the cluster's, overridden by the user's; null leaves one out."""
    for key, variables in (("cluster.env_vars", config.cluster.env_vars), ("env_vars", config.env_vars)):
        check_variables(key, variables)
    return _set({**config.cluster.env_vars, **config.env_vars})


def _set(variables: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if value is not None}


def _expansions(config: RunConfig) -> dict[str, str]:
    """Return the variables that each task expands; raise UserError for a `$` without a variable's name."""
    for key, texts in (("cluster.env_expand", config.cluster.env_expand), ("env_expand", config.env_expand)):
        # The tasks have the rendezvous by then, and may change it.
        check_variables(key, texts.keys() - RENDEZVOUS)
        for name, value in texts.items():
            if "$" in re.sub(REFERENCE, "", value or ""):
                hint = "valid: $NAME and ${NAME}, in YAML and on the command line \\${NAME}; no commands"
                message = f"{key}.{name}={literal(value)}: $ is not followed by a variable's name"
                raise setting_error(message, hint)
    return _set({**config.cluster.env_expand, **config.env_expand})


def cpu_cluster(run: StageRun, *, cores: int | None) -> ClusterConfig:
    """Return the cluster without the GPUs that it requests for all jobs, unless `stage_cluster` sets them.

    `cores` of a task are requested where the cluster says nothing: Slurm's default is one core.
    """
    cluster = run.config.cluster
    changes = {key: value for key, value in drop_gpus(cluster).items() if key not in run.changes}
    if cluster.cpus_per_task is None:
        changes["cpus_per_task"] = cores
    return cluster.model_copy(update=changes)


def cpu_environment(run: StageRun) -> dict[str, str]:
    """Return the variables of a job without GPUs; see `environment`."""
    variables = environment(run.config)
    if run.config.container is None or any(run.changes.get(key) for key in drop_gpus(run.config.cluster)):
        return variables
    # NVIDIA's hook of the container looks for no driver then, so that nodes without GPUs do as well.
    return {"NVIDIA_VISIBLE_DEVICES": "void", **variables}


def python(config: RunConfig) -> str:
    """Return the interpreter of the tasks: the container's own, or the one that runs the launcher."""
    if config.cluster.python is not None:
        return require_program(config.cluster.python, "cluster.python")
    return "python3" if config.container is not None else sys.executable


def config_arguments(paths: LaunchPaths) -> tuple[str, str]:
    """Return Hydra's arguments for the configuration of a launch."""
    return f"--config-path={paths.directory}", f"--config-name={paths.config_name}"
