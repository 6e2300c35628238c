"""The checked configuration to a plan."""

from __future__ import annotations

from pathlib import Path

from launcher.config.schema import RunConfig, RunConfigNode
from launcher.errors import UserError
from launcher.plan import Job, Plan
from launcher.runs.paths import LaunchPaths
from launcher.stages import common
from launcher.stages.data_preparation import data_preparation_job
from launcher.stages.secrets import check_exports, check_nodes
from launcher.stages.stage_cluster import stage_cluster
from launcher.stages.surroundings import surround
from launcher.stages.training import training_job


def run_directory(config: RunConfig) -> Path:
    """The directory of the run that a configuration describes."""
    return _launch_paths(_for_stage(config), number=1).run_dir


def _launch_paths(config: RunConfig, number: int) -> LaunchPaths:
    stage, node = _run_node(config)
    return common.launch_paths(stage, node, config.cluster, number)


def _for_stage(config: RunConfig) -> RunConfig:
    """The configuration with the cluster as `stage_cluster` changes it for the stage."""
    stage, _ = _run_node(config)
    changes = config.stage_cluster.get(stage, {})  # type: ignore[call-overload]  # a name of a stage
    return config.model_copy(update={"cluster": stage_cluster(config.cluster, stage, changes)})


def _run_node(config: RunConfig) -> tuple[str, RunConfigNode]:
    """The one stage that a launch has, with its `run` node.

    Raises
    ------
    UserError
        If several stages are asked for: chains of stages are not there yet.
    """
    if len(config.stages) > 1:
        told = f"stages=[{','.join(config.stages)}]: launch one stage at a time"
        raise UserError(told, key="stages", hint="stages=[training]")
    (stage,) = config.stages
    node = config.training or config.data_preparation
    if node is None:
        told = f"stages=[{stage}]: the group {stage} is not in the configuration"
        raise UserError(told, key="stages", also=(stage,), hint=f"choose: {stage}=...")
    return stage, node.run


def plan_launch(config: RunConfig, *, number: int, tag: str) -> Plan:
    """Plan one launch of a run. A pure function of its arguments."""
    config = _for_stage(config)
    check_exports(config.cluster)
    if config.training is not None:
        check_nodes(config.training)
    paths = _launch_paths(config, number)
    return Plan(
        paths=paths,
        tag=tag,
        scheduler=config.cluster.scheduler,
        slurm_conf=config.cluster.slurm_conf,
        job=surround(_job(config, paths), config, paths),
    )


def _job(config: RunConfig, paths: LaunchPaths) -> Job:
    if config.training is not None:
        return training_job(config, config.training, paths)
    assert config.data_preparation is not None
    return data_preparation_job(config, config.data_preparation, paths)
