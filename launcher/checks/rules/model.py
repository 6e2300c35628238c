"""The model: its experts, attention, sequences and recomputed activations, and the memory that it needs."""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from arithmetic.gpus import GPUS
from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity, error, warning
from launcher.estimates import parallelism as keys
from launcher.estimates.memory import StageMemory, estimate_memory
from launcher.estimates.model import LATENT, LATENT_QUERY, has_layer_flags, model_type_of
from launcher.estimates.parallelism import CountedGpu, gpu_of, is_encoder_decoder, stacks_of
from launcher.estimates.training import uncounted
from launcher.estimates.values import Values, divisors, full, is_whole, listed
from launcher.plan import Plan

EXPERTS = "model.num_moe_experts"
_TOPK = "model.moe_router_topk"
_LAYERS = "model.moe_layer_freq"
_SEQUENCE = "model.sequence_parallel"
_LATENT = "model.multi_latent_attention"
_WINDOW = "model.window_size"
# The layer specification of NeMo's that has layers with and without experts, and latent attention
# (megatron_gpt_model.py, get_specs).
_SPECIFICATION = "decoder_block_gpt"

_DATA = "model.data.seq_length"
_DECODER_DATA = "model.data.seq_length_dec"
_POSITIONS = "model.max_position_embeddings"
# The mean length of a masked span where the configuration does not say: the paper's.
_MEAN_SPAN = 3.0
_GRANULARITIES = ("full", "selective")
_METHODS = ("block", "uniform")
# Parts of a layer that selective recomputing knows, the last not in megatron-core 0.12, and what some need.
_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
_NEEDED = {"moe_act": "model.moe_grouped_gemm", "mla_up_proj": "model.multi_latent_attention"}
_NAMED = "model.recompute_modules"
# NeMo's, of which neither the memory nor the time is estimated.
_PARTIAL = (
    "num_micro_batches_with_partial_activation_checkpoints",
    "activations_checkpoint_layers_per_pipeline",
)


def expert_layout_problems(values: Values, engine: str) -> Iterator[Finding]:
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
        message = f"does not divide {experts} experts"
        yield error("layout.experts", keys.EXPERT, expert, message, valid, also=(EXPERTS,))
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
        message = f"does not divide {width} hidden units of an expert ({full(key)})"
        valid = f"valid expert tensor sizes: {listed(divisors(width))}"
        yield error("layout.experts", named, tensor, message, valid, also=(key,))


def _uncut_sequences(values: Values) -> Iterator[Finding]:
    """Find tensor parallel without sequence parallel (megatron/core: moe/moe_layer.py raises)."""
    tensor = values.whole(keys.TENSOR, 1)
    if tensor is not None and tensor > 1 and not values.flag(_SEQUENCE):
        message = f"experts with tensor {tensor} need sequence parallel"
        valid = f"True, or {full(keys.TENSOR)}=1"
        yield error("layout.experts", _SEQUENCE, values.raw(_SEQUENCE), message, valid, also=(keys.TENSOR,))


def _layout_of_nemo(values: Values, expert: int) -> Iterator[Finding]:
    """Find what NeMo 2.4 lacks (nlp_overrides.py, and what megatron_gpt_model.py raises)."""
    cut, tensor = values.whole(keys.EXPERT_TENSOR), values.whole(keys.TENSOR, 1)
    if cut is not None and tensor is not None and cut != tensor:
        message = f"NeMo cuts experts by the tensor size, {tensor}"
        valid = f"{tensor} or null; or engine=megatron_lm"
        yield error("layout.experts", keys.EXPERT_TENSOR, cut, message, valid, also=(keys.TENSOR,))
    if expert == 1:
        return
    if values.raw("model.megatron_amp_O2") is False:
        message = f"NeMo has expert parallel {expert} with it alone"
        yield error("layout.experts", "model.megatron_amp_O2", False, message, "True", also=(keys.EXPERT,))
    if values.raw("model.optim.name") == "distributed_fused_adam":
        key, message = "model.optim.name", f"NeMo has no expert parallel {expert} with Apex's optimizer"
        valid = "mcore_distributed_optim"
        yield error("layout.experts", key, "distributed_fused_adam", message, valid, also=(keys.EXPERT,))


