"""Check the model: its experts, attention, sequences, recomputed activations, and memory."""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, check, error, skip_check, warning
from launcher.checks.rules.layout import EXPERTS
from launcher.estimates import parallelism as keys
from launcher.estimates.memory import StageMemory, estimate_memory
from launcher.estimates.parallelism import CountedGpu, gpu_of, is_encoder_decoder, stacks_of
from launcher.estimates.training import (
    LATENT,
    LATENT_QUERY,
    find_unsupported_feature,
    has_layer_flags,
    latent_switches,
    model_type_of,
)
from launcher.estimates.values import Values, divisors, full, gib, is_whole, listed
from launcher.plan import Plan
from slipway.arithmetic.gpus import GPUS

_TOPK = "model.moe_router_topk"
_LAYERS = "model.moe_layer_freq"
_GROUPED = "model.moe_grouped_gemm"
_LATENT = "model.multi_latent_attention"
_WINDOW = "model.window_size"
# NeMo's layer specification that has layers with and without experts, and latent attention
# (megatron_gpt_model.py, get_specs).
_SPECIFICATION = "decoder_block_gpt"

_DATA = "model.data.seq_length"
_DECODER_DATA = "model.data.seq_length_dec"
_POSITIONS = "model.max_position_embeddings"
# The default mean length of a masked span: the paper's.
_MEAN_SPAN = 3.0
_METHODS = ("block", "uniform")
# Parts of a layer for selective recomputing, the last not in megatron-core 0.12, and required keys.
_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
_NEEDED = {"moe_act": _GROUPED, "mla_up_proj": _LATENT}
_NAMED = "model.recompute_modules"
# NeMo's, without estimates of memory and time.
_PARTIAL = (
    "num_micro_batches_with_partial_activation_checkpoints",
    "activations_checkpoint_layers_per_pipeline",
)


@check("model.heads", "heads divide the hidden size, groups the heads")
def width_problems(values: Values) -> Iterator[Finding]:
    """Find a hidden size that heads do not divide, without `kv_channels` for the width of a head."""
    for stack in stacks_of(values):
        heads_key, hidden_key = f"{stack.node}.num_attention_heads", f"{stack.node}.hidden_size"
        if stack.kv_channels or not stack.hidden or not stack.heads:
            continue
        if stack.hidden % stack.heads:
            valid = f"valid: {listed(divisors(stack.hidden))}"
            fix = f"{valid}; or say how wide a head is: {full(stack.node)}.kv_channels"
            text = f"does not divide hidden size {stack.hidden}"
            yield error(heads_key, stack.heads, text, fix, also=(hidden_key,))
        if stack.groups and stack.heads % stack.groups:
            valid = f"valid: {listed(divisors(stack.heads))}"
            text = f"does not divide {stack.heads} attention heads"
            yield error(f"{stack.node}.num_query_groups", stack.groups, text, valid, also=(heads_key,))


@check(
    "model.experts",
    "the router's numbers fit the experts, and the engine builds the layers with experts",
)
def expert_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find experts that megatron/core/transformer/transformer_config.py or NeMo's layers refuse."""
    experts = values.whole(EXPERTS)
    if experts is None:
        return
    kind = model_type_of(values)
    if kind != "gpt":
        message = f"a model of the type {kind} has no experts"
        yield error(EXPERTS, experts, message, "null, or training.run.model_type=gpt")
        return
    topk = values.whole(_TOPK, 2)
    if topk is not None and topk > experts:
        yield error(_TOPK, topk, f"more than {full(EXPERTS)}={experts}", f"1 to {experts}", (EXPERTS,))
    if not has_layer_flags(values, "moe_layer_freq", True):
        message = "expected a whole number N, for every N-th layer, or a list of a 0 or 1 for each layer"
        yield error(_LAYERS, values.raw(_LAYERS), message, also=("model.num_layers",))
    yield from _groups(values, experts)
    yield from _options(values)
    if values.raw(_LAYERS) not in (None, 1) and _lacks_specification(values, engine):
        message = f"NeMo needs another model.name for {full(_LAYERS)}"
        yield error("model.name", values.raw("model.name"), message, _SPECIFICATION, (_LAYERS,))


