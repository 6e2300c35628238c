"""engine=megatron_lm: Megatron-LM's own scripts, their options derived from the same configuration.

The options are those that the parsers of Megatron-LM core_v0.12.3 (NeMo 2.4's megatron-core) and core_v0.16.1
share (`megatron/training/arguments.py`); `templates/megatron_lm.py` adapts them to a release in the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import reduce
from typing import Any

from pydantic import ConfigDict, Field

from launcher.config.schema import RunConfig, parse
from launcher.config.stage_schema import StrictModel, TrainingConfig
from launcher.config.values import Whole
from launcher.errors import UserError, literal, setting_error
from launcher.plan import Payload, Resources
from launcher.stages.common import python
from launcher.stages.megatron_lm_model import (
    Node,
    Option,
    argument_vector,
    flag,
    flags,
    model_options,
    same_names,
    stack_of,
    values,
)
from launcher.stages.names_and_paths import check_path
from launcher.stages.stage import Engine, StageRun, remove_own_keys
from slipway.common.section_types import ModelType

# NeMo's schedules, and the curve of Megatron-LM that each is after its warm-up.
_DECAY = {
    "CosineAnnealing": "cosine",
    "WarmupAnnealing": "linear",
    "InverseSquareRootAnnealing": "inverse-square-root",
}

_NARROW = ("16", "16-mixed")
_WIDE = ("32", "32-true")

_DISTRIBUTED = ("mcore_distributed_optim", "distributed_fused_adam")

_OF_GPT = "GPT2BPETokenizer"
_TOKENIZERS = (_OF_GPT, "BertWordPieceCase", "BertWordPieceLowerCase")


_FP16 = {
    "native_amp_init_scale": "--initial-loss-scale",
    "native_amp_growth_interval": "--loss-scale-window",
    "hysteresis": "--hysteresis",
}
_FP8 = same_names("fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
_ADAMS = (*_DISTRIBUTED, "megatron_fused_adam", "fused_adam", "adamw", "adam", None)
_RESETS = same_names("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


class _Computed(StrictModel):
    """Keys of NeMo's that options are computed from: their types count."""

    model_config = ConfigDict(extra="ignore")


class _Schedule(_Computed):
    warmup_steps: Whole | None = None
    warmup_ratio: float | None = None
    constant_ratio: float | None = None
    constant_steps: Whole | None = None
    max_steps: Whole | None = None


class _Optimizer(_Computed):
    betas: list[float] | None = Field(default=None, min_length=2)
    sched: _Schedule | None = None


class _Stack(_Computed):
    num_layers: Whole


class _Data(_Computed):
    seq_length: Whole | None


class _DataOfTwoStacks(_Data):
    seq_length_dec: Whole


class _Model(_Computed):
    tensor_model_parallel_size: Whole
    pipeline_model_parallel_size: Whole
    virtual_pipeline_model_parallel_size: Whole | None = None
    pipeline_model_parallel_split_rank: Whole | None = None
    context_parallel_size: Whole = 1
    max_position_embeddings: Whole | None
    optim: _Optimizer
    data: _Data
    tokenizer: dict[str, Any]


class _ModelOfOneStack(_Model, _Stack): ...


class _ModelOfTwoStacks(_Model):
    encoder: _Stack
    decoder: _Stack
    data: _DataOfTwoStacks


class _Trainer(_Computed):
    max_steps: Whole


def _configure(config: RunConfig, training: TrainingConfig, written: dict[str, Any]) -> dict[str, Any]:
    """Refuse what no option says to Megatron-LM."""
    remove_own_keys(config, training, written)
    if training.restore_from_path is not None:
        setting = f"training.restore_from_path={literal(training.restore_from_path)}"
        engines = "engine=megatron_lm has no such option; engine=megatron and engine=nemo have"
        raise setting_error(f"{setting}: {engines}")
    return written


