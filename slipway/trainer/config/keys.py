"""The tables of the keys of a NeMo configuration, for a GPT and for a T5.

Every key is implemented, irrelevant here (with the reason, which the log states once), or refused unless it
has a value that asks for nothing. A key that is not in the table is refused too, so that none is silently
ignored. A T5 shares most keys with a GPT and has its own in place of those of one stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.trainer.config.architecture import Architecture
from slipway.trainer.config.distillation import SIZE_NAMES, SIZES, TEACHER, Distillation
from slipway.trainer.config.fp8 import NO_FP8, Fp8
from slipway.trainer.config.optimization import Optimization
from slipway.trainer.config.parallel import Overlap, Parallel, Timeouts
from slipway.trainer.config.profiling import NO_MEMORY, NO_NSYS, Profiling
from slipway.trainer.config.resume import Resume
from slipway.trainer.config.rows import keys_read
from slipway.trainer.config.saving import Saving
from slipway.trainer.config.settings import Output, Settings
from slipway.trainer.config.t5 import DECODER, ENCODER, Denoising
from slipway.trainer.config.tokenizer import Tokenizer


@dataclass(frozen=True)
class Implemented:
    """The trainer implements the key; `on_cpu` says why a CPU has no use for it."""

    on_cpu: str | None = None


@dataclass(frozen=True)
class Irrelevant:
    """The key cannot change anything here, because of `reason`."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Only the values in `allowed` are accepted; any other asks for something `reason` says is not there."""

    allowed: tuple[Any, ...]
    reason: str


Status = Implemented | Irrelevant | Refused

_IMPLEMENTED = Implemented()
_LIGHTNING = Irrelevant("an option of Lightning's trainer, which does not run here")
LAUNCHER = Irrelevant("the launcher's")
_WANDB = Irrelevant("no Weights & Biases logger here")
_FSDP_OFF = Irrelevant("FSDP is off")
_FP16_OFF = Irrelevant("loss scaling is for fp16")
_NO_PROFILE = Refused((None, {}), "a profiler has keys, such as enabled, start_step and end_step")
_NEMO_ARCHIVE = "a .nemo archive needs NeMo"
_STAGES = Irrelevant("megatron-core chooses how pipeline stages exchange, by `overlap_p2p_comm`")
_BUCKETS = Irrelevant("model.optim.ddp_bucket_size says how many parameters a bucket of gradients has")
_LEGACY = Irrelevant("an option of NeMo's old model classes, not of megatron-core's")

_ROPE_SCALING = "megatron-core scales rotary positions with Llama 3.1's numbers"
_EXPERTS = "mixtures of experts are not in this version: engine=nemo and engine=megatron_lm have them"
_ATTENTION = "megatron-core's attention is whole here: engine=nemo and engine=megatron_lm have others"
_TEXT = Irrelevant("the text was tokenized beforehand")
_DEFERRED = Irrelevant("it needs Apex's accumulation of gradients")

_CALLBACK = "exp_manager.checkpoint_callback_params"


def _expand(node: str, names: str, status: Status) -> dict[str, Status]:
    """Return the entries of several keys below a node that have one status."""
    return dict.fromkeys((f"{node}.{name}" for name in names.split()), status)


_SECTIONS = (
    *(Settings, Output, Saving, Resume, Parallel, Overlap, Timeouts, Optimization, Fp8, Profiling),
    Distillation,
)

