"""Megatron-LM's options of mixtures of experts and multi-latent attention, and of their stages.

Those that core_v0.12.3 and core_v0.16.1 share (megatron/training/arguments.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import UserError, shown
from launcher.stages.megatron_lm_options import Options

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


def expert_options(model: Mapping[str, Any]) -> Options:
    """Return the options of experts and narrow attention, of uneven stages, and of what is recomputed.

    Raises
    ------
    UserError
        For a key of NeMo's that Megatron-LM has no option for.
    """
    return _experts(model) + _latent_attention(model) + _uneven_stages(model) + _recomputed(model)


def _experts(model: Mapping[str, Any]) -> Options:
    options = Options()
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


def _latent_attention(model: Mapping[str, Any]) -> Options:
    """Return the options of attention whose queries and keys have norms, or come out of narrow vectors.

    Its rotary positions are YaRN's there, which are the plain ones with the scaling factor of 1 that the
    options begin with.
    """
    options = Options()
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


def _uneven_stages(model: Mapping[str, Any]) -> Options:
    options = Options()
    for place in ("first", "last"):
        layers = model.get(f"num_layers_in_{place}_pipeline_stage")
        options.value(f"--decoder-{place}-pipeline-num-layers", layers)
    return options


def _recomputed(model: Mapping[str, Any]) -> Options:
    """Return the parts of a layer that selective recomputing is to compute again, where they are named."""
    options = Options()
    if model.get("activations_checkpoint_granularity") == "selective":
        options.values("--recompute-modules", model.get("recompute_modules"))
    return options
