"""The command stage: a program of the site's own, such as a converter or a benchmark, as a job."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from launcher.config.schema import RunConfig
from launcher.config.stage_schema import CommandConfig
from launcher.errors import UserError, shown
from launcher.plan import Chain, Job, Payload, Resources
from launcher.runs.paths import LaunchPaths
from launcher.stages import common
from launcher.stages.common import WITHOUT_GPUS, whole_path
from launcher.stages.containers import container

STAGE: Final = "command"


def with_own_container(config: RunConfig) -> RunConfig:
    """Return the configuration of one stage with the image that its `container` names."""
    if config.stages != [STAGE] or config.command is None:
        return config
    return config.model_copy(update={"container": config.command.container})


def command_job(config: RunConfig, command: CommandConfig, paths: LaunchPaths) -> Job:
    """Plan a site's own program: as many tasks as asked for, without GPUs unless it asks for them.

    Raises
    ------
    UserError
        If a path is relative: the job starts in another directory than the user's.
    """
    own = config.stage_cluster.get("command", {})
    cluster = config.cluster.model_copy(update=_changes(command, own))
    common.check_names("command.env_vars", command.env_vars)
    on_cpus = command.gpus_per_node == 0
    shared = common.cpu_environment(config, STAGE) if on_cpus else common.environment(config)
    variables = {**shared, **command.env_vars}
    written = [Path(whole_path(path, "command.writable")) for path in command.writable]
    job = Job(
        stage=STAGE,
        engine=STAGE,
        resources=_with_gpus(
            common.resources(cluster, command.run, nodes=command.nodes, tasks=command.tasks_per_node), command
        ),
        queue=common.queue(cluster, command.run),
        payload=Payload(argv=_argv(command), working_dir=_working_dir(command, paths)),
        environment={name: value for name, value in variables.items() if value is not None},
        srun_args=tuple(cluster.srun_args),
        merge_stderr=cluster.stderr_to_stdout,
        chain=Chain(exclude_hours=config.resilience.exclude_hours),
        directories=(paths.results, *written),
    )
    writable = {
        Path(config.base_results_dir): "base_results_dir",
        paths.run_dir: "command.run.results_dir",
        **dict.fromkeys(written, "command.writable"),
    }
    readable = {Path(config.data_dir): "data_dir"} if _names_data_dir(config, job) else {}
    return replace(job, container=container(config, writable, readable))


def _changes(command: CommandConfig, own: Any) -> dict[str, Any]:
    """Return what the stage asks for in place of the cluster's own; `stage_cluster` wins over it."""
    changes: dict[str, Any] = {"cpus_per_task": command.cpus_per_task, "mem": command.mem}
    changes = {key: value for key, value in changes.items() if value is not None}
    if command.gpus_per_node == 0:
        changes |= WITHOUT_GPUS
    return {key: value for key, value in changes.items() if key not in own}


def _with_gpus(resources: Resources, command: CommandConfig) -> Resources:
    if not command.gpus_per_node:
        return resources
    gpus, gres = common.gpus_in_words(command.gpus_per_node, resources.gres)
    return replace(resources, gpus_per_node=gpus, gpus_per_task=None, gres=gres)


def _argv(command: CommandConfig) -> tuple[str, ...]:
    program = command.argv[0]
    if not program or ("/" in program and not Path(program).is_absolute()):
        whole = [str(Path(program).expanduser().absolute()), *command.argv[1:]]
        raise UserError(
            f"command.argv: {shown(program)}: the program needs its name or a whole path",
            key="command.argv",
            hint=f"command.argv=[{', '.join(map(shlex.quote, whole))}]" if program else None,
        )
    return tuple(command.argv)


def _working_dir(command: CommandConfig, paths: LaunchPaths) -> str:
    if command.workdir is None:
        return str(paths.results)
    return whole_path(command.workdir, "command.workdir")


def _names_data_dir(config: RunConfig, job: Job) -> bool:
    """Return True if the program is told of ``data_dir``: a mount of a directory that is not there fails."""

    def texts() -> Iterator[str]:
        yield from job.payload.argv
        yield job.payload.working_dir
        yield from job.environment.values()

    return any(config.data_dir in text for text in texts())
