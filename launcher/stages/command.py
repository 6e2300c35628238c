"""The command stage: a program of the site, such as a converter or a benchmark, as a job."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from launcher.config.late_stages import CommandConfig
from launcher.config.schema import ClusterConfig, RunConfig
from launcher.errors import literal, setting_error
from launcher.plan import Job, Payload
from launcher.stages.common import (
    cpu_environment,
    drop_gpus,
    environment,
    gpus_as_requested,
    resources,
    stage_job,
)
from launcher.stages.names_and_paths import check_path, check_variables, is_program
from launcher.stages.stage import Stage, StageRun

STAGE: Final = "command"


def _plan(run: StageRun, command: CommandConfig) -> Job:
    """Plan a site's own program: as many tasks as asked for, without GPUs unless it asks for them."""
    config, paths = run.config, run.paths
    cluster = config.cluster.model_copy(update=_changes(command, config.cluster, run.changes))
    check_variables("command.env_vars", command.env_vars)
    shared = cpu_environment(run) if command.gpus_per_node == 0 else environment(config)
    variables = {name: value for name, value in {**shared, **command.env_vars}.items() if value is not None}
    written = [Path(check_path(path, "command.writable")) for path in command.writable]
    requested = resources(cluster, command.run, nodes=command.nodes, tasks=command.tasks_per_node)
    if command.gpus_per_node:
        gpus, gres = gpus_as_requested(command.gpus_per_node, requested.gres)
        requested = replace(requested, gpus_per_node=gpus, gpus_per_task=None, gres=gres)
    argv, workdir = _argv(command), str(paths.results)
    if command.workdir is not None:
        workdir = check_path(command.workdir, "command.workdir")
    # A mount of a missing directory fails: mount this one only if the program's words name it.
    is_named = any(config.data_dir in text for text in (*argv, workdir, *variables.values()))
    job = stage_job(
        run,
        requested,
        Payload(argv, workdir),
        engine=STAGE,
        cluster=cluster,
        variables=variables,
        readable={Path(config.data_dir): "data_dir"} if is_named else {},
        directories={paths.results: None, **dict.fromkeys(written, "command.writable")},
    )
    return replace(job, chain=replace(job.chain, restarts=config.resilience.restarts))


def _changes(command: CommandConfig, cluster: ClusterConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stage's requests in place of the cluster's; `stage_cluster` wins over them."""
    requested = {"cpus_per_task": command.cpus_per_task, "mem": command.mem}
    changes: dict[str, Any] = {key: value for key, value in requested.items() if value is not None}
    if command.gpus_per_node == 0:
        changes |= drop_gpus(cluster)
    return {key: value for key, value in changes.items() if key not in own}


def _argv(command: CommandConfig) -> tuple[str, ...]:
    program = command.argv[0]
    if not is_program(program):
        whole = [str(Path(program).expanduser().absolute()), *command.argv[1:]]
        raise setting_error(
            f"command.argv: {literal(program)}: the program needs its name or a whole path",
            hint=f"command.argv=[{', '.join(map(shlex.quote, whole))}]" if program else None,
        )
    return tuple(command.argv)


def _use_own_container(config: RunConfig, command: CommandConfig) -> list[RunConfig]:
    return [config.model_copy(update={"container": command.container})]


def _writes(_config: RunConfig, command: CommandConfig) -> list[Path]:
    return [Path(command.run.results_dir), *map(Path, command.writable)]


COMMAND = Stage(STAGE, CommandConfig, _plan, split=_use_own_container, writes=_writes)
