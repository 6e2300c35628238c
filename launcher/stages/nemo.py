"""engine=nemo: NeMo's own pretraining scripts, and the configuration as they take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.config.schema import RunConfig
from launcher.config.stage_schema import TrainingConfig
from launcher.errors import UserError
from launcher.plan import Payload
from launcher.runs.paths import LaunchPaths
from launcher.stages import common
from launcher.stages.common import config_arguments, whole_path

_SCRIPTS = "examples/nlp/language_modeling"

# Lightning takes a job of such a name for a shell, and each of its tasks for a training of its own.
_NAMES_OF_SHELLS = ("bash", "interactive")


def nemo_payload(config: RunConfig, training: TrainingConfig, paths: LaunchPaths) -> Payload:
    """Return a payload of NeMo's own script, which reads the launch's configuration.

    Raises
    ------
    UserError
        If the model is not one that the chosen script builds, or the job has a name that Lightning misreads.
    """
    model_type = training.run.model_type
    _check_model(model_type, training.model)
    if paths.job_name in _NAMES_OF_SHELLS:
        raise UserError(
            f"training.run.name={paths.run_name}: NeMo does not train in a job of the name {paths.job_name}",
            key="training.run.name",
            also=("cluster.job_name_prefix",),
            hint="choose another name",
        )
    root = whole_path(config.nemo_path, "nemo_path")
    return Payload(
        argv=(
            common.python(config),
            "-u",
            f"{root}/{_SCRIPTS}/megatron_{model_type}_pretraining.py",
            *config_arguments(paths),
        ),
        working_dir=root,
        python_path=(root,),
        # NeMo saves and ends on SIGTERM. On SIGUSR1 Lightning would requeue the job by itself, and the
        # checkpoint that it saves for that is one that NeMo cannot resume from; found ignored, it stays so.
        save_signal="TERM",
        nodes_key="trainer.num_nodes",
    )


def _check_model(model_type: str, model: Mapping[str, Any]) -> None:
    two_stacks = "encoder" in model and "decoder" in model
    if two_stacks is not (model_type == "t5"):
        has = "encoder and decoder nodes" if two_stacks else "no encoder and decoder nodes"
        raise UserError(
            f"training.run.model_type={model_type}: training.model has {has}",
            key="training.run.model_type",
            hint="training.run.model_type=t5" if two_stacks else "training.run.model_type=gpt, or bert",
        )


def adapt_to_nemo(trainer: dict[str, Any], exp_manager: dict[str, Any]) -> None:
    """Change the nodes of a launch's configuration to what NeMo needs in order to resume.

    `trainer.max_time` is of all launches of a run together for Lightning, whose clock is part of the
    checkpoint; NeMo's own `max_time_per_run` starts anew with each.
    """
    if exp_manager.get("max_time_per_run") is None and trainer.get("max_time") is not None:
        exp_manager["max_time_per_run"] = trainer["max_time"]
        trainer["max_time"] = None
