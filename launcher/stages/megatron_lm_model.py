"""The model's part of Megatron-LM's options, mixtures of experts and multi-latent attention included.

The options are those that core_v0.12.3 and core_v0.16.1 share (megatron/training/arguments.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from launcher.config.stage_schema import ModelType
from launcher.errors import UserError, shown

# NeMo's switches that are on unless said otherwise, and how Megatron-LM is told that one is off.
_OFF = {
    "bias_dropout_add_fusion": "--no-bias-dropout-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "persist_layer_norm": "--no-persist-layer-norm",
    "bias": "--disable-bias-linear",
}

# NeMo's switches that are off unless said otherwise, and how Megatron-LM is told that one is on.
_ON = {
    "qkv_bias": "--add-qkv-bias",
    "fp32_residual_connection": "--fp32-residual-connection",
    "rotary_interleaved": "--rotary-interleaved",
    "scale_positional_embedding": "--use-rope-scaling",
    "cross_entropy_loss_fusion": "--cross-entropy-loss-fusion",
    "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute",
}

# Further numbers, handed on where they are set.
_VALUES = {
    "init_method_std": "--init-method-std",
    "hidden_dropout": "--hidden-dropout",
    "attention_dropout": "--attention-dropout",
    "layernorm_epsilon": "--norm-epsilon",
    "seq_len_interpolation_factor": "--rotary-seq-len-interpolation-factor",
    "scale_factor": "--rope-scaling-factor",
    "wgrad_deferral_limit": "--wgrad-deferral-limit",
}

# What changes the model and Megatron-LM has no option for, with the only value that it trains.
_FIXED = {
    "use_scaled_init_method": True,
    "normalize_attention_scores": True,
    "openai_gelu": False,
    "headscale": False,
    "transformer_block_type": "pre_ln",
    "ffn_dropout": 0.0,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "old_context_len": 8192,
    "override_vocab_size": None,
}

_ACTIVATIONS = {
    "gelu": None,
    "swiglu": "--swiglu",
    "fast-swiglu": "--swiglu",
    "squared-relu": "--squared-relu",
}

_NORMS: dict[str, tuple[str, ...]] = {
    "layernorm": (),
    "low_precision_layernorm": (),
    "layernorm1p": ("--apply-layernorm-1p",),
    "rmsnorm": ("--normalization", "RMSNorm"),
}

_POSITIONS = {"learned_absolute": "learned_absolute", "rope": "rope", "none": "none"}

# What a T5's encoder and decoder may differ in. Not in layers: no release reads its own --decoder-num-layers
# (core_v0.12.3, 0.16.1 and 0.19.0), the decoder gets the encoder's number.
_OF_A_STACK = ("arch", "activations_checkpoint_num_layers")


def stack_of(model: Mapping[str, Any], model_type: ModelType) -> Mapping[str, Any]:
    """Return the node that describes the layers; a T5 has one for each stack, and they must agree.

    Raises
    ------
    UserError
        If they do not: Megatron-LM builds both from the same options.
    """
    if model_type != "t5":
        return model
    encoder, decoder = model["encoder"], model["decoder"]
    for key, value in encoder.items():
        if key not in _OF_A_STACK and key in decoder and decoder[key] != value:
            raise UserError(
                f"training.model.decoder.{key}={shown(decoder[key])}, of the encoder {shown(value)}: "
                "Megatron-LM has one option for both",
                key=f"training.model.decoder.{key}",
                also=(f"training.model.encoder.{key}",),
            )
    return dict(encoder)


def model_options(model: Mapping[str, Any], model_type: ModelType) -> MegatronLMOptions:
    """Shape, batches and initialisation of the model, and how its layers are computed."""
    stack = stack_of(model, model_type)
    path = "training.model.encoder" if model_type == "t5" else "training.model"
    _check_fixed(model, "training.model")
    _check_fixed(stack, path)
    return (
        _shape(model, stack, model_type)
        + _batches(model)
        + _layers(stack, path)
        + _implementation(model, stack)
        + _recomputation(stack)
        + expert_options(model)
    )


def _check_fixed(node: Mapping[str, Any], path: str) -> None:
    for key, only in _FIXED.items():
        if node.get(key) not in (only, None):
            raise UserError(
                f"{path}.{key}={shown(node[key])}: Megatron-LM has no option for that",
                key=f"{path}.{key}",
                hint=f"with engine=megatron_lm: {path}.{key}={'null' if only is None else only}",
            )


def _shape(model: Mapping[str, Any], stack: Mapping[str, Any], model_type: ModelType) -> MegatronLMOptions:
    options, data = MegatronLMOptions(), model["data"]
    if model_type == "t5":
        options.value("--encoder-num-layers", stack["num_layers"])
        options.value("--decoder-num-layers", model["decoder"]["num_layers"])
    else:
        options.value("--num-layers", stack["num_layers"])
    options.value("--hidden-size", stack["hidden_size"])
    options.value("--ffn-hidden-size", stack.get("ffn_hidden_size"))
    options.value("--num-attention-heads", stack["num_attention_heads"])
    options.value("--kv-channels", stack.get("kv_channels"))
    if stack.get("num_query_groups") is not None:
        options.flag("--group-query-attention", True)
        options.value("--num-query-groups", stack["num_query_groups"])
    if model_type == "t5":
        options.value("--encoder-seq-length", data["seq_length"])
        options.value("--decoder-seq-length", data["seq_length_dec"])
    else:
        options.value("--seq-length", data["seq_length"])
    options.value("--max-position-embeddings", model["max_position_embeddings"])
    options.value("--make-vocab-size-divisible-by", model.get("make_vocab_size_divisible_by"))
    shared = model.get("share_embeddings_and_output_weights", True)
    if model_type == "t5":
        shared = model.get("share_decoder_tokens_head_embeddings", True)
    options.flag("--untie-embeddings-and-output-weights", not shared)
    return options


def _batches(model: Mapping[str, Any]) -> MegatronLMOptions:
    options, rampup = MegatronLMOptions(), model.get("rampup_batch_size")
    if rampup is not None:
        raise UserError(
            f"training.model.rampup_batch_size={shown(rampup)}: Megatron-LM has it for trainings that are "
            "measured in samples only, and this one is measured in steps",
            key="training.model.rampup_batch_size",
            hint="training.model.rampup_batch_size=null",
        )
    options.value("--micro-batch-size", model["micro_batch_size"])
    options.value("--global-batch-size", model["global_batch_size"])
    return options


def _layers(stack: Mapping[str, Any], path: str) -> MegatronLMOptions:
    options = MegatronLMOptions()
    for key, name in _VALUES.items():
        options.value(name, stack.get(key))
    norm = "layernorm1p" if stack.get("layernorm_zero_centered_gamma") else "layernorm"
    options.extend(_one_of(_NORMS, stack, path, "normalization", norm))
    activation = _one_of(_ACTIVATIONS, stack, path, "activation", "gelu")
    if activation is not None:
        options.flag(activation, True)
    fusion = "--no-bias-swiglu-fusion" if activation == "--swiglu" else "--no-bias-gelu-fusion"
    # There is no such kernel for a squared ReLU, and megatron-core refuses to look for one.
    options.flag(fusion, stack.get("bias_activation_fusion") is False or activation == "--squared-relu")
    positions = _one_of(_POSITIONS, stack, path, "position_embedding_type", "learned_absolute")
    options.value("--position-embedding-type", positions)
    if positions == "rope":
        options.value("--rotary-percent", stack.get("rotary_percentage"))
        options.value("--rotary-base", stack.get("rotary_base"))
        options.flag("--no-rope-fusion", not stack.get("apply_rope_fusion"))
    for key, name in _ON.items():
        options.flag(name, stack.get(key))
    for key, name in _OFF.items():
        options.flag(name, stack.get(key) is False)
    return options


def _implementation(model: Mapping[str, Any], stack: Mapping[str, Any]) -> MegatronLMOptions:
    options = MegatronLMOptions()
    options.value("--transformer-impl", "transformer_engine" if model.get("transformer_engine") else "local")
    options.flag("--no-gradient-accumulation-fusion", model.get("gradient_accumulation_fusion") is False)
    options.flag("--use-cpu-initialization", model.get("use_cpu_initialization"))
    options.flag("--fp16-lm-cross-entropy", model.get("fp16_lm_cross_entropy"))
    if model.get("gc_interval"):
        options.flag("--manual-gc", True)
        options.value("--manual-gc-interval", model["gc_interval"])
    return options


def _recomputation(stack: Mapping[str, Any]) -> MegatronLMOptions:
    options, prefix = MegatronLMOptions(), "activations_checkpoint"
    granularity, layers = stack.get(f"{prefix}_granularity"), stack.get(f"{prefix}_num_layers")
    if granularity is None or (granularity == "full" and layers == 0):
        return options
    options.value("--recompute-granularity", granularity)
    if granularity == "full":
        options.value("--recompute-method", stack.get(f"{prefix}_method"))
        options.value("--recompute-num-layers", layers)
    return options


def _one_of(known: Mapping[str, Any], stack: Mapping[str, Any], path: str, key: str, default: str) -> Any:
    value = stack.get(key) or default
    if value not in known:
        raise UserError(
            f"{path}.{key}={shown(value)}: Megatron-LM has no option for that",
            key=f"{path}.{key}",
            hint=f"valid with engine=megatron_lm: {', '.join(known)}",
        )
    return known[value]


# Sizes and switches of experts: an option of the same name, but for their number.
_EXPERT_VALUES = {
    "num_moe_experts": "--num-experts",
    **{
        f"moe_{key}": f"--moe-{key.replace('_', '-')}"
        for key in (
            "ffn_hidden_size",
            "shared_expert_intermediate_size",
            "router_load_balancing_type",
            "router_dtype",
            "router_score_function",
            "router_topk",
            "router_num_groups",
            "router_group_topk",
            "router_topk_scaling_factor",
            "router_bias_update_rate",
            "aux_loss_coeff",
            "z_loss_coeff",
            "input_jitter_eps",
            "token_dispatcher_type",
            "expert_capacity_factor",
            "token_drop_policy",
        )
    },
}
_EXPERT_FLAGS = {
    f"moe_{key}": f"--moe-{key.replace('_', '-')}"
    for key in (
        "grouped_gemm",
        "router_pre_softmax",
        "router_enable_expert_bias",
        "pad_expert_input_to_capacity",
        "permute_fusion",
        "shared_expert_overlap",
        "per_layer_logging",
    )
}
_KNOWN = {*_EXPERT_VALUES, *_EXPERT_FLAGS, "moe_layer_freq"}
_LATENT_VALUES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def expert_options(model: Mapping[str, Any]) -> MegatronLMOptions:
    """Return the options of experts and narrow attention, of uneven stages, and of what is recomputed.

    Raises
    ------
    UserError
        For a key of NeMo's that Megatron-LM has no option for.
    """
    return _experts(model) + _latent_attention(model) + _uneven_stages(model) + _recomputed(model)


def _experts(model: Mapping[str, Any]) -> MegatronLMOptions:
    options = MegatronLMOptions()
    if not model.get("num_moe_experts"):
        return options
    for key, value in model.items():
        if key.startswith("moe_") and key not in _KNOWN and value:
            raise UserError(
                f"training.model.{key}={shown(value)}: Megatron-LM has no option for that",
                key=f"training.model.{key}",
                hint="null, or engine=nemo",
            )
    for key, name in _EXPERT_VALUES.items():
        options.value(name, model.get(key))
    # Megatron-LM reads a list without spaces.
    frequency = model.get("moe_layer_freq")
    options.value("--moe-layer-freq", None if frequency is None else str(frequency).replace(" ", ""))
    for key, name in _EXPERT_FLAGS.items():
        options.flag(name, model.get(key))
    options.value("--expert-model-parallel-size", model.get("expert_model_parallel_size"))
    options.value("--expert-tensor-parallel-size", model.get("expert_tensor_parallel_size"))
    return options


def _latent_attention(model: Mapping[str, Any]) -> MegatronLMOptions:
    """Return the options of attention whose queries and keys have norms, or come out of narrow vectors.

    Its rotary positions are YaRN's there, which are the plain ones with the scaling factor of 1 that the
    options begin with.
    """
    options = MegatronLMOptions()
    options.flag("--qk-layernorm", model.get("qk_layernorm"))
    if not model.get("multi_latent_attention"):
        return options
    if model.get("rope_type") != "rope":
        raise UserError(
            f"training.model.rope_type={shown(model.get('rope_type'))}: Megatron-LM has no option for that",
            key="training.model.rope_type",
            hint="training.model.rope_type=rope",
        )
    options.flag("--multi-latent-attention", True)
    for key in _LATENT_VALUES:
        options.value(f"--{key.replace('_', '-')}", model.get(key))
    return options


def _uneven_stages(model: Mapping[str, Any]) -> MegatronLMOptions:
    options = MegatronLMOptions()
    for place in ("first", "last"):
        layers = model.get(f"num_layers_in_{place}_pipeline_stage")
        options.value(f"--decoder-{place}-pipeline-num-layers", layers)
    return options


def _recomputed(model: Mapping[str, Any]) -> MegatronLMOptions:
    """Return the parts of a layer that selective recomputing is to compute again, where they are named."""
    options = MegatronLMOptions()
    if model.get("activations_checkpoint_granularity") == "selective":
        options.values("--recompute-modules", model.get("recompute_modules"))
    return options


class MegatronLMOptions(list[str]):
    """An argument vector under construction: what is ``None`` or ``False`` is left out."""

    def value(self, name: str, value: object) -> None:
        if value is not None:
            self += [name, str(value)]

    def values(self, name: str, values: Iterable[object] | None) -> None:
        written = [str(value) for value in values or ()]
        if written:
            self += [name, *written]

    def flag(self, name: str, is_set: object) -> None:
        if is_set:
            self.append(name)

    def __add__(self, other: list[str]) -> MegatronLMOptions:  # type: ignore[override]
        return MegatronLMOptions([*self, *other])