def _payload(run: StageRun, training: TrainingConfig, written: Mapping[str, Any]) -> Payload:
    """Return a script of Megatron-LM's, which reads no file of ours: `written` becomes its arguments.

    Raise UserError if the configuration asks for what Megatron-LM has no option for.
    """
    root, model_type = check_path(run.config.megatron_lm_path, "megatron_lm_path"), training.run.model_type
    start = (python(run.config), "-u", str(run.paths.megatron_lm), root, model_type)
    return Payload(
        argv=(*start, *megatron_lm_arguments(written, model_type)),
        working_dir=root,
        python_path=(root,),
        save_signal="TERM",  # with --exit-signal-handler
    )


def megatron_lm_arguments(written: Node, model_type: ModelType) -> list[str]:
    """Return the arguments that describe the same training to Megatron-LM.

    `written` is the launch's configuration: its nodes ``trainer``, ``exp_manager`` and ``model``.
    """
    trainer, exp_manager, model = (written[name] for name in ("trainer", "exp_manager", "model"))
    parse(_Trainer, trainer, "training.trainer")
    parse(_ModelOfTwoStacks if model_type == "t5" else _ModelOfOneStack, model, "training.model")
    return argument_vector(_options(trainer, exp_manager, model, model_type))


def is_translated(written: Node, model_type: ModelType, key: str) -> bool:
    """Return True if another value of a dotted key, or null, makes other options or is refused."""
    # These are read under certain values of other keys alone.
    if key in (*(f"model.{name}" for name in _FP8), "model.recompute_modules"):
        return True
    *path, last = key.split(".")
    for value in (None, "?"):
        changed = deepcopy(dict(written))
        reduce(lambda node, name: node[name], path, changed)[last] = value
        try:
            if megatron_lm_arguments(changed, model_type) != megatron_lm_arguments(written, model_type):
                return True
        except (UserError, AttributeError, TypeError, ValueError):
            return True
    return False


def _options(trainer: Node, exp_manager: Node, model: Node, model_type: ModelType) -> Iterator[Option]:
    yield from model_options(model, model_type)
    yield from _parallelism(model, model_type)
    yield from _precision(trainer, model, model_type)
    yield from _optimizer(trainer, model["optim"])
    yield from _schedule(trainer, model["optim"])
    yield from _data(model, model_type)
    yield from _tokenizer(model["tokenizer"], model_type)
    yield from _saving_and_logging(trainer, exp_manager, model)


def _parallelism(model: Node, model_type: ModelType) -> Iterator[Option]:
    pipeline = model["pipeline_model_parallel_size"]
    virtual = model.get("virtual_pipeline_model_parallel_size")
    yield "--tensor-model-parallel-size", model["tensor_model_parallel_size"]
    if model_type == "t5" and pipeline > 1:
        # Megatron-LM counts the encoder's stages and the decoder's apart.
        split = model.get("pipeline_model_parallel_split_rank") or pipeline // 2
        yield "--encoder-pipeline-model-parallel-size", split
        pipeline -= split
    yield "--pipeline-model-parallel-size", pipeline
    if virtual is not None and virtual > 1:
        layers = stack_of(model, model_type)["num_layers"]
        yield "--num-layers-per-virtual-pipeline-stage", layers // (pipeline * virtual)
        yield flag("--no-overlap-p2p-communication", not model.get("overlap_p2p_comm"))
    if model.get("context_parallel_size", 1) > 1:
        yield "--context-parallel-size", model["context_parallel_size"]
    yield flag("--sequence-parallel", model.get("sequence_parallel"))
    yield flag("--tp-comm-overlap", model.get("ub_tp_comm_overlap"))
    if model.get("fsdp"):
        message = "training.model.fsdp=True: not with engine=megatron_lm, which has another kind of FSDP"
        raise setting_error(message, hint="training.model.fsdp=False")


def _precision(trainer: Node, model: Node, model_type: ModelType) -> Iterator[Option]:
    precision = str(trainer.get("precision"))
    if precision in ("bf16", "bf16-mixed"):
        yield flag("--bf16", True)
    elif precision in _NARROW:
        yield flag("--fp16", True)
        yield from values(_FP16, model)
        yield flag("--apply-query-key-layer-scaling", _scales_scores(trainer, model, model_type))
    elif precision not in _WIDE:
        raise setting_error(
            f"training.trainer.precision={literal(trainer.get('precision'))}: not one of Megatron-LM's",
            hint="valid with engine=megatron_lm: bf16, 16 or 32",
        )
    if model.get("fp8"):
        yield "--fp8-format", "e4m3" if model.get("fp8_e4m3") else "hybrid"
        yield from values(_FP8, model)