def expert_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find what megatron/core/transformer/transformer_config.py and NeMo's layers do not take."""
    experts = values.whole(EXPERTS)
    if experts is None:
        return
    kind = model_type_of(values)
    if kind != "gpt":
        message = f"a model of the type {kind} has no experts"
        yield _problem(EXPERTS, experts, message, "null, or training.run.model_type=gpt")
        return
    topk = values.whole(_TOPK, 2)
    if topk is not None and topk > experts:
        yield _problem(
            _TOPK, topk, f"a token goes to as many of {experts} experts", f"1 to {experts}", EXPERTS
        )
    if not has_layer_flags(values, "moe_layer_freq", True):
        message = "expected a whole number N, for every N-th layer, or a list of a 0 or 1 for each layer"
        yield _problem(_LAYERS, values.raw(_LAYERS), message, None, "model.num_layers")
    yield from _groups(values, experts)
    yield from _options(values)
    if values.raw(_LAYERS) not in (None, 1) and _lacks_specification(values, engine):
        message = f"NeMo has no {full(_LAYERS)} without it"
        yield _problem("model.name", values.raw("model.name"), message, _SPECIFICATION, _LAYERS)


def _groups(values: Values, experts: int) -> Iterator[Finding]:
    key, chosen_key = "model.moe_router_num_groups", "model.moe_router_group_topk"
    groups, chosen = values.whole(key), values.whole(chosen_key)
    if groups is not None and experts % groups:
        valid = listed(divisors(experts))
        yield _problem(key, groups, f"does not divide {experts} experts", valid, EXPERTS)
    if chosen is not None and groups is None and values.raw(key) is None:
        message = f"{full(chosen_key)}={chosen} needs a number of groups here"
        yield _problem(key, None, message, listed(divisors(experts)), chosen_key)
    elif chosen is not None and groups is not None and chosen > groups:
        yield _problem(chosen_key, chosen, f"there are {groups} groups", f"1 to {groups}", key)


def _options(values: Values) -> Iterator[Finding]:
    bias, score = "model.moe_router_enable_expert_bias", "model.moe_router_score_function"
    if values.flag(bias) and values.raw(score) != "sigmoid":
        yield _problem(score, values.raw(score), f"{full(bias)}=True needs sigmoid", "sigmoid", bias)
    if values.flag("model.moe_grouped_gemm") and values.flag("model.bias", True):
        message = "experts whose products are grouped have no biases"
        valid = f"False, or {full('model.moe_grouped_gemm')}=False"
        yield _problem("model.bias", values.raw("model.bias"), message, valid, "model.moe_grouped_gemm")
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
            message = f"NeMo has no {full(_LATENT)} without it"
            yield _attention("model.name", values.raw("model.name"), message, _SPECIFICATION, _LATENT)
    if values.raw(_WINDOW) is not None:
        yield from _window_problems(values, engine)


def _latent_problems(values: Values) -> Iterator[Finding]:
    """Find missing sizes: megatron-core's configuration and Megatron-LM's options have different defaults."""
    for name in LATENT:
        if values.raw(f"model.{name}") is None:
            message = f"{full(_LATENT)}=True needs it, and the engines differ in what they assume"
            yield _attention(f"model.{name}", None, message, "a whole number", _LATENT)
    if LATENT_QUERY not in (values.node("model") or {}):
        message = f"{full(_LATENT)}=True needs it, and the engines differ in what they assume"
        valid = "a whole number, or null for queries without a narrow vector"
        yield _attention(f"model.{LATENT_QUERY}", None, message, valid, _LATENT)


def _window_problems(values: Values, engine: str) -> Iterator[Finding]:
    window = values.raw(_WINDOW)
    is_pair = isinstance(window, (list, tuple)) and len(window) == 2
    if not is_pair or not all(is_whole(size) and size >= -1 for size in window):
        message = "expected the tokens before and behind, -1 for all"
        yield _attention(_WINDOW, window, message, "such as [4095, 0]")
    elif engine == "megatron_lm":
        message = "Megatron-LM has no option for it (core_v0.12.3)"
        yield _attention(_WINDOW, window, message, "null, or engine=nemo")
    elif engine == "nemo" and not values.flag("model.transformer_engine"):
        message = "megatron-core has sliding windows with Transformer Engine alone"
        valid = f"null, or {full('model.transformer_engine')}=True"
        yield _attention(_WINDOW, window, message, valid, "model.transformer_engine")
    if not has_layer_flags(values, "window_attn_skip_freq", True):
        key = "model.window_attn_skip_freq"
        message = (
            "expected a whole number N, for each N-th layer without, or a list of a 0 or 1 for each layer"
        )
        yield _attention(key, values.raw(key), message, None, "model.num_layers")


def _problem(key: str, value: Any, message: str, valid: str | None, *also: str) -> Finding:
    return error("model.experts", key, value, message, valid, also=also)