KEYS: dict[str, Status] = {
    # The keys of the settings' rows; the others are read in several ways, or not at all.
    **{key: Implemented(row.on_cpu) for key, row in keys_read(*_SECTIONS, Tokenizer)},
    **{
        key if "." in key else f"model.{key}": Implemented(row.on_cpu) for key, row in keys_read(Architecture)
    },
    # run: the launcher's own node
    "run.*": LAUNCHER,
    # trainer
    "trainer.max_epochs": Refused((None, -1), "trainer.max_steps says how long to train"),
    "trainer.limit_test_batches": Irrelevant("the test split is never evaluated"),
    "trainer.accumulate_grad_batches": Refused((1, None), "micro_batch_size already accumulates gradients"),
    **_expand(
        "trainer",
        "logger enable_checkpointing use_distributed_sampler enable_progress_bar enable_model_summary "
        "num_sanity_val_steps benchmark",
        _LIGHTNING,
    ),
    # exp_manager
    **_expand("exp_manager", "exp_dir name", Irrelevant("explicit_log_dir says where")),
    "exp_manager.create_wandb_logger": Refused((False, None), _WANDB.reason),
    "exp_manager.wandb_logger_kwargs.*": _WANDB,
    "exp_manager.log_step_timing": Irrelevant("step times are always logged"),
    "exp_manager.step_timing_kwargs.sync_cuda": Irrelevant("step times are always synchronized"),
    "exp_manager.step_timing_kwargs.buffer_size": Irrelevant("step times are logged one by one"),
    "exp_manager.seconds_to_sleep": Irrelevant("nothing waits for a log directory to settle"),
    **_expand(_CALLBACK, "dirpath every_n_train_steps", _IMPLEMENTED),
    f"{_CALLBACK}.save_last": Irrelevant("the newest checkpoint is always kept, and `latest` names it"),
    f"{_CALLBACK}.every_n_epochs": Refused((None, 0, 1), "every_n_train_steps says how often"),
    f"{_CALLBACK}.train_time_interval": Refused((None,), "every_n_train_steps says how often"),
    f"{_CALLBACK}.save_on_train_epoch_end": Refused((False, None), "every_n_train_steps says how often"),
    f"{_CALLBACK}.save_weights_only": Refused((False, None), "a training continues from all of its state"),
    f"{_CALLBACK}.filepath": Refused((None,), "dirpath and filename say where"),
    f"{_CALLBACK}.prefix": Irrelevant("filename is the whole name"),
    f"{_CALLBACK}.auto_insert_metric_name": Refused((True, None), "a name shows its values with their names"),
    f"{_CALLBACK}.verbose": Irrelevant("each checkpoint is logged"),
    f"{_CALLBACK}.save_nemo_on_train_end": Irrelevant(f"{_NEMO_ARCHIVE}: the last checkpoint is like others"),
    **_expand(_CALLBACK, "always_save_nemo save_best_model", Refused((False, None), _NEMO_ARCHIVE)),
    f"{_CALLBACK}.postfix": Irrelevant(_NEMO_ARCHIVE),
    f"{_CALLBACK}.model_parallel_size": Irrelevant("taken from the model's parallel sizes"),
    "resume.accept_data": _IMPLEMENTED,
    # model: batches
    "model.rampup_batch_size": _IMPLEMENTED,
    # model: architecture
    "model.mcore_gpt": Refused((True, None), "the model is megatron-core's"),
    **_expand(
        "model",
        "encoder_seq_length max_position_embeddings position_embedding_type "
        "share_embeddings_and_output_weights",
        _IMPLEMENTED,
    ),
    "model.ffn_dropout": Refused((0, 0.0, None), "megatron-core's MLP has no dropout"),
    "model.low_freq_factor": Refused((1, 1.0, None), _ROPE_SCALING),
    "model.high_freq_factor": Refused((4, 4.0, None), _ROPE_SCALING),
    "model.old_context_len": Refused((8192, None), _ROPE_SCALING),
    "model.use_emha": Refused((False, None), "NeMo does not implement it either"),
    "model.attention_type": Refused(("multihead", None), "megatron-core's GPT has no other"),
    "model.transformer_block_type": Refused(("pre_ln", None), "megatron-core's GPT has no other"),
    "model.headscale": Refused((False, None), "megatron-core's GPT has no such option"),
    "model.pre_process": Refused((True, None), "the first pipeline stage has the embeddings"),
    "model.post_process": Refused((True, None), "the last pipeline stage has the head"),
    "model.cross_entropy_loss_fusion": Irrelevant("the loss is fused on every GPU, and on no CPU"),
    "model.apply_query_key_layer_scaling": Irrelevant("as in NeMo, only fp16 uses it"),
    "model.fp32_residual_connection": Refused(
        (False, None), "megatron-core 0.16 adds residuals in the layers' own precision all the same"
    ),
    "model.fp16_lm_cross_entropy": Refused((False, None), "the loss is computed in 32 bits"),
    "model.persist_layer_norm": Irrelevant("a kernel of Apex"),
    "model.resume_from_checkpoint": Refused((None,), "exp_manager.resume_if_exists continues a run"),
    # model: distillation
    **_expand(SIZES, " ".join(SIZE_NAMES), _IMPLEMENTED),
    f"{SIZES}.*": LAUNCHER,
    # model: precision
    **_expand("model", "native_amp_init_scale native_amp_growth_interval hysteresis", _FP16_OFF),
    # `fp8_recipe` is ours: NeMo's keys mean delayed scaling.
    **_expand("model", "fp8 fp8_e4m3 fp8_hybrid", Implemented(NO_FP8)),
    "model.fp8_interval": Irrelevant("Transformer Engine scales in each step"),
    "model.fp8_params": Refused((False, None), "weights are kept in bf16"),
    # model: experts, and attention of other kinds
    "model.name": Irrelevant("a specification of NeMo's layers"),
    **_expand("model", "num_moe_experts mtp_num_layers", Refused((None, 0), _EXPERTS)),
    **_expand(
        "model", "expert_model_parallel_size expert_tensor_parallel_size", Refused((1, None), _EXPERTS)
    ),
    **_expand("model", "multi_latent_attention qk_layernorm", Refused((False, None), _ATTENTION)),
    "model.window_size": Refused((None,), _ATTENTION),
    # model: fusions and communication
    "model.masked_softmax_fusion": Irrelevant("a kernel of Apex"),
    "model.apply_rope_fusion": Implemented(on_cpu="Transformer Engine's kernels need CUDA"),
    **_expand("model", "defer_embedding_wgrad_compute wgrad_deferral_limit", _DEFERRED),
    **_expand("model", "grad_div_ar_fusion grad_allreduce_chunk_size_mb gradient_as_bucket_view", _BUCKETS),
    **_expand("model.optim", "bucket_cap_mb contiguous_grad_buffer contiguous_param_buffer", _BUCKETS),
    **_expand("model", "batch_p2p_comm sync_batch_comm", _STAGES),
    "model.sharp": Refused((False, None), "SHARP is not in this version"),
    **_expand("model", "onnx_safe apex_transformer_log_level use_flash_attention", _LEGACY),
    # Megatron-LM's: a mean over the unmasked tokens of a global batch, and not one of micro batches' means.
    "model.calculate_per_token_loss": Refused((True, None), "every token of a global batch weighs the same"),
    # model: recomputing activations
    **_expand(
        "model",
        "num_micro_batches_with_partial_activation_checkpoints activations_checkpoint_layers_per_pipeline",
        Refused((None, 0), _LEGACY.reason),
    ),
    # model: FSDP and profiling
    "model.fsdp": Refused((False, None), "FSDP is not in this version"),
    **_expand("model", "fsdp_sharding_strategy fsdp_grad_reduce_dtype fsdp_sharded_checkpoint", _FSDP_OFF),
    **_expand("model", "nsys_profile torch_profile memory_profile", _NO_PROFILE),
    **_expand("model.nsys_profile", "enabled start_step end_step ranks", Implemented(NO_NSYS)),
    "model.nsys_profile.trace": LAUNCHER,
    # A node of ours: NeMo 1.0 does not configure torch.profiler.
    **_expand("model.torch_profile", "enabled start_step end_step ranks", _IMPLEMENTED),
    **_expand("model.memory_profile", "enabled start_step end_step rank", Implemented(NO_MEMORY)),
    # model: tokenizer
    **_expand("model.tokenizer", "use_fast sentencepiece_legacy", _TEXT),
    "model.tokenizer.delimiter": Refused((None,), "only tabular data has one"),
    # model: optimizer
    **_expand(
        "model.optim.sched",
        "warmup_steps warmup_ratio constant_steps constant_ratio max_steps",
        _IMPLEMENTED,
    ),
    "model.optim.sched.last_epoch": Refused((-1, None), "the completed steps give the place in the schedule"),
    # model: data
    **_expand(
        "model.data",
        "data_impl data_prefix splits_string seq_length eod_mask_loss reset_position_ids "
        "reset_attention_mask index_mapping_dir",
        _IMPLEMENTED,
    ),
    **_expand("model.data.data_prefix", "train validation", _IMPLEMENTED),
    "model.data.data_prefix.test": Irrelevant("the test split is never evaluated"),
    "model.get_attention_mask_from_fusion": Irrelevant("reset_attention_mask says whether there is a mask"),
    "model.data.dataloader_type": Refused(("single", None), "samples come in one seeded order"),
    "model.data.num_workers": Irrelevant("samples are read from mapped memory as they are needed"),
    "model.data.skip_warmup": Irrelevant("files are mapped into memory and read where they are needed"),
}


