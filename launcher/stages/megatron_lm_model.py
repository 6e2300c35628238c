"""The model's part of Megatron-LM's options, mixtures of experts and multi-latent attention included.

The options are those that core_v0.12.3 and core_v0.16.1 share (megatron/training/arguments.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from launcher.errors import UserError, literal, setting_error
from slipway.common.section_types import ModelType

# An option and its value: None leaves it out, and a tuple gives it several values, or none.
Option = tuple[str, object]
Node = Mapping[str, Any]


def same_names(*keys: str) -> dict[str, str]:
    """Return the options that are called as the keys are."""
    return {key: f"--{key.replace('_', '-')}" for key in keys}


# NeMo's switches that are on by default, and Megatron-LM's options that switch them off.
_OFF = {
    "bias_dropout_add_fusion": "--no-bias-dropout-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "persist_layer_norm": "--no-persist-layer-norm",
    "bias": "--disable-bias-linear",
}

# NeMo's switches that are off by default, and Megatron-LM's options that switch them on.
_ON = {
    "qkv_bias": "--add-qkv-bias",
    **same_names("add_qkv_bias", "fp32_residual_connection", "rotary_interleaved"),
    "scale_positional_embedding": "--use-rope-scaling",
    **same_names("cross_entropy_loss_fusion", "defer_embedding_wgrad_compute"),
}

# Further numbers, handed on where they are set.
_VALUES = {
    **same_names("init_method_std", "hidden_dropout", "attention_dropout"),
    "layernorm_epsilon": "--norm-epsilon",
    "seq_len_interpolation_factor": "--rotary-seq-len-interpolation-factor",
    "scale_factor": "--rope-scaling-factor",
    "wgrad_deferral_limit": "--wgrad-deferral-limit",
}

# Keys that change the model and that Megatron-LM has no option for, with the only value that it trains.
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

_SWIGLU, _SQUARED_RELU = "--swiglu", "--squared-relu"
_ACTIVATIONS = {"gelu": None, "swiglu": _SWIGLU, "fast-swiglu": _SWIGLU, "squared-relu": _SQUARED_RELU}

_NORMS = {
    "layernorm": [],
    "low_precision_layernorm": [],
    "layernorm1p": [("--apply-layernorm-1p", ())],
    "rmsnorm": [("--normalization", "RMSNorm")],
}

# Transformer Engine's; megatron-core's own needs a specification of layers.
_ATTENTION = {"auto": None, **{name: name for name in ("flash", "fused", "unfused")}}
_POSITIONS = {name: name for name in ("learned_absolute", "rope", "none")}

_COUNTED_ENDS = tuple(f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
_SHARED_EMBEDDINGS = "share_embeddings_and_output_weights"

# Keys in which a T5's encoder and decoder may differ. Not in layers: no release (core_v0.12.3, 0.16.1, 0.19)
# reads its own --decoder-num-layers, and the decoder gets the encoder's number.
_OF_A_STACK = ("arch", "activations_checkpoint_num_layers")


def argument_vector(options: Iterable[Option]) -> list[str]:
    words: list[str] = []
    for name, value in options:
        if value is not None:
            words += [name, *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def flag(name: str, is_set: object) -> Option:
    return name, () if is_set else None


def values(names: Mapping[str, str], node: Node) -> Iterator[Option]:
    for key, name in names.items():
        yield name, node.get(key)


def flags(names: Mapping[str, str], node: Node) -> Iterator[Option]:
    for key, name in names.items():
        yield flag(name, node.get(key))


def stack_of(model: Node, model_type: ModelType) -> Node:
    """Return the node that describes the layers; a T5 has one for each stack, and they must agree.

    Megatron-LM builds both from the same options: raise UserError if they do not.
    """
    if model_type != "t5":
        return model
    encoder, decoder = model["encoder"], model["decoder"]
    for key, value in encoder.items():
        if key not in _OF_A_STACK and key in decoder and decoder[key] != value:
            raise setting_error(
                f"training.model.decoder.{key}={literal(decoder[key])}, of the encoder {literal(value)}: "
                "Megatron-LM has one option for both",
                also=(f"training.model.encoder.{key}",),
            )
    return dict(encoder)


def model_options(model: Node, model_type: ModelType) -> Iterator[Option]:
    """Yield the options of the model's shape and batches, and how its layers are computed."""
    stack = stack_of(model, model_type)
    path = "training.model.encoder" if model_type == "t5" else "training.model"
    _check_fixed(model, "training.model")
    _check_fixed(stack, path)
    yield from _shape(model, stack, model_type)
    yield from _batches(model)
    yield from _layers(stack, path)
    yield from _implementation(model)
    yield from _recomputation(stack)
    yield from _experts(model)
    yield from _latent_attention(model)
    for place in ("first", "last"):
        layers = model.get(f"num_layers_in_{place}_pipeline_stage")
        yield f"--decoder-{place}-pipeline-num-layers", layers
    if model.get("activations_checkpoint_granularity") == "selective":
        yield "--recompute-modules", tuple(model.get("recompute_modules") or ()) or None


