"""The parts of a job that all stages share: names, resources, queue, environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from arithmetic.gpus import GPUS, Gpu, MissingFigures, gres_type, named, plain_name, with_site
from launcher.config.schema import ClusterConfig, RunConfig, StageName, parse
from launcher.config.stage_schema import RunConfigNode
from launcher.errors import UserError, nearest, shown
from launcher.plan import Queue, Resources
from launcher.runs.paths import LaunchPaths
from launcher.secrecy import MASK, hidden

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")

# File systems take names of 255 bytes; those of the files have a prefix, a suffix and a job's id besides.
_LONGEST_NAME = 200

VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)

# GPUs that are not in the table, with names as near as a slip: an A10, of 24 GB of GDDR6, is no A100
# (https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/, read in November 2026).
_OTHERS = ("a10",)

# Names that mean something else in the script. To some of bash's own it assigns by evaluating the value.
_TAKEN = re.compile(
    r"(?P<bash>BASH\w*|SHELLOPTS|POSIXLY_CORRECT|S?RANDOM|SECONDS|LINENO|EPOCH\w*|OPT(IND|ARG|ERR)|E?UID|PPID"
    r"|GROUPS|DIRSTACK|FUNCNAME|PIPESTATUS|HISTCMD|COMP_\w+|IFS|ENV|PS4|TMOUT|GLOBIGNORE|_|REPLY|MAPFILE)"
    r"|(?P<slurm>SBATCH_\w+|SLURM_(JOB|STEP|TASK|ARRAY|RESTART|SUBMIT|NODE)\w*"
    r"|SLURM_(PROCID|LOCALID|GTIDS|CPUS_ON_NODE|N(TASKS|NODES|PROCS)\w*))"
    r"|(?P<rendezvous>RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
    r"|(?P<ours>SLIPWAY_\w+)",
    re.ASCII,
)
_TAKEN_BY = {
    "bash": "bash has its own use for this variable",
    "slurm": "Slurm sets this variable in the job",
    "rendezvous": "the job sets this variable for each task",
    "ours": "names that begin with SLIPWAY_ are Slipway's own",
}


# What is in front of the number: all of `gpu` and `gpu:h100`, and that of `gpu:8` and `gpu:h100:8`.
_OF_GPUS = re.compile(r"(gpu(?::[\w.-]*[A-Za-z_][\w.-]*)?)(?::\d+)?")


def launch_paths(stage: str, run: RunConfigNode, cluster: ClusterConfig, number: int) -> LaunchPaths:
    """Return the paths of a launch of a stage's run.

    Raises
    ------
    UserError
        If the run's name, or the job's, cannot be a file name.
    """
    job_name = f"{cluster.job_name_prefix}{run.name}"
    for key, value, name in (
        (f"{stage}.run.name", run.name, run.name),
        ("cluster.job_name_prefix", cluster.job_name_prefix, job_name),
    ):
        if not SAFE_NAME.fullmatch(name):
            raise UserError(
                f"{key}={shown(value)}: not a safe file name",
                key=key,
                hint="valid: letters, digits and . _ + = - with a letter or digit first",
            )
        if len(name) > _LONGEST_NAME:
            raise UserError(
                f"{key}={shown(value)}: {len(name)} characters are too many for the names of its files",
                key=key,
                hint=f"valid: up to {_LONGEST_NAME}, cluster.job_name_prefix included",
            )
    return LaunchPaths(Path(run.results_dir).absolute(), run.name, job_name, number)


def resources(cluster: ClusterConfig, run: RunConfigNode, *, nodes: int, tasks: int) -> Resources:
    """Return the resources of a job on this cluster, with `tasks` tasks per node."""
    request, table = _gpu_request(cluster), _gpu_types(cluster)
    return Resources(
        nodes=nodes,
        tasks_per_node=tasks,
        # One way of asking for GPUs at a time: together they would add up or be refused.
        gpus_per_node=cluster.gpus_per_node if request == "gpus_per_node" else None,
        gpus_per_task=cluster.gpus_per_task if request == "gpus_per_task" else None,
        gres=cluster.gres if request == "gres" else None,
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
        return with_site(rows)
    except MissingFigures as error:
        key = f"cluster.gpu_types.{error.name}"
        near = nearest(error.name, GPUS)
        raise UserError(
            f"{key}: not in the table, and without {', '.join(error.keys)}",
            key=key,
            hint=f"did you mean {near[0]}?" if near else "docs/memory.md has what a new GPU needs",
        ) from error


def _gpu(name: str, table: Mapping[str, Gpu]) -> str:
    """Return the name in the table of the GPU that a user means."""
    meant = named(name, table)
    if len(meant) == 1:
        return meant[0].name
    if meant:
        names = [gpu.name for gpu in meant]
        what, hint = " or ".join(names), " or ".join(f"cluster.gpu={gpu_name}" for gpu_name in names)
    else:
        short = {gpu.generation for gpu in table.values() if named(gpu.generation, table)}
        what, near = "not a GPU that is known here", _misspelt(name, [*table, *sorted(short)])
        valid = f"valid: {', '.join(table)}; others: cluster.gpu_types"
        hint = f"did you mean {near[0]}?\n{valid}" if near else valid
    raise UserError(f"cluster.gpu={shown(name)}: {what}", key="cluster.gpu", hint=hint)


def _misspelt(name: str, valid: Iterable[str]) -> list[str]:
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
    """Return the letters and the digits of a GPU's name, without what comes after it: ``h``, ``100``."""
    model = plain_name(name).partition(" ")[0]
    return re.sub(r"\d", "", model), re.sub(r"\D", "", model)