def _environment(written: Node, training: TrainingConfig, _requested: Resources) -> dict[str, str]:
    """Return the variables for Transformer Engine, as NeMo sets them."""
    scales = _scales_scores(written["trainer"], written["model"], training.run.model_type)
    return {"NVTE_APPLY_QK_LAYER_SCALING": "1"} if scales else {}


def _scales_scores(trainer: Node, model: Node, model_type: ModelType) -> bool:
    """Return True if attention scores are scaled by layer: as in NeMo, in fp16 alone."""
    narrow = str(trainer.get("precision")) in _NARROW
    return narrow and bool(stack_of(model, model_type).get("apply_query_key_layer_scaling"))


def _optimizer(trainer: Node, optim: Node) -> Iterator[Option]:
    if (name := optim.get("name")) not in _ADAMS:
        raise setting_error(
            f"training.model.optim.name={literal(name)}: engine=megatron_lm has Adam alone",
            hint=f"valid: {', '.join(filter(None, _ADAMS))}",
        )
    betas = optim.get("betas") or (None, None)
    yield "--weight-decay", optim.get("weight_decay")
    yield "--adam-beta1", betas[0]
    yield "--adam-beta2", betas[1]
    yield "--adam-eps", optim.get("eps")
    yield "--clip-grad", trainer.get("gradient_clip_val") or 0.0  # Megatron-LM clips by default
    # In 32 bits core_v0.16.1 saves the distributed optimizer and cannot load it: it copies into a view of a
    # parameter (megatron/core/optimizer/distrib_optimizer.py, _set_main_param_and_optimizer_states).
    if optim.get("name") in _DISTRIBUTED and str(trainer.get("precision")) not in _WIDE:
        yield flag("--use-distributed-optimizer", True)
        yield flag("--overlap-grad-reduce", optim.get("overlap_grad_sync"))
        # Megatron-LM gathers parameters early only where it reduces gradients early.
        gather = optim.get("overlap_grad_sync") and optim.get("overlap_param_sync")
        yield flag("--overlap-param-gather", gather)


def _schedule(trainer: Node, optim: Node) -> Iterator[Option]:
    """Yield the schedule's options: NeMo counts the steps at its lowest value, Megatron-LM those before.

    Where the warm-up and those leave none to fall in, NeMo warms up and falls at once; Megatron-LM wants one.
    """
    sched = optim.get("sched") or {}
    steps = sched.get("max_steps") or trainer["max_steps"]
    name = sched.get("name")
    if name not in _DECAY:
        raise setting_error(
            f"training.model.optim.sched.name={literal(name)}: Megatron-LM has no such schedule",
            hint=f"valid with engine=megatron_lm: {', '.join(_DECAY)}",
        )
    warmup = sched.get("warmup_steps")
    if warmup is None and sched.get("warmup_ratio") is not None:
        warmup = int(sched["warmup_ratio"] * steps)
    yield "--train-iters", trainer["max_steps"]
    yield "--lr", optim.get("lr")
    yield "--min-lr", sched.get("min_lr")
    yield "--lr-decay-style", _DECAY[name]
    constant = sched.get("constant_steps") or int((sched.get("constant_ratio") or 0) * steps)
    yield "--lr-decay-iters", max(steps - constant, (warmup or 0) + 1)
    yield "--lr-warmup-iters", warmup


def _data(model: Node, model_type: ModelType) -> Iterator[Option]:
    data = model["data"]
    if data.get("data_impl") == "mock":
        if model_type != "gpt":
            raise setting_error(
                "training.model.data.data_impl=mock: Megatron-LM makes up data for a GPT only",
                hint="training.model.data.data_impl=mmap",
            )
        yield flag("--mock-data", True)
    else:
        yield "--data-path", tuple(data.get("data_prefix") or ()) or None
        yield "--split", data.get("splits_string")
        yield "--data-cache-path", data.get("index_mapping_dir")
    if (loader := data.get("dataloader_type")) != "single":
        yield "--dataloader-type", loader
    yield "--num-workers", data.get("num_workers")
    if model_type == "gpt":
        yield from flags(_RESETS, data)
    else:
        yield "--mask-prob", data.get("masked_lm_prob")
        yield "--short-seq-prob", data.get("short_seq_prob")