def _groups(values: Values, experts: int) -> Iterator[Finding]:
    key, chosen_key = "model.moe_router_num_groups", "model.moe_router_group_topk"
    groups, chosen, valid = values.whole(key), values.whole(chosen_key), listed(divisors(experts))
    if groups is not None and experts % groups:
        yield error(key, groups, f"does not divide {experts} experts", valid, (EXPERTS,))
    if chosen is not None and groups is None and values.raw(key) is None:
        yield error(
            key, None, f"{full(chosen_key)}={chosen} needs a number of groups here", valid, (chosen_key,)
        )
    elif chosen is not None and groups is not None and chosen > groups:
        yield error(chosen_key, chosen, f"there are {groups} groups", f"1 to {groups}", (key,))


def _options(values: Values) -> Iterator[Finding]:
    bias, score = "model.moe_router_enable_expert_bias", "model.moe_router_score_function"
    if values.flag(bias) and values.raw(score) != "sigmoid":
        yield error(score, values.raw(score), f"{full(bias)}=True needs sigmoid", "sigmoid", (bias,))
    if values.flag(_GROUPED) and values.flag("model.bias", True):
        message = "experts with grouped products have no biases"
        valid = f"False, or {full(_GROUPED)}=False"
        yield error("model.bias", values.raw("model.bias"), message, valid, (_GROUPED,))
    padded, capacity = "model.moe_pad_expert_input_to_capacity", "model.moe_expert_capacity_factor"
    if values.flag(padded) and values.raw(capacity) is None:
        yield error(capacity, None, f"{full(padded)}=True needs a capacity", "such as 1.0", (padded,))


def _lacks_specification(values: Values, engine: str) -> bool:
    """Return True for NeMo's own layers: experts in all or none, and no latent attention."""
    return engine == "nemo" and values.raw("model.name") != _SPECIFICATION


@check("model.attention", "multi-latent attention has its sizes, and the engine has the sliding window")
def attention_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find missing sizes of latent attention, and attention that the model or engine does not have.

    megatron-core's configuration and Megatron-LM's options have different defaults of the sizes. Layers of T5
    and BERT have only plain attention (megatron/core/models/T5/t5_spec.py, bert/bert_layer_specs.py).
    """
    kind = model_type_of(values)
    if kind != "gpt":
        for key in latent_switches(values):
            message = f"a model of the type {kind} has no multi-latent attention"
            yield error(key, values.raw(key), message, "False")
    elif values.flag(_LATENT):
        message = f"{full(_LATENT)}=True needs it, and the engines have different defaults"
        for name in LATENT:
            if values.raw(f"model.{name}") is None:
                yield error(f"model.{name}", None, message, "a whole number", (_LATENT,))
        if LATENT_QUERY not in (values.node("model") or {}):
            valid = "a whole number, or null for queries without a narrow vector"
            yield error(f"model.{LATENT_QUERY}", None, message, valid, (_LATENT,))
        if _lacks_specification(values, engine):
            message = f"NeMo needs another model.name for {full(_LATENT)}"
            yield error("model.name", values.raw("model.name"), message, _SPECIFICATION, (_LATENT,))
    if values.raw(_WINDOW) is not None:
        yield from _window_problems(values, engine)


def _window_problems(values: Values, engine: str) -> Iterator[Finding]:
    window, transformer_engine = values.raw(_WINDOW), "model.transformer_engine"
    is_pair = isinstance(window, (list, tuple)) and len(window) == 2
    if not is_pair or not all(is_whole(size) and size >= -1 for size in window):
        yield error(_WINDOW, window, "expected the tokens before and behind, -1 for all", "such as [4095, 0]")
    elif engine == "megatron_lm":
        yield error(
            _WINDOW, window, "Megatron-LM has no option for it (core_v0.12.3)", "null, or engine=nemo"
        )
    elif engine == "nemo" and not values.flag(transformer_engine):
        message = "megatron-core has sliding windows with Transformer Engine alone"
        valid = f"null, or {full(transformer_engine)}=True"
        yield error(_WINDOW, window, message, valid, (transformer_engine,))
    if not has_layer_flags(values, "window_attn_skip_freq", True):
        key = "model.window_attn_skip_freq"
        expected = "a whole number N, for each N-th layer without, or a list"
        message = f"expected {expected} of a 0 or 1 for each layer"
        yield error(key, values.raw(key), message, also=("model.num_layers",))


@check("model.sequence", "the data's sequences are as long as the model's, and there are positions for them")
def sequence_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find sequence lengths that differ.

    NeMo's GPT is built for `encoder_seq_length` (megatron_gpt_model.py, max_sequence_length, and the shapes
    that pipeline stages exchange) and fed `data.seq_length`; a T5 has `seq_length` for the former.
    """
    two = is_encoder_decoder(values)
    key = "model.seq_length" if two else "model.encoder_seq_length"
    length, data, positions = values.whole(key), values.whole(_DATA), values.whole(_POSITIONS)
    if length is not None and data is not None and data != length:
        message = f"the model is built for sequences of {length} tokens ({full(key)})"
        yield error(_DATA, data, message, f"{length}, or ${{{full(key)}}}", also=(key,))
    kind = values.raw(f"{'model.encoder' if two else 'model'}.position_embedding_type")
    are_learned = kind in (None, "learned_absolute", "learned_parameters")
    if length is not None and positions is not None and positions < length and are_learned:
        message = f"there are learned positions for fewer tokens than {full(key)}={length} has"
        yield error(_POSITIONS, positions, message, f"{length} or more", also=(key,))
    yield from _decoder_problems(values, engine)