def _gpu_request(cluster: ClusterConfig) -> str:
    """Return the key that requests GPUs, or ``none``.

    Raises
    ------
    UserError
        If two of them contradict each other, or the one that is asked for is not set.
    """
    gpus = cluster.gpus_per_node
    named = re.fullmatch(r"gpu(?::[\w.-]+)?:(\d+)", cluster.gres or "")
    if gpus is not None and named and int(named.group(1)) != gpus:
        raise UserError(
            f"cluster.gres={cluster.gres!r} and cluster.gpus_per_node={gpus} contradict each other",
            key="cluster.gres",
            also=("cluster.gpus_per_node",),
            hint="make them agree, or set one of them to null",
        )
    set_keys = [
        key for key in ("gpus_per_task", "gpus_per_node", "gres") if getattr(cluster, key) is not None
    ]
    request = cluster.gpu_request
    if request is None:
        return set_keys[0] if set_keys else "none"
    if request != "none" and request not in set_keys:
        raise UserError(
            f"cluster.gpu_request={request}: cluster.{request} is null",
            key="cluster.gpu_request",
            also=(f"cluster.{request}",),
            hint=f"set it, cluster.{request}=..., or choose one of {', '.join([*set_keys, 'none'])}",
        )
    return request


def gpus_in_words(gpus: int, gres: str | None) -> tuple[int | None, str | None]:
    """Return a number of GPUs in the words in which the cluster requests them."""
    parts = (gres or "").split(",")
    kinds = [match[1] for part in parts if (match := _OF_GPUS.fullmatch(part))]
    if not kinds:
        return gpus or None, gres
    others = [part for part in parts if not _OF_GPUS.fullmatch(part)]
    return None, ",".join([f"{kinds[0]}:{gpus}", *others] if gpus else others) or None


def with_gpu_per_task(requested: Resources) -> Resources:
    """Return a request for a GPU for each task: a small job does not need the whole node."""
    if requested.gpus_per_task is not None:
        return requested
    gpus, gres = gpus_in_words(requested.tasks_per_node, requested.gres)
    return replace(
        requested, gpus_per_node=gpus if requested.gpus_per_node else None, gres=gres, exclusive=False
    )


def queue(cluster: ClusterConfig, run: RunConfigNode) -> Queue:
    return Queue(
        partition=cluster.partition,
        account=cluster.account,
        qos=cluster.qos,
        reservation=cluster.reservation,
        constraint=cluster.constraint,
        nodelist=cluster.nodelist,
        exclude=cluster.exclude,
        switches=cluster.switches,
        licenses=cluster.licenses,
        begin=cluster.begin,
        deadline=cluster.deadline,
        dependency=run.dependency,
        requeue=cluster.requeue,
        signal=cluster.signal,
        mail_type=cluster.mail_type,
        mail_user=cluster.mail_user,
        comment=cluster.comment,
        further={
            flag: value for flag, value in cluster.sbatch.items() if value is not None and value is not False
        },
    )


def environment(config: RunConfig) -> dict[str, str]:
    """Return the variables of a job: the cluster's, overridden by the user's; null leaves one out.

    Raises
    ------
    UserError
        If a name cannot be a variable's.
    """
    for key, variables in (("cluster.env_vars", config.cluster.env_vars), ("env_vars", config.env_vars)):
        check_names(key, variables)
    merged = {**config.cluster.env_vars, **config.env_vars}
    return {name: value for name, value in merged.items() if value is not None}