def _attention(key: str, value: Any, message: str, valid: str | None, *also: str) -> Finding:
    return error("model.attention", key, value, message, valid, also=also)


def sequence_problems(values: Values) -> Iterator[Finding]:
    """Find sequence lengths that differ.

    NeMo's GPT is built for `encoder_seq_length` (megatron_gpt_model.py, max_sequence_length, and the shapes
    that pipeline stages exchange) and fed `data.seq_length`; a T5 has `seq_length` for the former.
    """
    key = "model.seq_length" if is_encoder_decoder(values) else "model.encoder_seq_length"
    length = values.whole(key)
    if length is None:
        return
    data = values.whole(_DATA)
    if data is not None and data != length:
        message = f"the model is built for sequences of {length} tokens ({full(key)})"
        yield error("model.sequence", _DATA, data, message, f"{length}, or ${{{full(key)}}}", also=(key,))
    positions = values.whole(_POSITIONS)
    if positions is not None and positions < length and _learned(values):
        message = f"there are learned positions for fewer tokens than {full(key)}={length} has"
        yield error("model.sequence", _POSITIONS, positions, message, f"{length} or more", also=(key,))


def _learned(values: Values) -> bool:
    node = "model.encoder" if is_encoder_decoder(values) else "model"
    return values.raw(f"{node}.position_embedding_type") in (None, "learned_absolute", "learned_parameters")


def decoder_problems(values: Values, engine: str) -> Iterator[Finding]:
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
        least = _written(length, masked or 0, values.number("model.data.mean_ngram_size") or _MEAN_SPAN)
        why = f"{least}, what is masked of a full encoder, the sentinels and the end"
    if decoder < least:
        message = f"shorter than {why}: it would not hold what is masked"
        yield error("model.sequence", _DECODER_DATA, decoder, message, f"{least} or more", also=(_DATA,))


def _written(length: int, density: float, mean_span: float) -> int:
    """Return the tokens that a decoder writes when its encoder reads `length` (Raffel et al. 2019, 3.1.4).

    The encoder reads the text without its noise, a sentinel for each span, and the end; the decoder writes
    the noise, the sentinels and the end. The rounding is that of the T5 code base.
    """

    def divided(text: int) -> tuple[int, int]:
        noise = min(max(round(text * density), 1), text - 1)
        return noise, min(max(round(noise / max(mean_span, 1)), 1), noise)

    text = (
        bisect.bisect_right(
            range(2, min(4 * length, sys.maxsize)),
            length,
            key=lambda n: n - divided(n)[0] + divided(n)[1] + 1,
        )
        + 1
    )
    return sum(divided(text)) + 1


def recompute_problems(values: Values) -> Iterator[Finding]:
    """Find what megatron/core/transformer/transformer_config.py raises of `activations_checkpoint_*`.

    `full` needs a method and a number of layers, `selective` takes no number of layers. Without a granularity
    nothing is recomputed, and the others are not read.
    """
    for stack in stacks_of(values):
        start = f"{stack.node}.activations_checkpoint"
        granularity = values.raw(f"{start}_granularity")
        if granularity is None:
            continue
        if granularity not in _GRANULARITIES:
            yield _recompute_problem(f"{start}_granularity", granularity, "expected full, selective or null")
        elif granularity == "full":
            yield from _full(values, start)
        else:
            yield from _selective(values, start)
            yield from _modules(values)
        yield from _partial(values, stack.node)


def _full(values: Values, start: str) -> Iterator[Finding]:
    method = values.raw(f"{start}_method")
    if method not in _METHODS:
        message = "activations_checkpoint_granularity=full needs block or uniform here"
        yield _recompute_problem(f"{start}_method", method, message, f"{start}_granularity")
    if values.raw(f"{start}_num_layers") is None:
        message = "activations_checkpoint_granularity=full needs a number of layers here, such as 1"
        yield _recompute_problem(f"{start}_num_layers", None, message, f"{start}_granularity")


def _partial(values: Values, node: str) -> Iterator[Finding]:
    """Warn of layers or micro batches that are not recomputed after all: estimates count all of them."""
    for name in _PARTIAL:
        value = values.raw(f"{node}.{name}")
        if value:
            message = "memory and time are estimated without it, as if all micro batches recomputed alike"
            yield warning("model.recompute", f"{node}.{name}", value, message)


def _selective(values: Values, start: str) -> Iterator[Finding]:
    method, layers = values.raw(f"{start}_method"), values.raw(f"{start}_num_layers")
    if method is not None and method not in _METHODS:
        yield _recompute_problem(f"{start}_method", method, "expected block, uniform or null")
    if layers is not None:
        message = "activations_checkpoint_granularity=selective is for all layers; null is needed here"
        yield _recompute_problem(f"{start}_num_layers", layers, message, f"{start}_granularity")


