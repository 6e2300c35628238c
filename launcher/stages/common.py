"""What the jobs of all stages have in common."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.config.schema import ClusterConfig, RunConfig, RunConfigNode
from launcher.errors import UserError
from launcher.plan import Container, Mount, Queue, Resources
from launcher.runs.paths import LaunchPaths

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


def launch_paths(run: RunConfigNode, cluster: ClusterConfig, number: int) -> LaunchPaths:
    """Where a launch of a run lives.

    Raises
    ------
    UserError
        If the run's name, or the job's, cannot be a file name.
    """
    job_name = f"{cluster.job_name_prefix}{run.name}"
    for key, name in (("run.name", run.name), ("cluster.job_name_prefix with run.name", job_name)):
        if not _SAFE_NAME.fullmatch(name):
            raise UserError(
                f"{key}={name!r}: not a safe file name",
                hint="valid: letters, digits and . _ + = - with a letter or digit first",
            )
    return LaunchPaths(Path(run.results_dir).absolute(), run.name, job_name, number)


def resources(cluster: ClusterConfig, run: RunConfigNode, *, nodes: int, tasks: int) -> Resources:
    """The request of a job that uses the cluster's GPUs, `tasks` to a node."""
    gpus = cluster.gpus_per_node
    named = re.fullmatch(r"gpu(?::[\w.-]+)?:(\d+)", cluster.gres or "")
    if gpus is not None and named and int(named.group(1)) != gpus:
        raise UserError(
            f"cluster.gres={cluster.gres!r} and cluster.gpus_per_node={gpus} contradict each other",
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


def container(config: RunConfig, writable: Sequence[Path], readable: Sequence[Path]) -> Container | None:
    """The container with `writable` and read-only directories and the user's own mounts.

    A read-only directory below or equal to a writable one is not mounted again: it would cover that.

    Raises
    ------
    UserError
        If a mount is not ``source``, ``source:target`` or ``source:target:flags``.
    """
    if config.container is None:
        return None
    mounts = [Mount(str(path), str(path)) for path in _outermost(writable)]
    mounts += [Mount(str(path), str(path), "ro") for path in readable if not _within(path, writable)]
    mounts.extend(_parse_mount(text) for text in config.container_mounts)
    return Container(config.container, tuple(mounts))


def _within(path: Path, others: Sequence[Path]) -> bool:
    return any(path.is_relative_to(other) for other in others)


def _outermost(paths: Sequence[Path]) -> list[Path]:
    return [path for path in dict.fromkeys(paths) if not _within(path, [p for p in paths if p != path])]


def _parse_mount(text: str) -> Mount:
    parts = text.split(":")
    if "," in text or len(parts) > 3 or not all(parts):
        raise UserError(
            f"container_mounts: {text!r} is not a mount",
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
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"env_vars.{name}: not a name that a shell variable can have")
    return {name: str(value) for name, value in config.env_vars.items() if value is not None}


def python(config: RunConfig) -> str:
    """The interpreter of the tasks: the container's own, or the one that runs the launcher."""
    if config.cluster.python is not None:
        return config.cluster.python
    return "python3" if config.container is not None else sys.executable