def _check_fixed(node: Node, path: str) -> None:
    for key, only in _FIXED.items():
        if node.get(key) not in (only, None):
            hint = f"with engine=megatron_lm: {path}.{key}={'null' if only is None else only}"
            raise _explain_no_option(f"{path}.{key}", node[key], hint)


def _explain_no_option(key: str, value: object, hint: str) -> UserError:
    return setting_error(f"{key}={literal(value)}: Megatron-LM has no option for that", hint=hint)


def _shape(model: Node, stack: Node, model_type: ModelType) -> Iterator[Option]:
    data, groups = model["data"], stack.get("num_query_groups")
    if model_type == "t5":
        yield "--encoder-num-layers", stack["num_layers"]
        yield "--decoder-num-layers", model["decoder"]["num_layers"]
    else:
        yield "--num-layers", stack["num_layers"]
    sizes = same_names("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels")
    yield from values(sizes, stack)
    yield flag("--group-query-attention", groups is not None)
    yield "--num-query-groups", groups
    if model_type == "t5":
        yield "--encoder-seq-length", data.get("seq_length")
        yield "--decoder-seq-length", data.get("seq_length_dec")
    else:
        yield "--seq-length", data.get("seq_length")
    yield "--max-position-embeddings", model.get("max_position_embeddings")
    yield "--make-vocab-size-divisible-by", model.get("make_vocab_size_divisible_by")
    shared = "share_decoder_tokens_head_embeddings" if model_type == "t5" else _SHARED_EMBEDDINGS
    yield flag("--untie-embeddings-and-output-weights", not model.get(shared, True))


def _batches(model: Node) -> Iterator[Option]:
    rampup = model.get("rampup_batch_size")
    if rampup is not None:
        raise setting_error(
            f"training.model.rampup_batch_size={literal(rampup)}: Megatron-LM has it for trainings that are "
            "measured in samples only, and this one is measured in steps",
            hint="training.model.rampup_batch_size=null",
        )
    yield from values(same_names("micro_batch_size", "global_batch_size"), model)


def _layers(stack: Node, path: str) -> Iterator[Option]:
    yield from values(_VALUES, stack)
    norm = "layernorm1p" if stack.get("layernorm_zero_centered_gamma") else "layernorm"
    yield from _require_one_of(_NORMS, stack, path, "normalization", norm)
    activation = _require_one_of(_ACTIVATIONS, stack, path, "activation", "gelu")
    if activation is not None:
        yield activation, ()
    fusion = "--no-bias-swiglu-fusion" if activation == _SWIGLU else "--no-bias-gelu-fusion"
    # There is no such kernel for a squared ReLU, and megatron-core refuses to look for one.
    yield flag(fusion, stack.get("bias_activation_fusion") is False or activation == _SQUARED_RELU)
    positions = _require_one_of(_POSITIONS, stack, path, "position_embedding_type", "learned_absolute")
    yield "--position-embedding-type", positions
    if positions == "rope":
        yield "--rotary-percent", stack.get("rotary_percentage")
        yield "--rotary-base", stack.get("rotary_base")
        yield flag("--no-rope-fusion", not stack.get("apply_rope_fusion"))
    yield from flags(_ON, stack)
    for key, name in _OFF.items():
        yield flag(name, stack.get(key) is False)