def _modules(values: Values) -> Iterator[Finding]:
    named = values.raw(_NAMED)
    if named is None:
        return
    if not isinstance(named, (list, tuple)) or not all(name in _MODULES for name in named):
        yield _recompute_problem(_NAMED, named, f"expected a list of {', '.join(_MODULES)}, or null")
        return
    for name, key in _NEEDED.items():
        if name in named and not values.flag(key):
            yield _recompute_problem(_NAMED, named, f"{name} needs {full(key)}=True", key)


def _recompute_problem(key: str, value: Any, message: str, *also: str) -> Finding:
    return error("model.recompute", key, value, message, also=also)


# --- the memory of a GPU

CHECK = "memory.fits"
_GIB = 2**30
_STATES = ("weights", "gradients", "optimizer")


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
        yield from _not_told(Values(config))
        return
    counted, fullest = gpu_of(resources, facts.gpu_types), max(stages, key=lambda stage: stage.total)
    allowed = int(counted.gpu.memory * (1 - plan.assumptions.memory_margin))
    if fullest.total <= allowed:
        return
    too_much = fullest.total > counted.gpu.memory
    certain = not counted.is_assumed or fullest.total > max(gpu.memory for gpu in GPUS.values())
    tell = error if too_much and certain else warning
    key, value = _blamed(config, fullest)
    yield tell(
        CHECK,
        key,
        value,
        f"{_needs(fullest, len(stages))}; {_has(counted, fullest, plan.assumptions.memory_margin)}",
        also=tuple(name for name in (keys.TENSOR, keys.PIPELINE, keys.MICRO, keys.NODES) if name != key),
    )


def parts_told(stage: StageMemory) -> str:
    """Format the parts of a stage's memory, the largest first."""
    parts = {name: getattr(stage, name) for name in (*_STATES, "activations", "logits")}
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / _GIB:.1f}" for name, size in largest if size >= _GIB / 20)


def has_gpus(plan: Plan) -> bool:
    """Return False for tasks on this machine that ask for no GPU: they may do without."""
    resources = plan.job.resources
    asked = resources.gpus_per_node, resources.gpus_per_task, resources.gres, resources.gpu
    return plan.scheduler != "local" or any(asked)


def why_not_told(plan: Plan) -> str | None:
    """Return why the memory of a plan with a valid layout is not estimated; None if it is."""
    if plan.job.config is None:
        return f"stages=[{plan.job.stage}] trains nothing"
    if not has_gpus(plan) or Values(plan.job.config).raw("trainer.accelerator") == "cpu":
        return "no GPUs are asked for"
    return uncounted(Values(plan.job.config))


def _not_told(values: Values) -> Iterator[Finding]:
    """Say what is not counted; what is wrong with a value, or with the layout, other checks say."""
    why = uncounted(values)
    if why is not None and values.raw("trainer.accelerator") != "cpu":
        text = f"not checked: the model fits into the memory of a GPU ({why})"
        yield Finding(CHECK, Severity.SKIPPED, None, text, why=why)


def _blamed(config: Mapping[str, Any], stage: StageMemory) -> tuple[str, Any]:
    """Return the size to change first: micro batch if the activations are most, else tensor."""
    values = Values(config)
    micro = values.whole(keys.MICRO) or 1
    states = stage.weights + stage.gradients + stage.optimizer
    if micro > 1 and stage.total - states > states:
        return keys.MICRO, micro
    return keys.TENSOR, values.whole(keys.TENSOR, 1)


def _needs(stage: StageMemory, stages: int) -> str:
    where = f"pipeline stage {stage.stage} of {stages} (from 0) needs" if stages > 1 else "a GPU needs"
    return f"{where} {stage.total / _GIB:.1f} GiB ({parts_told(stage)})"


def _has(counted: CountedGpu, stage: StageMemory, margin: float) -> str:
    gpu = counted.gpu
    room = f"{gpu.name} has {gpu.memory / _GIB:.1f} GiB ({counted.source})"
    if counted.is_assumed:
        room = f"{gpu.name}, which is assumed, has {gpu.memory / _GIB:.1f} GiB (cluster.gpu=... says which)"
    over = stage.total - gpu.memory
    if over > 0:
        return f"{room}: {over / _GIB:.1f} GiB too little"
    free = -over / _GIB
    return (
        f"{room}: {free:.1f} GiB are left for CUDA, NCCL and fragments, of {margin:.0%} that they should have"
    )
