"""The checked configuration to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.config.overrides import STAGES
from launcher.config.schema import RunConfig
from launcher.config.secrets import check_secrets
from launcher.config.stage_schema import StageConfig, TrainingConfig
from launcher.errors import UserError
from launcher.plan import Assumptions, Job, Plan
from launcher.runs.paths import LaunchPaths
from launcher.stages.command import command_job, with_own_container
from launcher.stages.common import StageRun, launch_paths, prepare
from launcher.stages.conversion import STAGE as CONVERSION
from launcher.stages.conversion import behind_training as conversion_behind_training
from launcher.stages.conversion import conversion_job
from launcher.stages.data_preparation import by_phase, data_preparation_job
from launcher.stages.evaluation import STAGE as EVALUATION
from launcher.stages.evaluation import behind_conversion as evaluation_behind_conversion
from launcher.stages.evaluation import behind_training as evaluation_behind_training
from launcher.stages.evaluation import evaluation_job
from launcher.stages.job_environment import add_environment
from launcher.stages.training import training_job
from launcher.stages.workspace import STAGE as WORKSPACE
from launcher.stages.workspace import workspace_job

if TYPE_CHECKING:
    from launcher.stages.image import ImageWork


def by_stage(config: RunConfig) -> list[RunConfig]:
    """Return one configuration for each job of each requested stage, in that order.

    Raise UserError if the stages cannot be launched one after the other.
    """
    configs = [part for stage in _apart(config) for part in by_phase(with_own_container(stage))]
    directories = [prepare_launch(part).paths.run_dir for part in configs] if len(configs) > 1 else []
    double = next((path for position, path in enumerate(directories) if path in directories[:position]), None)
    if double is not None:
        raise UserError(
            f"stages=[{','.join(config.stages)}]: both would be launches of {double}",
            key=f"{config.stages[-1]}.run.results_dir",
            also=(f"{config.stages[-1]}.run.name",),
            hint=f"another name for one of them: {config.stages[-1]}.run.name=...",
        )
    return configs


def stage_name(config: RunConfig) -> str:
    """Return the name of a launch among those of one command: its stage, with the part of a preparation."""
    (stage,) = config.stages
    phase = config.data_preparation.phase if config.data_preparation is not None else None
    return f"{stage}.{phase}" if phase is not None else stage


def _apart(config: RunConfig) -> list[RunConfig]:
    """Return one configuration for each requested stage."""
    _check_every(config)
    if len(config.stages) == 1:
        return [config]
    _check_order(config)
    # What does not belong to a stage is taken out: nothing later on has to know that there are others.
    nodes = {stage: getattr(config, stage) for stage in STAGES}
    return [
        config.model_copy(
            update={
                "stages": [stage],
                **dict.fromkeys(STAGES),
                stage: _behind(config, nodes, config.stages[:position], stage),
            }
        )
        for position, stage in enumerate(config.stages)
    ]


def _behind(config: RunConfig, nodes: Mapping[str, Any], before: Sequence[str], stage: str) -> Any:
    """Return the node of a stage, with what it takes from the stages before it."""
    node, training = nodes[stage], config.training if "training" in before else None
    if node is None:
        return node
    if stage == CONVERSION and training is not None:
        return conversion_behind_training(node, training, training_paths(config, training))
    if stage == EVALUATION and training is not None:
        node = evaluation_behind_training(node, config, training, training_paths(config, training))
    if stage == EVALUATION and CONVERSION in before and config.conversion is not None:
        node = evaluation_behind_conversion(node, config.conversion)
    return node


def training_paths(config: RunConfig, training: TrainingConfig) -> LaunchPaths:
    """Return the paths of the training's first launch: those of its run are all that a later stage needs."""
    return launch_paths("training", training.run, config.cluster, number=1)


def _check_order(config: RunConfig) -> None:
    stages, setting = config.stages, f"stages=[{','.join(config.stages)}]"
    if WORKSPACE in stages:
        raise UserError(
            f"{setting}: a workspace is a shell to sit at; nothing waits for its end",
            key="stages",
            hint=f"by itself: stages=[{WORKSPACE}]",
        )
    if len(set(stages)) < len(stages):
        raise UserError(f"{setting}: a stage is named twice", key="stages")
    if config.cluster.scheduler != "slurm":
        raise UserError(
            f"{setting}: cluster.scheduler={config.cluster.scheduler} has no queue in which one could wait",
            key="stages",
            also=("cluster.scheduler",),
            hint="one after the other: " + ", then ".join(f"stages=[{stage}]" for stage in stages),
        )


def _check_every(config: RunConfig) -> None:
    """Refuse a stage after each n-th checkpoint where no training makes them, or nobody can submit it."""
    for position, stage in enumerate(config.stages):
        key, every = f"{stage}.every", getattr(getattr(config, stage), "every", None)
        if every is None:
            continue
        if "training" not in config.stages[:position]:
            raise UserError(
                f"{key}={every}: there is no training before it, whose checkpoints it would count",
                key=key,
                also=("stages",),
                hint=f"{key}=null, or stages=[training,{stage}]",
            )
        if config.resilience.submit == "launch":
            raise UserError(
                f"{key}={every}: the nodes submit its jobs, and resilience.submit=launch says"
                " that they have no sbatch",
                key=key,
                also=("resilience.submit",),
                hint=f"{key}=null: once, after the training",
            )


def prepare_launch(config: RunConfig, number: int = 1, work: ImageWork | None = None) -> StageRun:
    """Prepare a launch of the one stage of a configuration (see `by_stage`), or of the work on an image.

    Raise UserError if the group of the stage is not in the configuration, or a name cannot be a file's.
    """
    if work is not None:
        from launcher.stages.image import prepare_image  # late: few launches make an image

        return prepare_image(config, work, number)
    (stage,) = config.stages
    node: StageConfig | None = getattr(config, stage)
    if node is None:
        message = f"stages=[{stage}]: the group {stage} is not in the configuration"
        raise UserError(message, key="stages", also=(stage,), hint=f"choose: {stage}=...")
    return prepare(stage, node.run, config, number)


def plan_launch(config: RunConfig, *, number: int, tag: str, work: ImageWork | None = None) -> Plan:
    """Plan one launch of one stage, or of the work on an image. A pure function of its arguments."""
    run = prepare_launch(config, number, work)
    config = run.config
    check_secrets(config)
    if work is None:
        job = add_environment(_job(run), config, run.paths)
    else:
        from launcher.stages.image import image_job  # late, as above

        job = image_job(run, work)
    return Plan(
        paths=run.paths,
        tag=tag,
        scheduler=config.cluster.scheduler,
        slurm_conf=config.cluster.slurm_conf,
        job=replace(job, every=getattr(getattr(config, run.stage, None), "every", None)),
        assumptions=Assumptions(**dict(config.estimates)),
    )


def _job(run: StageRun) -> Job:
    config = run.config
    if config.workspace is not None and config.training is not None:
        return workspace_job(run, config.workspace, config.training)
    if config.training is not None:
        return training_job(run, config.training)
    if config.conversion is not None:
        return conversion_job(run, config.conversion)
    if config.evaluation is not None:
        return evaluation_job(run, config.evaluation)
    if config.command is not None:
        return command_job(run, config.command)
    assert config.data_preparation is not None
    return data_preparation_job(run, config.data_preparation)