def _decoder_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find a T5's decoder without room for all that is masked (NeMo: megatron_t5_model.py, _validate_cfg).

    Our trainer packs text until the encoder is full, as the T5 paper's code does: more than `seq_length`
    tokens of it, and a sentinel for each span is written too.
    """
    length, decoder = values.whole(_DATA), values.whole(_DECODER_DATA)
    masked, kind = values.number("model.data.masked_lm_prob"), values.raw("model.data.dataset_type")
    if length is None or decoder is None or not 0 <= (masked or 0) < 1:
        return
    least = length if kind == "ul2" else math.ceil(length * (masked or 0)) if kind == "t5" else 0
    why = f"data.seq_length {length}" if kind == "ul2" else f"{length} × masked_lm_prob {masked} = {least}"
    if engine == "megatron" and kind == "t5":
        least = _count_written(length, masked or 0, values.number("model.data.mean_ngram_size") or _MEAN_SPAN)
        why = f"{least}, the masked tokens of a full encoder, the sentinels and the end"
    if decoder < least:
        message = f"shorter than {why}: it would not hold the masked tokens"
        yield error(_DECODER_DATA, decoder, message, f"{least} or more", also=(_DATA,))


def _count_written(length: int, density: float, mean_span: float) -> int:
    """Return the tokens that a decoder writes when its encoder reads `length` (Raffel et al. 2019, 3.1.4).

    The encoder reads the text without its noise, a sentinel for each span, and the end; the decoder writes
    the noise, the sentinels and the end. The rounding is that of the T5 code base.
    """

    def divided(text: int) -> tuple[int, int]:
        noise = min(max(round(text * density), 1), text - 1)
        return noise, min(max(round(noise / max(mean_span, 1)), 1), noise)

    def read(text: int) -> int:
        noise, spans = divided(text)
        return text - noise + spans + 1

    text = bisect.bisect_right(range(2, min(4 * length, sys.maxsize)), length, key=read) + 1
    return sum(divided(text)) + 1


@check("model.recompute", "the options of recomputing activations agree")
def recompute_problems(values: Values) -> Iterator[Finding]:
    """Find `activations_checkpoint_*` that megatron/core/transformer/transformer_config.py refuses.

    `full` needs a method and a number of layers, `selective` takes no number of layers. Without a granularity
    no activation is recomputed, and the other keys are not read.
    """
    for stack in stacks_of(values):
        start = f"{stack.node}.activations_checkpoint"
        key, method_key, layers_key = (f"{start}_{name}" for name in ("granularity", "method", "num_layers"))
        granularity, method, layers = (values.raw(name) for name in (key, method_key, layers_key))
        stated = f"activations_checkpoint_granularity={granularity}"
        if granularity is None:
            continue
        if granularity == "full":
            if method not in _METHODS:
                yield error(method_key, method, f"{stated} needs block or uniform here", also=(key,))
            if layers is None:
                yield error(
                    layers_key, None, f"{stated} needs a number of layers here, such as 1", also=(key,)
                )
        elif granularity == "selective":
            if method is not None and method not in _METHODS:
                yield error(method_key, method, "expected block, uniform or null")
            if layers is not None:
                yield error(
                    layers_key, layers, f"{stated} is for all layers; null is needed here", also=(key,)
                )
            yield from _modules(values)
        else:
            yield error(key, granularity, "expected full, selective or null")
        for name in _PARTIAL:  # not all is recomputed after all
            value = values.raw(f"{stack.node}.{name}")
            if value:
                message = "memory and time are estimated without it, as if all micro batches recomputed alike"
                yield warning(f"{stack.node}.{name}", value, message)


def _modules(values: Values) -> Iterator[Finding]:
    named = values.raw(_NAMED)
    if named is None:
        return
    if not isinstance(named, (list, tuple)) or not all(name in _MODULES for name in named):
        yield error(_NAMED, named, f"expected a list of {', '.join(_MODULES)}, or null")
        return
    for name, key in _NEEDED.items():
        if name in named and not values.flag(key):
            yield error(_NAMED, named, f"{name} needs {full(key)}=True", also=(key,))


# --- the memory of a GPU

_STATES = ("weights", "gradients", "optimizer")
_FITS = "the model fits into the memory of a GPU"


@check("memory.fits", _FITS)
def memory_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Compare the fullest pipeline stage with its GPU.

    An error if the estimate alone is more than there is; a warning if it leaves less than the margin, or if
    it is only assumed which GPU there is, unless no GPU known here would do.
    """
    config, resources = plan.job.config, plan.job.resources
    if config is None or not has_gpus(plan):
        return
    stages = estimate_memory(config, resources.nodes, plan.job.engine)
    if stages is None:
        # Other checks report a wrong value or layout.
        why = find_unsupported_feature(Values(config))
        if why is not None and Values(config).raw("trainer.accelerator") != "cpu":
            yield skip_check(_FITS, why)
        return
    counted, fullest = gpu_of(resources, facts.gpu_types), max(stages, key=lambda stage: stage.total)
    margin = plan.assumptions.memory_margin
    if fullest.total <= int(counted.gpu.memory * (1 - margin)):
        return
    too_much = fullest.total > counted.gpu.memory
    certain = not counted.is_assumed or fullest.total > max(gpu.memory for gpu in GPUS.values())
    report = error if too_much and certain else warning
    key, value = _offending_key(config, fullest)
    text = _describe_memory(counted, fullest, len(stages), margin)
    others = (keys.TENSOR, keys.PIPELINE, keys.MICRO, keys.NODES)
    yield report(key, value, text, also=[name for name in others if name != key])