def _implementation(model: Node) -> Iterator[Option]:
    yield "--transformer-impl", "transformer_engine" if model.get("transformer_engine") else "local"
    yield flag("--no-gradient-accumulation-fusion", model.get("gradient_accumulation_fusion") is False)
    backend = _require_one_of(_ATTENTION, model, "training.model", "attention_backend", "auto")
    yield "--attention-backend", backend
    yield from flags(same_names("use_cpu_initialization", "fp16_lm_cross_entropy"), model)
    yield from flags(same_names("calculate_per_token_loss", *_COUNTED_ENDS), model)
    if model.get("gc_interval"):
        yield flag("--manual-gc", True)
        yield "--manual-gc-interval", model["gc_interval"]


def _recomputation(stack: Node) -> Iterator[Option]:
    prefix = "activations_checkpoint"
    granularity, layers = stack.get(f"{prefix}_granularity"), stack.get(f"{prefix}_num_layers")
    if granularity is None or (granularity == "full" and layers == 0):
        return
    yield "--recompute-granularity", granularity
    if granularity == "full":
        yield "--recompute-method", stack.get(f"{prefix}_method")
        yield "--recompute-num-layers", layers


def _require_one_of(known: Mapping[str, Any], stack: Node, path: str, key: str, default: str) -> Any:
    value = stack.get(key) or default
    if value not in known:
        raise _explain_no_option(f"{path}.{key}", value, f"valid with engine=megatron_lm: {', '.join(known)}")
    return known[value]


# Sizes and switches of experts: an option of the same name, but for their number.
_EXPERT_VALUES = {
    "num_moe_experts": "--num-experts",
    **same_names(
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "moe_router_load_balancing_type",
        "moe_router_dtype",
        "moe_router_score_function",
        "moe_router_topk",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_bias_update_rate",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_input_jitter_eps",
        "moe_token_dispatcher_type",
        "moe_expert_capacity_factor",
        "moe_token_drop_policy",
    ),
}
_EXPERT_FLAGS = same_names(
    "moe_grouped_gemm",
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "moe_pad_expert_input_to_capacity",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "moe_per_layer_logging",
)
_KNOWN = {*_EXPERT_VALUES, *_EXPERT_FLAGS, "moe_layer_freq"}
_LATENT_VALUES = same_names("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def _experts(model: Node) -> Iterator[Option]:
    if not model.get("num_moe_experts"):
        return
    for key, value in model.items():
        if key.startswith("moe_") and key not in _KNOWN and value:
            raise _explain_no_option(f"training.model.{key}", value, "null, or engine=nemo")
    yield from values(_EXPERT_VALUES, model)
    # Megatron-LM reads a list without spaces.
    frequency = model.get("moe_layer_freq")
    yield "--moe-layer-freq", None if frequency is None else str(frequency).replace(" ", "")
    yield from flags(_EXPERT_FLAGS, model)
    yield from values(same_names("expert_model_parallel_size", "expert_tensor_parallel_size"), model)


def _latent_attention(model: Node) -> Iterator[Option]:
    """Yield the options of attention with norms of queries and keys, or with these from narrow vectors.

    Its rotary positions are YaRN's there, which are the plain ones with the scaling factor of 1 that the
    options begin with.
    """
    yield flag("--qk-layernorm", model.get("qk_layernorm"))
    if not model.get("multi_latent_attention"):
        return
    if model.get("rope_type") != "rope":
        key = "training.model.rope_type"
        raise _explain_no_option(key, model.get("rope_type"), f"{key}=rope")
    yield flag("--multi-latent-attention", True)
    yield from values(_LATENT_VALUES, model)
