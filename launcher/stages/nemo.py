"""engine=nemo: NeMo's own scripts for pretraining and conversion, and the configuration as they take it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.schema import RunConfig
from launcher.config.stage_schema import TrainingConfig
from launcher.errors import UserError, literal, setting_error
from launcher.plan import Job, Payload
from launcher.stages.checkpoint_source import directory_of
from launcher.stages.common import (
    config_arguments,
    python,
    request_gpu_per_task,
    resources,
    stage_job,
    trainer_payload,
)
from launcher.stages.names_and_paths import check_path
from launcher.stages.stage import Engine, StageRun, remove_own_keys

if TYPE_CHECKING:
    from launcher.config.late_stages import ConversionConfig

_SCRIPTS = "examples/nlp/language_modeling"

# Lightning takes a job of such a name for a shell, and each of its tasks for a separate training.
_NAMES_OF_SHELLS = ("bash", "interactive")
# Lightning's (_PRECISION_INPUT), without its suffixes.
_PRECISIONS = ("bf16", "16", "32", "64", "transformer-engine")
# GPUs of a node where the cluster names no number, as in the NeMo Megatron launcher.
_GPUS_PER_NODE = 8
# Keys that our converter reads, and NeMo's does not.
_OWN = ("every", "source_format")
# Models that NeMo's script for Hugging Face converts, by their keys; None is a key that is not set.
_LLAMA: Mapping[str, tuple[Any, ...]] = {
    "normalization": ("rmsnorm",),
    "activation": ("fast-swiglu", "swiglu"),
    "position_embedding_type": ("rope",),
    "share_embeddings_and_output_weights": (False,),
    "bias": (False,),
    "qkv_bias": (False, None),
    "rotary_percentage": (1.0, None),
    "num_moe_experts": (None,),
    "multi_latent_attention": (False, None),
}


def _payload(run: StageRun, training: TrainingConfig, _written: Mapping[str, Any]) -> Payload:
    """Return a payload of NeMo's own script, which reads the launch's configuration.

    Raise UserError if the script builds no such model, or the job has a name that Lightning misreads.
    """
    paths, model_type = run.paths, training.run.model_type
    _check_model(model_type, training.model)
    precision, key = training.trainer.get("precision") or 32, "training.trainer.precision"
    if str(precision).removesuffix("-mixed").removesuffix("-true") not in _PRECISIONS:
        known = f"valid with engine=nemo: {', '.join(_PRECISIONS)}, with -mixed or -true"
        raise setting_error(f"{key}={literal(precision)}: Lightning has no such precision", hint=known)
    if paths.job_name in _NAMES_OF_SHELLS:
        raise setting_error(
            f"training.run.name={paths.run_name}: NeMo does not train in a job of the name {paths.job_name}",
            hint="choose another name",
            also=("cluster.job_name_prefix",),
        )
    root = check_path(run.config.nemo_path, "nemo_path")
    return Payload(
        argv=(
            python(run.config),
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


# Keys with megatron-core's meaning that NeMo reads otherwise (megatron_gpt_model.py, `loss_func`;
# megatron_base_model.py, `build_transformer_config`), with the reason.
_UNREAD = {
    "calculate_per_token_loss": "NeMo's loss has no number of tokens: gradients would be sums over ranks",
    "add_qkv_bias": "NeMo reads qkv_bias",
}


def _check_model(model_type: str, model: Mapping[str, Any]) -> None:
    for name, why in _UNREAD.items():
        if model.get(name):
            key = f"training.model.{name}"
            raise setting_error(f"{key}={literal(model[name])}: {why}", hint=f"leave {key} out")
    if "bert_binary_head" in model and model_type != "bert":
        raise setting_error(
            f"training.run.model_type={model_type}: training.model has bert_binary_head, which is a BERT's",
            hint="training.run.model_type=bert",
        )
    two_stacks = "encoder" in model and "decoder" in model
    if two_stacks is not (model_type == "t5"):
        has = "encoder and decoder nodes" if two_stacks else "no encoder and decoder nodes"
        raise setting_error(
            f"training.run.model_type={model_type}: training.model has {has}",
            hint="training.run.model_type=t5" if two_stacks else "training.run.model_type=gpt, or bert",
        )


def _configure(config: RunConfig, training: TrainingConfig, written: dict[str, Any]) -> dict[str, Any]:
    """Change the nodes so that NeMo can resume, and add NeMo's other root keys.

    For Lightning `trainer.max_time` is of all launches of a run together, as the checkpoint has its clock;
    NeMo's own `max_time_per_run` starts anew with each.
    """
    remove_own_keys(config, training, written)
    trainer, exp_manager = written["trainer"], written["exp_manager"]
    if exp_manager.get("max_time_per_run") is None and trainer.get("max_time") is not None:
        exp_manager["max_time_per_run"] = trainer["max_time"]
        trainer["max_time"] = None
    roots = {"name": training.name, "restore_from_path": training.restore_from_path}
    return {**{key: value for key, value in roots.items() if value is not None}, **written}


NEMO = Engine(_configure, _payload)


def nemo_conversion_job(
    run: StageRun, conversion: ConversionConfig, node: dict[str, Any], readable: Mapping[Path, str]
) -> Job:
    """Plan a conversion by NeMo's own script: one task for each GPU of a replica of the model.

    The script builds the model and loads the checkpoint into it. The job adds the values that only it knows,
    such as the name of the newest checkpoint (`slipway.trainer.conversion.nemo`). `node` is the conversion as
    the job reads it. Raise UserError if NeMo has no such script, or it needs to know more of the training.
    """
    _check_conversion(conversion)
    config, output = run.config, directory_of(Path(node["output"]))
    model = conversion.model if isinstance(conversion.model, Mapping) else {}
    if conversion.to == "huggingface":
        _check_llama(conversion, model)
    tensor, pipeline = _size(model, "tensor"), _size(model, "pipeline")
    tasks, most = tensor * pipeline, config.cluster.gpus_per_node or _GPUS_PER_NODE
    nodes = -(-tasks // most)
    if tasks % nodes:
        raise UserError(
            f"conversion.model: {tensor} (tensor) times {pipeline} (pipeline) GPUs, which {nodes} nodes "
            "of the cluster do not share evenly",
            key="cluster.gpus_per_node",
            hint=f"cluster.gpus_per_node={next(n for n in range(most, 0, -1) if tasks % n == 0)}",
        )
    root = check_path(config.nemo_path, "nemo_path")
    options = (
        *("--nemo-path", root),
        *("--tensor_model_parallel_size", str(tensor)),
        *("--pipeline_model_parallel_size", str(pipeline)),
        *_split_rank(model, pipeline),
        *("--gpus_per_node", str(tasks // nodes), "--model_type", str(conversion.model_type)),
    )
    payload = trainer_payload(run, "slipway.trainer.conversion.nemo", options=options)
    requested = resources(config.cluster, conversion.run, nodes=nodes, tasks=tasks // nodes)
    return stage_job(
        run,
        request_gpu_per_task(requested),
        payload._replace(python_path=(root, *payload.python_path)),
        engine="nemo",
        readable=readable,
        stage_config={"conversion": node},
        directories={output: "conversion.output"},
    )


def _check_conversion(conversion: ConversionConfig) -> None:
    if conversion.to not in ("nemo", "huggingface"):
        raise setting_error(
            f"conversion.to={conversion.to}: NeMo's scripts make .nemo files and, of Llamas, Hugging Face's",
            hint="conversion=nemo, or engine=megatron for checkpoints of Slipway and other programs",
            also=("engine",),
        )
    if conversion.to == "nemo" and conversion.dtype is not None:
        raise setting_error(
            f"conversion.dtype={conversion.dtype}: a .nemo file has the types of the training",
            hint="conversion.dtype=null",
        )
    for key in _OWN:
        value = getattr(conversion, key)
        if value not in (None, "auto"):
            raise setting_error(
                f"conversion.{key}={value}: NeMo's script has no such option",
                hint=f"conversion.{key}={'auto' if key == 'source_format' else 'null'}",
                also=("engine",),
            )
    if conversion.check.enabled:
        raise setting_error(
            "conversion.check.enabled=True: what NeMo's script writes is not compared with a model of ours",
            hint="conversion.check.enabled=False",
            also=("engine",),
        )
    if conversion.model_type is None:
        raise setting_error(
            f"conversion.model_type=null: {conversion.source} is not one of our runs, which would say it",
            hint="conversion.model_type=gpt, t5 or bert",
        )


def _check_llama(conversion: ConversionConfig, model: Mapping[str, Any]) -> None:
    """Refuse models for which NeMo has no script that writes Hugging Face's."""
    if conversion.model_type == "gpt" and not model:
        raise setting_error(
            f"conversion.model=null: {conversion.source} is not one of our runs, which would describe it",
            hint="conversion.model=FILE, the configuration of its training",
        )
    for key, valid in _LLAMA.items():
        if conversion.model_type != "gpt" or model.get(key) not in valid:
            is_gpt = conversion.model_type == "gpt"
            what = f"model.{key}={literal(model.get(key))}" if is_gpt else "its model_type"
            raise setting_error(
                f"conversion.to=huggingface: NeMo's script converts only Llama models; {what} is not one",
                hint="conversion=nemo makes a .nemo file of it",
                also=("engine",),
            )


def _size(model: Mapping[str, Any], kind: str) -> int:
    """Return a parallel size of the training; 1 where its model is not known."""
    value = model.get(f"{kind}_model_parallel_size")
    return value if isinstance(value, int) and value > 0 else 1


def _split_rank(model: Mapping[str, Any], pipeline: int) -> tuple[str, ...]:
    """Return the stage at which the decoder of a T5 begins, if it has several."""
    value = model.get("pipeline_model_parallel_split_rank")
    return ("--pipeline_model_parallel_split_rank", str(value)) if value and pipeline > 1 else ()
