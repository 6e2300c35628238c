"""The parts of a job that all stages share: names, resources, queue, container, environment."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from arithmetic.gpus import GPUS, Gpu, MissingFigures, gres_type, named, plain_name, with_site
from launcher.config import schema
from launcher.config.schema import ClusterConfig, RunConfig, RunConfigNode
from launcher.errors import UserError, nearest, shown
from launcher.plan import SOURCES_WITHOUT_PATH, Container, ContainerOptions, Queue, Resources
from launcher.runs.paths import LaunchPaths
from launcher.secrecy import is_secret_key
from launcher.stages.mounts import mounts_of

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")

# File systems take names of 255 bytes; those of the files have a prefix, a suffix and a job's id besides.
_LONGEST_NAME = 200

# So that `pyxis_`, a job's id and the digits of an image fit into a file's name with it.
_LONGEST_CONTAINER_NAME = 100
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_IMAGE_FILE = (".sqsh", ".squashfs")

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
    "rendezvous": "the job script sets this variable for each task",
    "ours": "names that begin with SLIPWAY_ are Slipway's own",
}


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
        if not _SAFE_NAME.fullmatch(name):
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
    """Return the resources of a job that uses the cluster's GPUs, `tasks` to a node."""
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
        what, hint = " or ".join(names), " or ".join(f"cluster.gpu={each}" for each in names)
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
    parts = {each: _parts(each) for each in nearest(name, valid, count=5)}
    return [
        each
        for each, (its_letters, its_digits) in parts.items()
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
    given = [key for key in ("gpus_per_task", "gpus_per_node", "gres") if getattr(cluster, key) is not None]
    request = cluster.gpu_request
    if request is None:
        return given[0] if given else "none"
    if request != "none" and request not in given:
        raise UserError(
            f"cluster.gpu_request={request}: cluster.{request} is null",
            key="cluster.gpu_request",
            also=(f"cluster.{request}",),
            hint=f"set it, cluster.{request}=..., or choose one of {', '.join([*given, 'none'])}",
        )
    return request


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


def container(
    config: RunConfig, writable: Mapping[Path, str], readable: Mapping[Path, str]
) -> Container | None:
    """Return the container with `writable` and read-only directories and the user's own mounts.

    Parameters
    ----------
    writable, readable
        What the job needs, each with the key that it comes from.

    Raises
    ------
    UserError
        If the image or a mount is not one that Pyxis can take.
    """
    if config.container is None:
        return None
    _check_image(config.container)
    mounts = mounts_of(writable, readable, config.container_mounts)
    made = Container(config.container, mounts, _container_options(config.container_options))
    _check_srun_args(config.cluster.srun_args)
    _check_file(made)
    return made


def _container_options(given: schema.ContainerOptions) -> ContainerOptions:
    for key in ("stage_to", "workdir", "save"):
        path = getattr(given, key)
        if path is not None and not Path(path).is_absolute():
            raise UserError(
                f"container_options.{key}={shown(path)}: a whole path is needed",
                key=f"container_options.{key}",
            )
    _check_container_name(given.name)
    _check_variables(given.env)
    return ContainerOptions(**{**given.model_dump(), "env": tuple(given.env)})


def _check_container_name(name: str | None) -> None:
    """Refuse a name that Enroot takes for a path, or of which Pyxis takes a part for its own words."""
    if name is None or (_SAFE_NAME.fullmatch(name) and len(name) <= _LONGEST_CONTAINER_NAME):
        return
    key, stem = "container_options.name", name.partition(":")[0]
    told, hint = "not a name of a container", "valid: letters, digits and . _ + = -"
    if name != stem and _SAFE_NAME.fullmatch(stem):
        told = f"a name alone is needed here, without Pyxis' {shown(name[len(stem) :])}"
        hint = f"{key}={stem}: it is made where there is none of the same image, and else used"
    elif len(name) > _LONGEST_CONTAINER_NAME:
        told = f"{len(name)} characters are too many"
        hint = f"valid: up to {_LONGEST_CONTAINER_NAME}"
    raise UserError(f"{key}={shown(name)}: {told}", key=key, hint=hint)


def _check_variables(names: Iterable[str]) -> None:
    key = "container_options.env"
    for text in names:
        if _VARIABLE.fullmatch(text):
            continue
        name, sign, value = text.partition("=")
        hint = "valid: names of variables of the job, such as LD_LIBRARY_PATH"
        if sign and _VARIABLE.fullmatch(name):
            hint = f"env_vars.{name}={'...' if is_secret_key(name) else value} sets it, in the container too"
        raise UserError(
            f"{key}: {shown(f'{name}=...' if sign else text)} is not the name of a variable",
            key=key,
            hint=hint,
        )


def _check_srun_args(arguments: Iterable[str]) -> None:
    """Refuse a container's name that Slipway would know nothing of: the container of an older image ran."""
    for text in arguments:
        name = re.fullmatch(r"(?:--)?container-name(?:=(.*))?", text)
        if name:
            key = "cluster.srun_args"
            told = f"{key}: {shown(text)}: a container with a name runs, whatever image it was made of"
            hint = f"container_options.name={name[1] or 'NAME'}, which is another container for another image"
            raise UserError(told, key=key, hint=hint)


def check_saving(container: Container | None, resources: Resources) -> None:
    """Refuse to have several nodes write one image file: each writes what it ran, over the others.

    Raises
    ------
    UserError
        If `container_options.save` is set for a job that may have several nodes.
    """
    most = max(resources.node_counts)
    if container is not None and container.options.save is not None and most > 1:
        key = "container_options.save"
        raise UserError(
            f"{key}={shown(container.options.save)}: each of the job's {most} nodes would write this file",
            key=key,
            hint=f"{key}=null, or save from a job of one node (slipway workspace)",
        )


def _check_image(image: str) -> None:
    if not image.strip():
        raise UserError("container='': an image is needed", key="container", hint="null is bare metal")
    if image.endswith(_IMAGE_FILE) and not Path(image).is_absolute():
        # Pyxis would look for an image of that name in a registry.
        raise UserError(
            f"container={shown(image)}: an image file is given by its whole path",
            key="container",
            hint=f"container={Path(image).expanduser().absolute()}",
        )


def _check_file(container: Container) -> None:
    """Refuse what needs an image that is a file, and what Apptainer does not do."""
    options, key = container.options, "container_options.runtime"
    if options.stage_to is not None and not container.is_file:
        key = "container_options.stage_to"
        raise _needs_file(key, f"{key}={shown(options.stage_to)}: files are copied to the nodes", container)
    if options.runtime != "apptainer":
        return
    if not container.is_file:
        raise _needs_file(key, f"{key}=apptainer: files are what it starts here", container)
    for mount in container.mounts:
        if mount.source in SOURCES_WITHOUT_PATH:
            raise UserError(
                f"container_mounts: {mount.source}:{mount.target} is Pyxis', and Apptainer has no such mount",
                key="container_mounts",
                also=(key,),
                hint="leave it out: Apptainer's /tmp is the node's own",
            )
    for name in ("name", "save"):
        value = getattr(options, name)
        if value is not None:
            raise UserError(
                f"container_options.{name}={shown(value)}: Apptainer keeps no unpacked containers",
                key=f"container_options.{name}",
                also=(key,),
                hint=f"container_options.{name}=null, or {key}=pyxis",
            )


def _needs_file(key: str, told: str, container: Container) -> UserError:
    image = container.image
    return UserError(
        f"{told}, and container={image} is an image of a registry",
        key=key,
        also=("container",),
        hint=f"launch --build, or slipway image import {shlex.quote(image)} and container= its file",
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


def check_names(key: str, names: Iterable[str]) -> None:
    """Refuse what no shell variable can be called."""
    for name in names:
        if not _VARIABLE.fullmatch(name):
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
        If it is given by a relative path: the job starts elsewhere.
    """
    given = config.cluster.python
    if given is not None:
        if not given or ("/" in given and not Path(given).is_absolute()):
            raise UserError(
                f"cluster.python={shown(given)}: a name or a whole path is needed",
                key="cluster.python",
                hint=f"cluster.python={Path(given).expanduser().absolute()}" if given else None,
            )
        return given
    return "python3" if config.container is not None else sys.executable