def status_of(key: str, table: Mapping[str, Status] = KEYS) -> Status | None:
    """Return the table's entry for a dotted key, or for the nearest node (itself too) that ends in ``.*``."""
    if key in table:
        return table[key]
    parts = key.split(".")
    for depth in range(len(parts), 0, -1):
        entry = table.get(".".join(parts[:depth]) + ".*")
        if entry is not None:
            return entry
    return None


_SPANS = Irrelevant("spans are the paper's: of random lengths whose mean is mean_ngram_size, 3 if it is null")
_T5_ALONE = "megatron-core 0.16's T5Model does not have it"
_ONE_CHUNK = "the embeddings and the head are where both stacks are"

# The keys of one stack: model.<name> of a GPT, model.encoder.<name> and model.decoder.<name> of a T5.
_OTHERS_OF_A_STACK = """
    position_embedding_type ffn_dropout transformer_block_type headscale apply_query_key_layer_scaling
    fp32_residual_connection persist_layer_norm masked_softmax_fusion onnx_safe grad_div_ar_fusion
"""
_OF_A_STACK = (*(key for key, _ in keys_read(Architecture) if "." not in key), *_OTHERS_OF_A_STACK.split())
_OF_A_GPT = (
    *(f"model.{name}" for name in _OF_A_STACK),
    *("model.mcore_gpt", "model.encoder_seq_length", "model.share_embeddings_and_output_weights"),
    *("model.attention_type", "model.num_micro_batches_with_partial_activation_checkpoints"),
    "model.activations_checkpoint_layers_per_pipeline",
    *(f"model.data.{name}" for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")),
    *(key for key in KEYS if key.startswith("model.distillation.")),
)
_OF_A_T5_STACK: dict[str, Status] = {
    **{name: KEYS[f"model.{name}"] for name in _OF_A_STACK},
    "arch": Refused(("transformer", None), _T5_ALONE),
    **dict.fromkeys(("relative_attention_num_buckets", "relative_attention_max_distance"), _IMPLEMENTED),
    "relative_position_bias_self_attention_only": Refused((True, None), _T5_ALONE),
}

T5_KEYS: dict[str, Status] = {
    **{key: status for key, status in KEYS.items() if key not in _OF_A_GPT},
    **{f"{node}.{name}": status for node in (ENCODER, DECODER) for name, status in _OF_A_T5_STACK.items()},
    "model.mcore_t5": Refused((True, None), "the model is megatron-core's"),
    **_expand("model", "seq_length share_decoder_tokens_head_embeddings tokens_head_bias", _IMPLEMENTED),
    "model.share_token_embeddings": Refused((True, None), _T5_ALONE),
    "model.qkv_bias": Refused((False, None), "only a GPT has a bias on queries, keys and values alone"),
    **_expand("model", "pre_process post_process", Refused((True, None), _ONE_CHUNK)),
    TEACHER: Refused((None,), "only a GPT learns from a teacher"),
    # model: parallelism
    "model.pipeline_model_parallel_size": Refused(
        (1, None), "megatron-core 0.16 has no pipeline for a T5, whose encoder and decoder would share it"
    ),
    "model.pipeline_model_parallel_split_rank": Refused((0, None), "there is one pipeline stage"),
    "model.virtual_pipeline_model_parallel_size": Refused((1, None), "there is one pipeline stage"),
    "model.context_parallel_size": Refused((1, None), "a T5's targets are too short to be cut"),
    # model: tokenizer and data
    "model.override_vocab_size": Refused((None,), "the sentinels follow the tokenizer's own tokens"),
    **{key: _IMPLEMENTED for key, _ in keys_read(Denoising)},
    "model.data.seq_length_dec": _IMPLEMENTED,
    "model.data.dataset_type": Refused(("t5", None), "only T5's span corruption is in this version"),
    **_expand("model.data", "geometric_dist max_ngram_size", _SPANS),
    "model.data.whole_word_masking": Irrelevant("spans are of tokens, as in the paper"),
    "model.data.short_seq_prob": Refused(
        (0, 0.0, None), "all sequences have the same length, as in the paper"
    ),
    "model.data.favor_longer_ngrams": Refused((False, None), _SPANS.reason),
    "model.data.permutation": Refused((False, None), "spans stay in their order, as in the paper"),
    "model.data.respect_document_boundaries": Irrelevant(
        "sequences are cut out of packed documents, as in the paper, and may span some"
    ),
}


def explain_misplaced(key: str, table: Mapping[str, Status]) -> str:
    """Explain that a key belongs to the other kind of model, or return an empty string."""
    name = key.rsplit(".", 1)[-1]
    if table is T5_KEYS and key in KEYS:
        both = f": {ENCODER}.{name} and {DECODER}.{name}" if name in _OF_A_T5_STACK else ""
        return f"a GPT's key, but model.encoder and model.decoder make this a T5{both}"
    if table is KEYS and key in T5_KEYS:
        return "a T5's key, but without model.encoder and model.decoder this is a GPT"
    return ""