def _tokenizer(tokenizer: Node, model_type: ModelType) -> Iterator[Option]:
    library, kind = tokenizer.get("library"), tokenizer.get("type")
    if library == "megatron" and kind == _OF_GPT and model_type != "gpt":
        raise setting_error(
            f"training.model.tokenizer.type={kind}: Megatron-LM's has no masks and no sentinels",
            hint=f"valid for a T5 or a BERT: {', '.join(name for name in _TOKENIZERS if name != _OF_GPT)}, "
            "or training.model.tokenizer.library=sentencepiece",
        )
    if library == "megatron" and kind in _TOKENIZERS:
        yield "--tokenizer-type", kind
        yield "--vocab-file", tokenizer.get("vocab_file")
        yield "--merge-file", tokenizer.get("merge_file")
    elif library == "sentencepiece":
        # That of a T5 or a BERT has masks.
        yield "--tokenizer-type", f"{'GPT' if model_type == 'gpt' else ''}SentencePieceTokenizer"
        yield "--tokenizer-model", tokenizer.get("model")
    elif library == "huggingface":
        yield "--tokenizer-type", "HuggingFaceTokenizer"
        yield "--tokenizer-model", kind
    else:
        raise UserError(
            f"training.model.tokenizer: library={literal(library)}, type={literal(kind)}: not Megatron-LM's",
            key="training.model.tokenizer.library",
            also=("training.model.tokenizer.type",),
            hint=f"valid: sentencepiece, huggingface, or megatron with type {', '.join(_TOKENIZERS)}",
        )
    yield "--vocab-extra-ids", tokenizer.get("num_sentinel_tokens")


def _saving_and_logging(trainer: Node, exp_manager: Node, model: Node) -> Iterator[Option]:
    checkpoint = exp_manager["checkpoint_callback_params"]
    interval = _whole(trainer, "val_check_interval")
    if exp_manager.get("create_checkpoint_callback", True):
        yield "--save", checkpoint["dirpath"]
        yield "--save-interval", checkpoint.get("every_n_train_steps") or interval
    if exp_manager.get("resume_if_exists"):
        yield "--load", checkpoint["dirpath"]
        # Else it refuses to go on with another number of steps than the checkpoint's.
        yield flag("--override-opt_param-scheduler", True)
    yield "--eval-interval", interval
    yield "--eval-iters", _whole(trainer, "limit_val_batches")
    yield "--log-interval", trainer.get("log_every_n_steps")
    yield "--tensorboard-dir", exp_manager.get("explicit_log_dir")
    yield flag("--log-throughput", True)
    yield "--seed", model.get("seed")
    limit = exp_manager.get("max_time_per_run") or trainer.get("max_time")
    yield "--exit-duration-in-mins", None if limit is None else _minutes(str(limit))
    yield flag("--exit-signal-handler", True)


def _whole(trainer: Node, key: str) -> int | None:
    """Return a number of steps; Lightning also accepts fractions, but only 0.0 can be expressed as steps."""
    value = trainer.get(key)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float) and value == 0.0:
        return 0
    raise setting_error(
        f"training.trainer.{key}={literal(value)}: Megatron-LM has no fractions of a data set",
        hint="a whole number",
    )


def _minutes(text: str) -> int:
    """Return ``DD:HH:MM:SS`` in whole minutes."""
    parts = text.split(":")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise setting_error(
            f"training.trainer.max_time={literal(text)}: not days:hours:minutes:seconds",
            hint='such as "00:03:45:00"',
        )
    days, hours, minutes, _ = map(int, parts)
    return (days * 24 + hours) * 60 + minutes


MEGATRON_LM = Engine(_configure, _payload, _environment)
