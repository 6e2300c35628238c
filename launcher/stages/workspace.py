"""The workspace stage: a shell on one node, with what a training would see there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher.config.schema import RunConfig
from launcher.config.stage_schema import TrainingConfig, WorkspaceConfig
from launcher.plan import Chain, Container, Job, Mount, Payload, Resources
from launcher.runs.paths import TASK_PACKAGES, TRAINER, LaunchPaths
from launcher.stages.common import StageRun, gpus_in_words
from launcher.stages.names_and_paths import required_program, whole_path
from launcher.stages.training import training_job

STAGE = "workspace"

# Where our trainer is in the container: below a directory that has nothing else.
_TRAINER_IN_CONTAINER = "/opt/slipway"
_SITE_DIRECTORIES = ("site-packages", "dist-packages")

_OF_SBATCH = "array batch export export-file ignore-pbs input kill-on-invalid-dep propagate"
_NOT_OF_SALLOC = frozenset(_OF_SBATCH.split())


def workspace_job(run: StageRun, workspace: WorkspaceConfig, training: TrainingConfig) -> Job:
    """Plan the shell: the job of the training, on one node, with another payload."""
    config, job = run.config, training_job(run, training)
    container = _container(job, config.engine)
    shell = required_program(workspace.shell, "workspace.shell", is_on_host=container is None)
    payload = Payload(
        argv=(shell,),
        working_dir=_working_dir(config, workspace, job),
        python_path=_python_path(config, job),
    )
    return replace(
        job,
        stage=STAGE,
        resources=_resources(job.resources, workspace),
        queue=replace(
            job.queue,
            requeue=None,
            signal=None,
            further={flag: value for flag, value in job.queue.further.items() if flag not in _NOT_OF_SALLOC},
        ),
        payload=payload,
        container=container,
        config=None,
        chain=Chain(exclude_hours=config.resilience.exclude_hours),
        directories=_directories(config, run.paths) if container is not None else {},
    )


def _container(job: Job, engine: str) -> Container | None:
    """Return the training's container, with the current trainer in place of a launch's copy."""
    if job.container is None:
        return None
    options = job.container.options
    # Pyxis takes an unpacked image by its name alone: the training's is not to be changed here.
    name = f"{options.name}_{STAGE}" if options.name is not None else None
    packages = TASK_PACKAGES if engine == "megatron" else ()
    trainer = [Mount(str(package), f"{_TRAINER_IN_CONTAINER}/{package.name}") for package in packages]
    return replace(
        job.container,
        mounts=(*job.container.mounts, *trainer),
        options=replace(options, name=name, save=None, stage_to=None),
    )


def _python_path(config: RunConfig, job: Job) -> tuple[str, ...]:
    if config.engine != "megatron":
        return job.payload.python_path
    if job.container is not None and config.cluster.scheduler != "local":
        return (_TRAINER_IN_CONTAINER,)
    # Of what is installed the interpreter knows; other ones are not to take all that is beside it.
    root = TRAINER.parent
    return () if root.name in _SITE_DIRECTORIES else (str(root),)


def _working_dir(config: RunConfig, workspace: WorkspaceConfig, job: Job) -> str:
    if workspace.workdir is not None:
        return whole_path(workspace.workdir, "workspace.workdir")
    if config.engine != "megatron":
        return job.payload.working_dir
    # The tasks of a training start in their launch's copy of the trainer; here there is no launch.
    is_inside = job.container is not None and config.cluster.scheduler != "local"
    return _TRAINER_IN_CONTAINER if is_inside else config.launcher_scripts_path


def _resources(requested: Resources, workspace: WorkspaceConfig) -> Resources:
    """Return one task with the resources of all tasks of a node, or with the requested GPUs."""
    tasks, wanted = requested.tasks_per_node, workspace.gpus
    cores = requested.cpus_per_task
    if cores is not None:
        cores *= tasks if wanted is None else max(1, min(wanted, tasks))
    gpus, gres = requested.gpus_per_node, requested.gres
    if requested.gpus_per_task is not None:
        gpus = requested.gpus_per_task * tasks
    if wanted is not None:
        gpus, gres = gpus_in_words(wanted, gres)
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
