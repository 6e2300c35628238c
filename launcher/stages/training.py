"""The training stage: one of three programs pretrains, on the same configuration."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from arithmetic.gpus import trainer_rows
from launcher.config.schema import RunConfig, parse
from launcher.config.stage_schema import ResumeNode, TrainerNode, TrainingConfig
from launcher.errors import Mistakes, UserError, shown
from launcher.plan import Job, Payload, Resources
from launcher.runs.paths import LaunchPaths
from launcher.stages import common, resilience
from launcher.stages.common import config_arguments
from launcher.stages.containers import container
from launcher.stages.megatron_lm import megatron_lm_environment, megatron_lm_payload
from launcher.stages.nemo import adapt_to_nemo, nemo_payload


def training_job(config: RunConfig, training: TrainingConfig, paths: LaunchPaths) -> Job:
    """Plan the pretraining of one model."""
    resilience.check_range(config)
    trainer = parse(TrainerNode, training.trainer, "training.trainer")
    written = launch_config(config, training, paths)
    resources = _resources(config, training, trainer)
    return Job(
        stage="training",
        engine=config.engine,
        resources=resources,
        queue=replace(
            common.queue(config.cluster, training.run), signal=resilience.save_signal(config, training.run)
        ),
        payload=_payload(config, training, written, paths),
        container=container(
            config,
            _writable(config, paths),
            readable={Path(config.data_dir): "data_dir"} if reads_data_dir(config, written) else {},
        ),
        config=written,
        environment={**_environment(config, training, written, resources), **common.environment(config)},
        srun_args=tuple(config.cluster.srun_args),
        merge_stderr=config.cluster.stderr_to_stdout,
        chain=resilience.chain(config, _checkpoints(written)),
        directories=(paths.results, paths.checkpoints),
    )


def _resources(config: RunConfig, training: TrainingConfig, trainer: TrainerNode) -> Resources:
    least, most = _node_range(config) or (trainer.num_nodes, None)
    try:
        requested = common.resources(config.cluster, training.run, nodes=least, tasks=trainer.devices)
    except UserError as error:
        raise Mistakes([*error.mistakes, *_too_many_tasks(config, training, trainer)]) from error
    return replace(requested, max_nodes=most)


def _too_many_tasks(config: RunConfig, training: TrainingConfig, trainer: TrainerNode) -> Iterator[UserError]:
    """Say beside another contradiction what the check `layout.gpus` would say after that is mended."""
    gpus = config.cluster.gpus_per_node
    if gpus is not None and trainer.devices > gpus and training.trainer.get("accelerator") != "cpu":
        yield UserError(
            f"training.trainer.devices={trainer.devices} and cluster.gpus_per_node={gpus} contradict each"
            " other: a task uses one GPU",
            key="training.trainer.devices",
            also=("cluster.gpus_per_node",),
            hint=f"training.trainer.devices={gpus or 1}",
        )


def _node_range(config: RunConfig) -> tuple[int, int | None] | None:
    """Return the least and the most nodes, if the job takes as many as are free."""
    nodes = config.resilience.nodes
    return None if nodes is None else (nodes.min, nodes.max if nodes.max != nodes.min else None)


def _checkpoints(written: Mapping[str, Any]) -> str:
    return str(written["exp_manager"]["checkpoint_callback_params"]["dirpath"])


def _writable(config: RunConfig, paths: LaunchPaths) -> dict[Path, str]:
    return {Path(config.base_results_dir): "base_results_dir", paths.run_dir: "training.run.results_dir"}


def reads_data_dir(config: RunConfig, written: Mapping[str, Any]) -> bool:
    """Tell whether the job may look into ``data_dir``: a container with a mount of nothing does not start."""
    model = written["model"]
    if model["data"].get("data_impl") != "mock":
        return True
    # Mock data come from no file, and our trainer needs no tokenizer for them.
    unread = {"data", "tokenizer"} if config.engine == "megatron" else {"data"}
    rest = {name: value for name, value in model.items() if name not in unread}
    return config.data_dir in str([{**written, "model": rest}, config.env_vars])


def _payload(
    config: RunConfig, training: TrainingConfig, written: dict[str, Any], paths: LaunchPaths
) -> Payload:
    match config.engine:
        case "nemo":
            return nemo_payload(config, training, paths)
        case "megatron_lm":
            return megatron_lm_payload(config, training.run.model_type, written, paths)
        case "megatron":
            return _megatron_payload(config, paths)


def _environment(
    config: RunConfig, training: TrainingConfig, written: dict[str, Any], resources: Resources
) -> dict[str, str]:
    if config.engine == "megatron":
        rows = trainer_rows(resources.gpu_types)
        return {"SLIPWAY_GPUS": json.dumps(rows)} if rows else {}
    if config.engine == "megatron_lm":
        return megatron_lm_environment(written, training.run.model_type)
    return {}


def _megatron_payload(config: RunConfig, paths: LaunchPaths) -> Payload:
    # The launch's own copy of the trainer: a queued job must not run what someone edits meanwhile.
    return Payload(
        argv=(common.python(config), "-u", "-m", "trainer.pretrain", *config_arguments(paths)),
        working_dir=str(paths.code),
        python_path=(str(paths.code),),
    )


def launch_config(config: RunConfig, training: TrainingConfig, paths: LaunchPaths) -> dict[str, Any]:
    """Return the configuration of this launch: logs are the launch's own, checkpoints the run's.

    Only what the user left at its default is filled in.
    """
    engine, nodes = config.engine, _node_range(config)
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
        # NeMo would write its index files beside the data, which the container sees read-only.
        data["index_mapping_dir"] = str(paths.run_dir / "index_mapping")
    if nodes is not None:
        # Our trainer counts the nodes itself where it is told no number; NeMo is told it in the job.
        least, most = nodes
        trainer["num_nodes"] = None if engine == "megatron" and most is not None else least
    if engine == "nemo":
        adapt_to_nemo(trainer, exp_manager)
    if engine != "megatron":
        _check_resume(training.resume, engine)
    if engine == "megatron_lm" and training.restore_from_path is not None:
        key = "training.restore_from_path"
        message = f"{key}={shown(training.restore_from_path)}: engine=megatron_lm has no such option; "
        raise UserError(f"{message}engine=megatron and engine=nemo have", key=key)
    return {
        **(_roots(training) if engine == "nemo" else {}),
        "run": training.run.model_dump(),
        "trainer": trainer,
        "exp_manager": exp_manager,
        "model": model,
        **(_start(training) if engine == "megatron" else {}),
    }


def _start(training: TrainingConfig) -> dict[str, Any]:
    """Return what says from where our trainer starts; earlier versions know `resume` alone."""
    path = training.restore_from_path
    return {
        "resume": _resume(training.resume),
        **({"restore_from_path": path} if path is not None else {}),
    }


def _resume(resume: ResumeNode) -> dict[str, Any]:
    """Return the node as our trainer reads it, also of earlier versions if no data is accepted."""
    return resume.model_dump(exclude={"accept_data"} if resume.accept_data is None else None)


def _check_resume(resume: ResumeNode, engine: str) -> None:
    """Refuse what only our trainer does: NeMo ignores a node that it does not know."""
    for name, value in resume.model_dump(exclude={"accept_data"}).items():
        if value != getattr(ResumeNode(), name):
            key = f"training.resume.{name}"
            message = f"{key}={shown(value)}: engine={engine} has no such option; engine=megatron has"
            raise UserError(message, key=key)


def _roots(training: TrainingConfig) -> dict[str, str]:
    """Return the keys that NeMo's files have beside their nodes."""
    roots = {"name": training.name, "restore_from_path": training.restore_from_path}
    return {key: value for key, value in roots.items() if value is not None}


def _node(parent: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    node = parent.setdefault(name, {})
    if not isinstance(node, dict):
        message = f"{path}.{name}={shown(node)}: keys are needed here, not a value"
        raise UserError(message, key=f"{path}.{name}")
    return node