def has_gpus(plan: Plan) -> bool:
    """Return False for tasks on this machine that ask for no GPU: they may do without."""
    resources = plan.job.resources
    requested = resources.gpus_per_node, resources.gpus_per_task, resources.gres, resources.gpu
    return plan.scheduler != "local" or any(requested)


def why_not_estimated(plan: Plan) -> str | None:
    """Return why the memory of a plan with a valid layout cannot be estimated; None if it can."""
    if plan.job.config is None:
        return f"stages=[{plan.job.stage}] trains nothing"
    if not has_gpus(plan) or Values(plan.job.config).raw("trainer.accelerator") == "cpu":
        return "no GPUs are asked for"
    return find_unsupported_feature(Values(plan.job.config))


def _offending_key(config: Mapping[str, Any], stage: StageMemory) -> tuple[str, Any]:
    """Return the size to change first: micro batch if the activations are most, else tensor."""
    values = Values(config)
    micro = values.whole(keys.MICRO) or 1
    states = stage.weights + stage.gradients + stage.optimizer
    if micro > 1 and stage.total - states > states:
        return keys.MICRO, micro
    return keys.TENSOR, values.whole(keys.TENSOR, 1)


def _describe_memory(counted: CountedGpu, stage: StageMemory, stages: int, margin: float) -> str:
    """Describe the memory of the fullest stage, its largest parts first, and of its GPU."""
    where = f"pipeline stage {stage.stage} of {stages} (from 0) needs" if stages > 1 else "a GPU needs"
    parts = {name: getattr(stage, name) for name in (*_STATES, "activations", "logits")}
    largest = sorted(parts.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {gib(size)}" for name, size in largest if size >= 2**30 / 20)
    gpu, over = counted.gpu, stage.total - counted.gpu.memory
    room = f"{gpu.name} has {gib(gpu.memory)} GiB ({counted.source})"
    if counted.is_assumed:
        room = f"{gpu.name} (assumed; cluster.gpu=... names another) has {gib(gpu.memory)} GiB"
    left = f"{gib(over)} GiB too little"
    if over <= 0:
        of_margin = f"less than the margin of {margin:.0%}"
        left = f"only {gib(-over)} GiB are left for CUDA, NCCL and fragments, {of_margin}"
    return f"{where} {gib(stage.total)} GiB ({shares}); {room}: {left}"


MEMORY = (memory_problems,)
CHECKS = (width_problems, expert_problems, attention_problems, sequence_problems, recompute_problems)
