"""The conversion stage with engine=nemo: NeMo's own scripts make a .nemo file of a checkpoint, or a Llama.

The script builds the model and loads the checkpoint into it, so that it needs the GPUs of one replica: tensor
times pipeline parallel size. What the job alone knows, such as the name of the newest checkpoint, is added
there (`trainer.conversion.nemo`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config.schema import RunConfig
from launcher.config.stage_schema import ConversionConfig
from launcher.errors import UserError, shown
from launcher.plan import Chain, Job, Payload
from launcher.runs.paths import LaunchPaths
from launcher.stages import common
from launcher.stages.checkpoint_source import directory_of
from launcher.stages.containers import container

_STAGE = "conversion"
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


def nemo_conversion_job(
    config: RunConfig,
    conversion: ConversionConfig,
    node: dict[str, Any],
    readable: Mapping[Path, str],
    paths: LaunchPaths,
) -> Job:
    """Plan a conversion by NeMo's own script: one task for each GPU of a replica of the model.

    Parameters
    ----------
    node
        The conversion as the job reads it.
    readable
        What the job reads, with the keys that it comes from.

    Raises
    ------
    UserError
        If NeMo has no script for that, or what its script needs of the training is not known.
    """
    _check(conversion)
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
    root = common.whole_path(config.nemo_path, "nemo_path")
    output = directory_of(Path(node["output"]))
    writable = {
        Path(config.base_results_dir): "base_results_dir",
        paths.run_dir: f"{_STAGE}.run.results_dir",
        output: f"{_STAGE}.output",
    }
    requested = common.resources(config.cluster, conversion.run, nodes=nodes, tasks=tasks // nodes)
    return Job(
        stage=_STAGE,
        engine="nemo",
        resources=common.with_gpu_per_task(requested),
        queue=common.queue(config.cluster, conversion.run),
        payload=Payload(
            argv=(
                common.python(config),
                *("-u", "-m", "trainer.conversion.nemo"),
                *common.config_arguments(paths),
                *("--nemo-path", root),
                *("--tensor_model_parallel_size", str(tensor)),
                *("--pipeline_model_parallel_size", str(pipeline)),
                *_split_rank(model, pipeline),
                *("--gpus_per_node", str(tasks // nodes), "--model_type", str(conversion.model_type)),
            ),
            working_dir=str(paths.code),
            python_path=(root, str(paths.code)),
        ),
        container=container(config, writable, readable=dict(readable)),
        stage_config={_STAGE: node},
        environment=common.environment(config),
        srun_args=tuple(config.cluster.srun_args),
        merge_stderr=config.cluster.stderr_to_stdout,
        chain=Chain(exclude_hours=config.resilience.exclude_hours),
        directories=(output,),
    )


def _check(conversion: ConversionConfig) -> None:
    if conversion.to not in ("nemo", "huggingface"):
        raise UserError(
            f"conversion.to={conversion.to}: NeMo's scripts make .nemo files and, of Llamas, Hugging Face's",
            key="conversion.to",
            also=("engine",),
            hint="conversion=nemo, or engine=megatron for checkpoints of Slipway and other programs",
        )
    if conversion.to == "nemo" and conversion.dtype is not None:
        raise UserError(
            f"conversion.dtype={conversion.dtype}: a .nemo file has the types of the training",
            key="conversion.dtype",
            hint="conversion.dtype=null",
        )
    for key in _OWN:
        value = getattr(conversion, key)
        if value not in (None, "auto"):
            raise UserError(
                f"conversion.{key}={value}: NeMo's script has no such option",
                key=f"conversion.{key}",
                also=("engine",),
                hint=f"conversion.{key}={'auto' if key == 'source_format' else 'null'}",
            )
    if conversion.check.enabled:
        raise UserError(
            "conversion.check.enabled=True: what NeMo's script writes is not compared with a model of ours",
            key="conversion.check.enabled",
            also=("engine",),
            hint="conversion.check.enabled=False",
        )
    if conversion.model_type is None:
        raise UserError(
            f"conversion.model_type=null: {conversion.source} is no run of ours, which would say it",
            key="conversion.model_type",
            hint="conversion.model_type=gpt, t5 or bert",
        )


def _check_llama(conversion: ConversionConfig, model: Mapping[str, Any]) -> None:
    """Refuse models for which NeMo has no script that writes Hugging Face's."""
    if conversion.model_type == "gpt" and not model:
        raise UserError(
            f"conversion.model=null: {conversion.source} is no run of ours, which would describe it",
            key="conversion.model",
            hint="conversion.model=FILE, the configuration of its training",
        )
    for key, valid in _LLAMA.items():
        if conversion.model_type != "gpt" or model.get(key) not in valid:
            what = (
                f"model.{key}={shown(model.get(key))}" if conversion.model_type == "gpt" else "its model_type"
            )
            raise UserError(
                f"conversion.to=huggingface: NeMo's script converts Llamas, and {what} is none of theirs",
                key="conversion.to",
                also=("engine",),
                hint="conversion=nemo",
            )


def _size(model: Mapping[str, Any], kind: str) -> int:
    """Return a parallel size of the training; 1 where its model is not known."""
    value = model.get(f"{kind}_model_parallel_size")
    return value if isinstance(value, int) and value > 0 else 1


def _split_rank(model: Mapping[str, Any], pipeline: int) -> tuple[str, ...]:
    """Return the stage at which the decoder of a T5 begins, if it has several."""
    value = model.get("pipeline_model_parallel_split_rank")
    return ("--pipeline_model_parallel_split_rank", str(value)) if value and pipeline > 1 else ()
