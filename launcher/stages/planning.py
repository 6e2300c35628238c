"""The checked configuration to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.overrides import STAGES
from launcher.config.schema import RunConfig
from launcher.config.secrets import check_secrets
from launcher.errors import UserError, setting_error
from launcher.plan import Plan
from launcher.stages.stage import Stage, StageRun

if TYPE_CHECKING:
    from launcher.stages.image import ImageWork


def _stage(name: str) -> Stage[Any]:
    """Return the stage that its module declares, which is imported for a launch of it."""
    stage: Stage[Any] = getattr(import_module(f"launcher.stages.{name}"), name.upper())
    return stage


def split_by_stage(config: RunConfig) -> list[RunConfig]:
    """Return one configuration for each job of each requested stage, in that order.

    Raise UserError if the stages cannot be launched one after the other.
    """
    configs = [part for stage in _one_config_per_stage(config) for part in _split(stage)]
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
    """Return the name of a launch among those of one command: its stage, with its part of several jobs."""
    (stage,) = config.stages
    phase = getattr(getattr(config, stage), "phase", None)
    return f"{stage}.{phase}" if phase is not None else stage


def outputs_of(configs: Iterable[RunConfig]) -> Iterator[Path]:
    """Yield the files and directories that launches leave to later stages."""
    for config in configs:
        stage = find_stage(config)
        yield from stage.writes(config, stage.node(config))


def find_stage(config: RunConfig) -> Stage[Any]:
    (name,) = config.stages
    return _stage(name)


def _split(config: RunConfig) -> Iterable[RunConfig]:
    stage = find_stage(config)
    return stage.split(config, stage.node(config))


def _one_config_per_stage(config: RunConfig) -> list[RunConfig]:
    _check_every(config)
    if len(config.stages) == 1:
        return [config]
    _check_order(config)
    return [_single_stage_config(config, position) for position in range(len(config.stages))]


def _single_stage_config(config: RunConfig, position: int) -> RunConfig:
    """Return the configuration of a stage alone, completed from the stages before it.

    The nodes of other stages are removed: nothing later on has to know of them.
    """
    before, name = config.stages[:position], config.stages[position]
    earlier: dict[str, Any] = dict.fromkeys(STAGES) | {stage: getattr(config, stage) for stage in before}
    stage = _stage(name)
    node = stage.follow(stage.node(config), config.model_copy(update=earlier))
    return config.model_copy(update={**dict.fromkeys(STAGES), "stages": [name], name: node})


def _check_order(config: RunConfig) -> None:
    stages, setting = config.stages, f"stages=[{','.join(config.stages)}]"
    for stage in stages:
        why = _stage(stage).alone
        if why is not None:
            raise setting_error(f"{setting}: {why}", hint=f"by itself: stages=[{stage}]")
    if len(set(stages)) < len(stages):
        raise setting_error(f"{setting}: a stage is named twice")
    if config.cluster.scheduler != "slurm":
        raise setting_error(
            f"{setting}: cluster.scheduler={config.cluster.scheduler} has no queue in which one could wait",
            hint="one after the other: " + ", then ".join(f"stages=[{stage}]" for stage in stages),
            also=("cluster.scheduler",),
        )


def _check_every(config: RunConfig) -> None:
    """Refuse a stage after each n-th checkpoint if no training makes them, or no node can submit it."""
    for position, stage in enumerate(config.stages):
        key, every = f"{stage}.every", getattr(getattr(config, stage), "every", None)
        if every is None:
            continue
        if "training" not in config.stages[:position]:
            raise setting_error(
                f"{key}={every}: there is no training before it to count checkpoints of",
                hint=f"{key}=null, or stages=[training,{stage}]",
                also=("stages",),
            )
        if config.resilience.submit == "launch":
            raise setting_error(
                f"{key}={every}: the nodes submit its jobs, and resilience.submit=launch says"
                " that they have no sbatch",
                hint=f"{key}=null: once, after the training",
                also=("resilience.submit",),
            )


def prepare_launch(config: RunConfig, work: ImageWork | None = None) -> StageRun:
    """Prepare a launch of the single stage of a configuration, or of the work on an image.

    Raise UserError if the group of the stage is not in the configuration, or a name cannot be a file's.
    """
    return (work or find_stage(config)).prepare(config, number=1)


def plan_launch(config: RunConfig, *, number: int, tag: str, work: ImageWork | None = None) -> Plan:
    """Plan one launch of one stage, or of the work on an image. A pure function of its arguments."""
    stage = work or find_stage(config)
    run = stage.prepare(config, number)
    check_secrets(run.config)
    return Plan(
        paths=run.paths,
        tag=tag,
        scheduler=run.config.cluster.scheduler,
        slurm_conf=run.config.cluster.slurm_conf,
        job=stage.job(run),
        assumptions=run.config.estimates,
        watch=run.config.watch,
    )
