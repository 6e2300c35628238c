"""Mixtures of experts, multi-latent attention and sliding windows: what the engines take of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.checks.findings import Finding, error
from launcher.estimates import parallelism as keys
from launcher.estimates.model import LATENT, LATENT_QUERY, has_layer_flags, model_type_of
from launcher.estimates.values import Values, divisors, full, is_whole, listed

EXPERTS = "model.num_moe_experts"
_TOPK = "model.moe_router_topk"
_LAYERS = "model.moe_layer_freq"
_SEQUENCE = "model.sequence_parallel"
_LATENT = "model.multi_latent_attention"
_WINDOW = "model.window_size"
# The layer specification of NeMo's that has layers with and without experts, and latent attention
# (megatron_gpt_model.py, get_specs).
_SPECIFICATION = "decoder_block_gpt"


def layout_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find experts that cannot be shared out: they are whole on a rank, or cut by expert tensor parallel.

    megatron/core/transformer/moe/moe_layer.py and experts.py.
    """
    expert, experts = values.whole(keys.EXPERT, 1), values.whole(EXPERTS)
    if values.raw(EXPERTS) is None:
        if expert is not None and expert > 1:
            yield error("layout.experts", keys.EXPERT, expert, "the model has no experts", "1")
        return
    if expert is not None and experts is not None and experts % expert:
        valid = f"valid expert sizes: {listed(divisors(experts))}"
        told = f"does not divide {experts} experts"
        yield error("layout.experts", keys.EXPERT, expert, told, valid, also=(EXPERTS,))
    yield from _cut_experts(values)
    yield from _uncut_sequences(values)
    if engine == "nemo":
        yield from _layout_of_nemo(values, expert or 1)


def _cut_experts(values: Values) -> Iterator[Finding]:
    tensor = values.whole(keys.EXPERT_TENSOR, values.whole(keys.TENSOR, 1))
    key = "model.moe_ffn_hidden_size"
    if values.raw(key) is None:
        key = "model.ffn_hidden_size"
    width = values.whole(key)
    if tensor is not None and width is not None and width % tensor:
        named = keys.TENSOR if values.raw(keys.EXPERT_TENSOR) is None else keys.EXPERT_TENSOR
        told = f"does not divide {width} hidden units of an expert ({full(key)})"
        valid = f"valid expert tensor sizes: {listed(divisors(width))}"
        yield error("layout.experts", named, tensor, told, valid, also=(key,))


def _uncut_sequences(values: Values) -> Iterator[Finding]:
    """Find tensor parallel without sequence parallel (megatron/core: moe/moe_layer.py raises)."""
    tensor = values.whole(keys.TENSOR, 1)
    if tensor is not None and tensor > 1 and not values.flag(_SEQUENCE):
        told = f"experts with tensor {tensor} need sequence parallel"
        valid = f"True, or {full(keys.TENSOR)}=1"
        yield error("layout.experts", _SEQUENCE, values.raw(_SEQUENCE), told, valid, also=(keys.TENSOR,))


def _layout_of_nemo(values: Values, expert: int) -> Iterator[Finding]:
    """Find what NeMo 2.4 lacks (nlp_overrides.py, and what megatron_gpt_model.py raises)."""
    cut, tensor = values.whole(keys.EXPERT_TENSOR), values.whole(keys.TENSOR, 1)
    if cut is not None and tensor is not None and cut != tensor:
        told = f"NeMo cuts experts by the tensor size, {tensor}"
        valid = f"{tensor} or null; or engine=megatron_lm"
        yield error("layout.experts", keys.EXPERT_TENSOR, cut, told, valid, also=(keys.TENSOR,))
    if expert == 1:
        return
    if values.raw("model.megatron_amp_O2") is False:
        told = f"NeMo has expert parallel {expert} with it alone"
        yield error("layout.experts", "model.megatron_amp_O2", False, told, "True", also=(keys.EXPERT,))
    if values.raw("model.optim.name") == "distributed_fused_adam":
        key, told = "model.optim.name", f"NeMo has no expert parallel {expert} with Apex's optimizer"
        valid = "mcore_distributed_optim"
        yield error("layout.experts", key, "distributed_fused_adam", told, valid, also=(keys.EXPERT,))


def expert_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find what megatron/core/transformer/transformer_config.py and NeMo's layers do not take."""
    experts = values.whole(EXPERTS)
    if experts is None:
        return
    kind = model_type_of(values)
    if kind != "gpt":
        told = f"a model of the type {kind} has no experts"
        yield _problem(EXPERTS, experts, told, "null, or training.run.model_type=gpt")
        return
    topk = values.whole(_TOPK, 2)
    if topk is not None and topk > experts:
        yield _problem(
            _TOPK, topk, f"a token goes to as many of {experts} experts", f"1 to {experts}", EXPERTS
        )
    if not has_layer_flags(values, "moe_layer_freq", True):
        told = "expected a whole number N, for every N-th layer, or a list of a 0 or 1 for each layer"
        yield _problem(_LAYERS, values.raw(_LAYERS), told, None, "model.num_layers")
    yield from _groups(values, experts)
    yield from _options(values)
    if values.raw(_LAYERS) not in (None, 1) and _lacks_specification(values, engine):
        told = f"NeMo has no {full(_LAYERS)} without it"
        yield _problem("model.name", values.raw("model.name"), told, _SPECIFICATION, _LAYERS)