WITHOUT_GPUS = {
    "gpus_per_node": None,
    "gpus_per_task": None,
    "gres": None,
    "gpu_request": None,
    "exclusive": False,
}


def cpu_cluster(config: RunConfig, stage: StageName, *, cores: int | None) -> ClusterConfig:
    """Return the cluster without the GPUs that it requests for all jobs, unless `stage_cluster` sets them.

    `cores` of a task are requested where the cluster says nothing: Slurm's default is one core.
    """
    own = config.stage_cluster.get(stage, {})
    changes: dict[str, Any] = {key: value for key, value in WITHOUT_GPUS.items() if key not in own}
    if config.cluster.cpus_per_task is None:
        changes["cpus_per_task"] = cores
    return config.cluster.model_copy(update=changes)


def cpu_environment(config: RunConfig, stage: StageName) -> dict[str, str]:
    """Return the variables of a job without GPUs; see `environment`."""
    variables = environment(config)
    requests_gpus = any(config.stage_cluster.get(stage, {}).get(key) for key in WITHOUT_GPUS)
    if config.container is None or requests_gpus:
        return variables
    # NVIDIA's hook of the container looks for no driver then, so that nodes without GPUs do as well.
    return {"NVIDIA_VISIBLE_DEVICES": "void", **variables}


def check_names(key: str, names: Iterable[str]) -> None:
    """Refuse what no shell variable can be called."""
    for name in names:
        if not VARIABLE.fullmatch(name):
            raise UserError(
                f"{key}.{name}: not a name that a shell variable can have",
                key=f"{key}.{name}",
                hint="valid: letters, digits and _ with no digit first",
            )
        taken = _TAKEN.fullmatch(name)
        if taken:
            raise UserError(
                f"{key}.{name}: {_TAKEN_BY[taken.lastgroup or '']}",
                key=f"{key}.{name}",
                hint="choose another name",
            )


def python(config: RunConfig) -> str:
    """Return the interpreter of the tasks: the container's own, or the one that runs the launcher.

    Raises
    ------
    UserError
        If it is a relative path: the job starts elsewhere.
    """
    interpreter = config.cluster.python
    if interpreter is not None:
        if not interpreter or ("/" in interpreter and not Path(interpreter).is_absolute()):
            raise UserError(
                f"cluster.python={shown(interpreter)}: a name or a whole path is needed",
                key="cluster.python",
                hint=f"cluster.python={Path(interpreter).expanduser().absolute()}" if interpreter else None,
            )
        return interpreter
    return "python3" if config.container is not None else sys.executable


def config_arguments(paths: LaunchPaths) -> tuple[str, str]:
    """Return Hydra's arguments for the configuration of a launch."""
    return f"--config-path={paths.directory}", f"--config-name={paths.config_name}"


def whole_path(given: str, key: str) -> str:
    """Require an absolute path: tasks start in another directory than the user's.

    Raises
    ------
    UserError
        If it is given by a relative path.
    """
    if not Path(given).is_absolute():
        secret = hidden(key, given) == MASK  # in the place of its file's path
        raise UserError(
            f"{key}={MASK if secret else shown(given)}: a whole path is needed",
            key=key,
            hint=f"{key}={'/path/of/the/file' if secret else Path(given).expanduser().absolute()}",
        )
    return given.rstrip("/") or "/"


# What the whole launch has; the root's keys of the same names were derived from them.
_OF_THE_LAUNCH = ("scheduler", "slurm_conf", "engine", "container")

_MAPPINGS = ("env_vars", "sbatch", "gpu_types")


def stage_cluster(cluster: ClusterConfig, stage: str, changes: Mapping[str, Any]) -> ClusterConfig:
    """Lay the changes of `stage_cluster` over the cluster; mappings are merged key by key.

    Raises
    ------
    UserError
        If a key is none of the cluster's, or not a stage's own.
    """
    if not changes:
        return cluster
    path = f"stage_cluster.{stage}"
    for key in _OF_THE_LAUNCH:
        if key in changes:
            other = f"cluster.{key}" if key in ("scheduler", "slurm_conf") else key
            raise UserError(
                f"{path}.{key}: not a stage's own, but the launch's", key=f"{path}.{key}", hint=f"{other}=..."
            )
    ours = cluster.model_dump()
    merged = {**ours, **changes}
    for key in _MAPPINGS:
        if isinstance(changes.get(key), Mapping):
            merged[key] = {**ours[key], **changes[key]}
    return parse(ClusterConfig, merged, path)
