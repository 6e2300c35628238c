"""The workspace stage: a shell on one node, in the environment of a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher.config.late_stages import WorkspaceConfig
from launcher.config.overrides import recipe_and_flavor
from launcher.config.schema import RunConfig
from launcher.plan import Container, Job, Mount, Payload, Resources
from launcher.runs.paths import PACKAGE, LaunchPaths
from launcher.stages.common import base_chain, gpus_as_requested
from launcher.stages.names_and_paths import check_path, require_program
from launcher.stages.stage import Stage, StageRun
from launcher.stages.training import plan_training

STAGE = "workspace"

# Where our trainer is in the container: below a directory that has nothing else.
_TRAINER_IN_CONTAINER = "/opt/slipway"
_SITE_DIRECTORIES = ("site-packages", "dist-packages")

_OF_SBATCH = "array batch export export-file ignore-pbs input kill-on-invalid-dep propagate"
_NOT_OF_SALLOC = frozenset(_OF_SBATCH.split())


def _use_own_image(config: RunConfig, workspace: WorkspaceConfig) -> list[RunConfig]:
    """Use the workspace's own image, or the recipe's `dev` flavor."""
    image = workspace.container or config.container
    recipe = recipe_and_flavor(image or "")
    if workspace.container is None and recipe is not None and recipe[1] in (None, "run"):
        image = f"{recipe[0]}:dev"
    return [config.model_copy(update={"container": image})]


def _plan(run: StageRun, workspace: WorkspaceConfig) -> Job:
    """Plan the shell: the job of the training, on one node, with another payload."""
    config = run.config
    assert config.training is not None  # it is composed with each workspace
    job = plan_training(run, config.training)
    container, payload = job.container, job.payload
    has_trainer = str(run.paths.code) in payload.python_path
    shell = require_program(workspace.shell, f"{STAGE}.shell", is_on_host=container is None)
    working_dir, python_path = payload.working_dir, payload.python_path
    # The tasks of a training start in their launch's copy of our trainer; here there is no launch.
    if has_trainer and container is not None and config.cluster.scheduler != "local":
        working_dir, python_path = _TRAINER_IN_CONTAINER, (_TRAINER_IN_CONTAINER,)
    elif has_trainer:
        # The interpreter finds installed packages itself; another one must not import their neighbours.
        root = PACKAGE.parent
        python_path = () if root.name in _SITE_DIRECTORIES else (str(root),)
        working_dir = config.launcher_scripts_path
    if workspace.workdir is not None:
        working_dir = check_path(workspace.workdir, f"{STAGE}.workdir")
    return replace(
        job,
        stage=STAGE,
        resources=_shell_resources(job.resources, workspace),
        queue=replace(
            job.queue,
            requeue=None,
            signal=None,
            further={flag: value for flag, value in job.queue.further.items() if flag not in _NOT_OF_SALLOC},
        ),
        payload=Payload((shell,), working_dir, python_path),
        container=_container(container, PACKAGE if has_trainer else None),
        config=None,
        chain=base_chain(config),
        directories=_directories(config, run.paths) if container is not None else {},
    )


def _container(container: Container | None, package: Path | None) -> Container | None:
    """Return the training's container, with the current trainer in place of a launch's copy."""
    if container is None:
        return None
    options = container.options
    # Pyxis takes an unpacked image by its name alone: the training's is not to be changed here.
    name = f"{options.name}_{STAGE}" if options.name is not None else None
    trainer = [Mount(str(package), f"{_TRAINER_IN_CONTAINER}/{package.name}")] if package else []
    return replace(
        container,
        mounts=(*container.mounts, *trainer),
        options=replace(options, name=name, save=None, stage_to=None),
    )


def _shell_resources(requested: Resources, workspace: WorkspaceConfig) -> Resources:
    """Return one task with the resources of all tasks of a node, or with the requested GPUs."""
    tasks, shell_gpus = requested.tasks_per_node, workspace.gpus
    cores = requested.cpus_per_task
    if cores is not None:
        cores *= tasks if shell_gpus is None else max(1, min(shell_gpus, tasks))
    gpus, gres = requested.gpus_per_node, requested.gres
    if requested.gpus_per_task is not None:
        gpus = requested.gpus_per_task * tasks
    if shell_gpus is not None:
        gpus, gres = gpus_as_requested(shell_gpus, gres)
    return replace(
        requested,
        nodes=1,
        max_nodes=None,
        tasks_per_node=1,
        gpus_per_node=gpus,
        gpus_per_task=None,
        gres=gres,
        cpus_per_task=cores,
        time_limit=workspace.run.time_limit,
    )


def _directories(config: RunConfig, paths: LaunchPaths) -> dict[Path, str | None]:
    """Return the directories that the container mounts and that may not exist yet."""
    base = Path(config.base_results_dir)
    own: dict[Path, str | None] = {} if paths.run_dir.is_relative_to(base) else {paths.run_dir: None}
    return {base: "base_results_dir", **own}


WORKSPACE = Stage(
    STAGE,
    WorkspaceConfig,
    _plan,
    split=_use_own_image,
    alone="a workspace is interactive: no other stage can depend on it",
)
