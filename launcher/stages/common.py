"""What the jobs of all stages have in common."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.config.schema import ClusterConfig, RunConfig, RunConfigNode
from launcher.errors import UserError, shown
from launcher.plan import Container, Mount, Queue, Resources
from launcher.runs.paths import LaunchPaths

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")

# File systems take names of 255 bytes; those of the files have a prefix, a suffix and a job's id besides.
_LONGEST_NAME = 200

_IMAGE_FILE = (".sqsh", ".squashfs")


def launch_paths(stage: str, run: RunConfigNode, cluster: ClusterConfig, number: int) -> LaunchPaths:
    """Where a launch of a stage's run lives.

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
    """The request of a job that uses the cluster's GPUs, `tasks` to a node."""
    gpus = cluster.gpus_per_node
    named = re.fullmatch(r"gpu(?::[\w.-]+)?:(\d+)", cluster.gres or "")
    if gpus is not None and named and int(named.group(1)) != gpus:
        raise UserError(
            f"cluster.gres={cluster.gres!r} and cluster.gpus_per_node={gpus} contradict each other",
            key="cluster.gres",
            also=("cluster.gpus_per_node",),
            hint="make them agree, or set one of them to null",
        )
    return Resources(
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus if cluster.gpus_per_task is None else None,
        gpus_per_task=cluster.gpus_per_task,
        # One way of asking for GPUs at a time: together they would add up or be refused.
        gres=cluster.gres if gpus is None and cluster.gpus_per_task is None else None,
        cpus_per_task=cluster.cpus_per_task,
        memory=cluster.mem,
        exclusive=cluster.exclusive,
        time_limit=run.time_limit,
    )


def queue(cluster: ClusterConfig, run: RunConfigNode) -> Queue:
    return Queue(partition=cluster.partition, account=cluster.account, dependency=run.dependency)


def container(
    config: RunConfig, writable: Mapping[Path, str], readable: Mapping[Path, str]
) -> Container | None:
    """The container with `writable` and read-only directories and the user's own mounts.

    A read-only directory below or equal to a writable one is not mounted again: it would cover that.

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
    mounts = [_mount(path, writable[path]) for path in _outermost(writable)]
    mounts += [_mount(path, key, "ro") for path, key in readable.items() if not _within(path, writable)]
    mounts.extend(_parse_mount(text) for text in config.container_mounts)
    return Container(config.container, tuple(mounts))


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


def _within(path: Path, others: Mapping[Path, str]) -> bool:
    return any(path.is_relative_to(other) for other in others)


def _outermost(paths: Mapping[Path, str]) -> list[Path]:
    def is_inner(path: Path) -> bool:
        return any(path != other and path.is_relative_to(other) for other in paths)

    return [path for path in paths if not is_inner(path)]


def _mount(path: Path, key: str, flags: str | None = None) -> Mount:
    if re.search("[,:]", str(path)):
        raise UserError(
            f"{key}: {shown(str(path))} cannot be mounted in a container: Pyxis separates with , and :",
            key=key,
            hint="rename the directory, or choose one without them",
        )
    return Mount(str(path), str(path), flags)


def _parse_mount(text: str) -> Mount:
    parts = text.split(":")
    if "," in text or len(parts) > 3 or not all(parts):
        raise UserError(
            f"container_mounts: {shown(text)} is not a mount",
            key="container_mounts",
            hint="valid: source, source:target or source:target:flags; Pyxis separates with , and :",
        )
    source = parts[0]
    target = parts[1] if len(parts) > 1 else source
    return Mount(source, target, parts[2] if len(parts) > 2 else None)


def environment(config: RunConfig) -> dict[str, str]:
    """The user's variables, those set to null left out.

    Raises
    ------
    UserError
        If a name cannot be a variable's.
    """
    for name in config.env_vars:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UserError(
                f"env_vars.{name}: not a name that a shell variable can have",
                key=f"env_vars.{name}",
                hint="valid: letters, digits and _ with no digit first",
            )
    return {name: value for name, value in config.env_vars.items() if value is not None}


def python(config: RunConfig) -> str:
    """The interpreter of the tasks: the container's own, or the one that runs the launcher.

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