def _groups(values: Values, experts: int) -> Iterator[Finding]:
    key, chosen_key = "model.moe_router_num_groups", "model.moe_router_group_topk"
    groups, chosen = values.whole(key), values.whole(chosen_key)
    if groups is not None and experts % groups:
        valid = listed(divisors(experts))
        yield _problem(key, groups, f"does not divide {experts} experts", valid, EXPERTS)
    if chosen is not None and groups is None and values.raw(key) is None:
        told = f"{full(chosen_key)}={chosen} needs a number of groups here"
        yield _problem(key, None, told, listed(divisors(experts)), chosen_key)
    elif chosen is not None and groups is not None and chosen > groups:
        yield _problem(chosen_key, chosen, f"there are {groups} groups", f"1 to {groups}", key)


def _options(values: Values) -> Iterator[Finding]:
    bias, score = "model.moe_router_enable_expert_bias", "model.moe_router_score_function"
    if values.flag(bias) and values.raw(score) != "sigmoid":
        yield _problem(score, values.raw(score), f"{full(bias)}=True needs sigmoid", "sigmoid", bias)
    if values.flag("model.moe_grouped_gemm") and values.flag("model.bias", True):
        told = "experts whose products are grouped have no biases"
        valid = f"False, or {full('model.moe_grouped_gemm')}=False"
        yield _problem("model.bias", values.raw("model.bias"), told, valid, "model.moe_grouped_gemm")
    padded, capacity = "model.moe_pad_expert_input_to_capacity", "model.moe_expert_capacity_factor"
    if values.flag(padded) and values.raw(capacity) is None:
        yield _problem(capacity, None, f"{full(padded)}=True needs a capacity", "such as 1.0", padded)


def _lacks_specification(values: Values, engine: str) -> bool:
    """Return True for NeMo's own layers, which all have experts if one has, and no latent attention."""
    return engine == "nemo" and values.raw("model.name") != _SPECIFICATION


def attention_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find sizes of latent attention that are missing, and windows that the engine does not have."""
    if values.flag(_LATENT):
        yield from _latent_problems(values)
        if _lacks_specification(values, engine):
            told = f"NeMo has no {full(_LATENT)} without it"
            yield _attention("model.name", values.raw("model.name"), told, _SPECIFICATION, _LATENT)
    if values.raw(_WINDOW) is not None:
        yield from _window_problems(values, engine)


def _latent_problems(values: Values) -> Iterator[Finding]:
    """Find missing sizes: megatron-core's configuration and Megatron-LM's options have different defaults."""
    for name in LATENT:
        if values.raw(f"model.{name}") is None:
            told = f"{full(_LATENT)}=True needs it, and the engines differ in what they assume"
            yield _attention(f"model.{name}", None, told, "a whole number", _LATENT)
    if LATENT_QUERY not in (values.node("model") or {}):
        told = f"{full(_LATENT)}=True needs it, and the engines differ in what they assume"
        valid = "a whole number, or null for queries without a narrow vector"
        yield _attention(f"model.{LATENT_QUERY}", None, told, valid, _LATENT)


def _window_problems(values: Values, engine: str) -> Iterator[Finding]:
    window = values.raw(_WINDOW)
    is_pair = isinstance(window, (list, tuple)) and len(window) == 2
    if not is_pair or not all(is_whole(size) and size >= -1 for size in window):
        told = "expected the tokens before and behind, -1 for all"
        yield _attention(_WINDOW, window, told, "such as [4095, 0]")
    elif engine == "megatron_lm":
        told = "Megatron-LM has no option for it (core_v0.12.3)"
        yield _attention(_WINDOW, window, told, "null, or engine=nemo")
    elif engine == "nemo" and not values.flag("model.transformer_engine"):
        told = "megatron-core has sliding windows with Transformer Engine alone"
        valid = f"null, or {full('model.transformer_engine')}=True"
        yield _attention(_WINDOW, window, told, valid, "model.transformer_engine")
    if not has_layer_flags(values, "window_attn_skip_freq", True):
        key = "model.window_attn_skip_freq"
        told = "expected a whole number N, for each N-th layer without, or a list of a 0 or 1 for each layer"
        yield _attention(key, values.raw(key), told, None, "model.num_layers")


def _problem(key: str, value: Any, told: str, valid: str | None, *also: str) -> Finding:
    return error("model.experts", key, value, told, valid, also=also)


def _attention(key: str, value: Any, told: str, valid: str | None, *also: str) -> Finding:
    return error("model.attention", key, value, told, valid, also=also)
