"""The training stage: NeMo's own script in a container, or our trainer, on the same configuration."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from launcher.config.schema import RunConfig, TrainerNode, TrainingConfig, parse
from launcher.errors import UserError, shown
from launcher.plan import Job, Payload
from launcher.runs.paths import LaunchPaths
from launcher.stages import common

_NEMO_ROOT = "/opt/NeMo"
_NEMO_SCRIPT = f"{_NEMO_ROOT}/examples/nlp/language_modeling/megatron_gpt_pretraining.py"


def training_job(config: RunConfig, training: TrainingConfig, paths: LaunchPaths) -> Job:
    """Plan the pretraining of one model."""
    trainer = parse(TrainerNode, training.trainer, "training.trainer")
    nemo = config.engine == "nemo"
    return Job(
        stage="training",
        engine=config.engine,
        resources=common.resources(
            config.cluster, training.run, nodes=trainer.num_nodes, tasks=trainer.devices
        ),
        queue=common.queue(config.cluster, training.run),
        payload=_nemo_payload(paths) if nemo else _megatron_payload(config, paths),
        container=common.container(
            config, _writable(config, paths), readable={Path(config.data_dir): "data_dir"}
        ),
        config=_launch_config(training, paths, index_mapping=nemo),
        environment=common.environment(config),
        srun_args=tuple(config.cluster.srun_args),
        merge_stderr=config.cluster.stderr_to_stdout,
        directories=(paths.results, paths.checkpoints),
    )


def _writable(config: RunConfig, paths: LaunchPaths) -> dict[Path, str]:
    return {Path(config.base_results_dir): "base_results_dir", paths.run_dir: "training.run.results_dir"}


def _nemo_payload(paths: LaunchPaths) -> Payload:
    return Payload(
        argv=("python3", "-u", _NEMO_SCRIPT, *_config_arguments(paths)),
        working_dir=_NEMO_ROOT,
        python_path=(_NEMO_ROOT,),
    )


def _megatron_payload(config: RunConfig, paths: LaunchPaths) -> Payload:
    # The launch's own copy of the trainer: a queued job must not run what someone edits meanwhile.
    return Payload(
        argv=(common.python(config), "-u", "-m", "trainer.pretrain", *_config_arguments(paths)),
        working_dir=str(paths.code),
        python_path=(str(paths.code),),
    )


def _config_arguments(paths: LaunchPaths) -> tuple[str, str]:
    return f"--config-path={paths.directory}", f"--config-name={paths.config_name}"


def _launch_config(training: TrainingConfig, paths: LaunchPaths, *, index_mapping: bool) -> dict[str, Any]:
    """The configuration of this launch: logs are the launch's own, checkpoints the run's.

    Only what the user left at its default is filled in.
    """
    exp_manager, model = copy.deepcopy(training.exp_manager), copy.deepcopy(training.model)
    data = _node(model, "data", "training.model")
    if exp_manager.get("explicit_log_dir") == f"{training.run.results_dir}/results":
        exp_manager["explicit_log_dir"] = str(paths.results)
    checkpoint = _node(exp_manager, "checkpoint_callback_params", "training.exp_manager")
    if checkpoint.get("dirpath") is None:
        checkpoint["dirpath"] = str(paths.checkpoints)
    if index_mapping and data.get("data_impl") == "mmap" and data.get("index_mapping_dir") is None:
        # NeMo would write its index files beside the data, which the container sees read-only.
        data["index_mapping_dir"] = str(paths.run_dir / "index_mapping")
    return {
        "run": training.run.model_dump(),
        "trainer": training.trainer,
        "exp_manager": exp_manager,
        "model": model,
    }


def _node(parent: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    node = parent.setdefault(name, {})
    if not isinstance(node, dict):
        told = f"{path}.{name}={shown(node)}: keys are needed here, not a value"
        raise UserError(told, key=f"{path}.{name}")
    return node
