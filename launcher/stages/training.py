"""The training stage: one of three programs pretrains, on the same configuration."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.config.schema import RunConfig, parse
from launcher.config.stage_schema import TrainerNode, TrainingConfig
from launcher.errors import Mistakes, UserError, literal, setting_error
from launcher.plan import Chain, Job, Payload, Resources
from launcher.runs.paths import LaunchPaths
from launcher.slurm.notations import parse_time_limit
from launcher.stages.common import base_chain, environment, resources, stage_job, trainer_payload
from launcher.stages.stage import Engine, Stage, StageRun, training_paths
from slipway.arithmetic.gpus import trainer_rows

# Long enough for the last checkpoint of most; of a short limit a part, so that there is something to save.
_LONGEST_MARGIN = 300
_MARGIN_PART = 4


def plan_training(run: StageRun, training: TrainingConfig) -> Job:
    config, paths = run.config, run.paths
    _check_range(config)
    trainer = parse(TrainerNode, training.trainer, "training.trainer")
    written, engine = launch_config(config, training, paths), _find_engine(config.engine)
    requested = _training_resources(config, training, trainer)
    job = stage_job(
        run,
        requested,
        engine.payload(run, training, written),
        engine=config.engine,
        variables={**engine.environment(written, training, requested), **environment(config)},
        readable={Path(config.data_dir): "data_dir"} if reads_data_dir(config, written) else {},
        directories={paths.results: None, paths.checkpoints: None},
    )
    checkpoints = str(written["exp_manager"]["checkpoint_callback_params"]["dirpath"])
    signal = _save_signal(config, training.run.time_limit)
    return replace(
        job, config=written, chain=_chain(config, checkpoints), queue=replace(job.queue, signal=signal)
    )


def _training_resources(config: RunConfig, training: TrainingConfig, trainer: TrainerNode) -> Resources:
    least, most = _node_range(config) or (trainer.num_nodes, None)
    try:
        requested = resources(config.cluster, training.run, nodes=least, tasks=trainer.devices)
    except UserError as error:
        raise Mistakes([*error.mistakes, *_check_tasks(config, training, trainer)]) from error
    return replace(requested, max_nodes=most)


def _check_tasks(config: RunConfig, training: TrainingConfig, trainer: TrainerNode) -> Iterator[UserError]:
    """Yield the finding of the check `layout.gpus`, which another contradiction would hide."""
    gpus = config.cluster.gpus_per_node
    if gpus is not None and trainer.devices > gpus and training.trainer.get("accelerator") != "cpu":
        yield setting_error(
            f"training.trainer.devices={trainer.devices} and cluster.gpus_per_node={gpus} contradict each"
            " other: a task uses one GPU",
            hint=f"training.trainer.devices={gpus or 1}",
            also=("cluster.gpus_per_node",),
        )


def reads_data_dir(config: RunConfig, written: Mapping[str, Any]) -> bool:
    """Return True if the job may look into ``data_dir``: a mount of a missing directory fails."""
    model = written["model"]
    if model["data"].get("data_impl") != "mock":
        return True
    rest = {name: value for name, value in model.items() if name not in _find_engine(config.engine).unread}
    return config.data_dir in str([{**written, "model": rest}, config.env_vars])


def launch_config(config: RunConfig, training: TrainingConfig, paths: LaunchPaths) -> dict[str, Any]:
    """Return the configuration of this launch: logs are the launch's own, checkpoints the run's.

    Only keys that the user left at their defaults are filled in.
    """
    nodes = _node_range(config)
    trainer, exp_manager = copy.deepcopy(training.trainer), copy.deepcopy(training.exp_manager)
    model = copy.deepcopy(training.model)
    data = _node(model, "data", "training.model")
    if exp_manager.get("explicit_log_dir") == f"{training.run.results_dir}/results":
        exp_manager["explicit_log_dir"] = str(paths.results)
    checkpoint = _node(exp_manager, "checkpoint_callback_params", "training.exp_manager")
    if checkpoint.get("dirpath") is None:
        # NeMo looks for what to resume from where it would save: not in explicit_log_dir, if this is given.
        checkpoint["dirpath"] = str(paths.checkpoints)
    if data.get("data_impl") == "mmap" and data.get("index_mapping_dir") is None:
        # NeMo would write its index files next to the data, which the container sees read-only.
        data["index_mapping_dir"] = str(paths.run_dir / "index_mapping")
    if nodes is not None:
        trainer["num_nodes"], _ = nodes
    written = {"run": dict(training.run), "trainer": trainer, "exp_manager": exp_manager, "model": model}
    return _find_engine(config.engine).configure(config, training, written)


def _node(parent: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    node = parent.setdefault(name, {})
    if not isinstance(node, dict):
        raise setting_error(f"{path}.{name}={literal(node)}: keys are needed here, not a value")
    return node


# --- resilience: jobs that end before their training


def _chain(config: RunConfig, checkpoints: str) -> Chain:
    """Return the chain of a training's jobs; raise UserError where no next link could wait in a queue."""
    resilience, cluster = config.resilience, config.cluster
    setting = f"resilience.links={resilience.links}"
    if resilience.links > 1 and cluster.scheduler != "slurm":
        raise setting_error(
            f"{setting}: cluster.scheduler={cluster.scheduler} has no queue in which a next job could wait",
            hint="resilience.links=1, and launch again to continue",
            also=("cluster.scheduler",),
        )
    if resilience.links > 1 and cluster.sbatch.get("array") not in (None, False):
        raise setting_error(
            f"{setting}: the tasks of an array, cluster.sbatch.array, cannot each be a chain",
            hint="resilience.links=1, or cluster.sbatch.array=null",
            also=("cluster.sbatch.array",),
        )
    return replace(
        base_chain(config),
        links=resilience.links,
        from_job=resilience.submit == "job",
        max_failures=resilience.max_failures,
        checkpoints=checkpoints,
        restarts=resilience.restarts,
    )


def _check_range(config: RunConfig) -> None:
    """Refuse a range of nodes that is empty, or that no scheduler chooses from."""
    nodes, scheduler = config.resilience.nodes, config.cluster.scheduler
    if nodes is None:
        return
    if nodes.min > nodes.max:
        raise setting_error(
            f"resilience.nodes.min={nodes.min}: more than resilience.nodes.max, {nodes.max}",
            hint=f"resilience.nodes.min={nodes.max}, or less",
            also=("resilience.nodes.max",),
        )
    if scheduler != "slurm":
        raise setting_error(
            f"resilience.nodes: cluster.scheduler={scheduler} has no queue that chooses how many",
            hint=f"resilience.nodes=null training.trainer.num_nodes={nodes.min}",
            also=("cluster.scheduler",),
        )


def _node_range(config: RunConfig) -> tuple[int, int | None] | None:
    """Return the least and the most nodes, if the job takes as many as are free."""
    nodes = config.resilience.nodes
    return None if nodes is None else (nodes.min, nodes.max if nodes.max != nodes.min else None)


def _save_signal(config: RunConfig, time_limit: str | None) -> str | None:
    """Return the value of ``sbatch --signal``, which announces the time limit; `cluster.signal` wins."""
    margin = config.resilience.save_before_end
    if config.cluster.signal is not None or margin is None:
        return config.cluster.signal
    # The partition's own limit ends a job without one.
    seconds = (_margin(time_limit) if time_limit else _LONGEST_MARGIN) if margin == "auto" else margin
    return None if seconds is None else f"B:USR1@{seconds}"


def _margin(time_limit: str | None) -> int | None:
    """Return the seconds before the limit for saving; ``None`` if no limit of ours ends the job."""
    try:
        limit = parse_time_limit(time_limit) if time_limit is not None else None
    except ValueError:
        return None  # the checks report it
    return None if limit is None else max(1, min(_LONGEST_MARGIN, limit // _MARGIN_PART))


# --- engine=megatron: our trainer


def _configure(config: RunConfig, training: TrainingConfig, written: dict[str, Any]) -> dict[str, Any]:
    """Add the start of our trainer to its configuration; an earlier version of it knows no newer key."""
    if (nodes := _node_range(config)) is not None and nodes[1] is not None:
        written["trainer"]["num_nodes"] = None  # it counts them itself
    if isinstance(teacher := written["model"].get("teacher"), str):
        # Imported late: few trainings have a teacher.
        from launcher.runs.trained import read_model_sizes

        # Estimates and the trainer's own checks need no file then.
        sizes = {"teacher_model": sizes} if (sizes := read_model_sizes(Path(teacher))) else {}
        node = _node(written["model"], "distillation", "training.model")
        written["model"]["distillation"] = {**node, **sizes}
    path, resume = training.restore_from_path, training.resume
    node = {name: value for name, value in resume if name != "accept_data" or value is not None}
    return {**written, "resume": node, **({"restore_from_path": path} if path is not None else {})}


def _payload(run: StageRun, _training: TrainingConfig, _written: Mapping[str, Any]) -> Payload:
    return trainer_payload(run, "slipway.trainer.pretrain")


def _environment(
    _written: Mapping[str, Any], _training: TrainingConfig, requested: Resources
) -> dict[str, str]:
    rows = trainer_rows(requested.gpu_types)
    return {"SLIPWAY_GPUS": json.dumps(rows)} if rows else {}


# It needs no tokenizer for data that it makes up.
_OURS = Engine(_configure, _payload, _environment, unread=("data", "tokenizer"))


def _find_engine(name: str) -> Engine:
    """Return an engine; the modules of others are not imported."""
    if name == "nemo":
        from launcher.stages.nemo import NEMO

        return NEMO
    if name == "megatron_lm":
        from launcher.stages.megatron_lm import MEGATRON_LM

        return MEGATRON_LM
    return _OURS


def _writes(config: RunConfig, training: TrainingConfig) -> tuple[Path, ...]:
    # Imported late: for a stage after the training.
    from launcher.runs.trained import checkpoints_of

    checkpoints = checkpoints_of(dict(training), training_paths(config, training))
    return Path(training.run.results_dir), checkpoints


TRAINING = Stage("training", TrainingConfig, plan_training, writes=_writes)
