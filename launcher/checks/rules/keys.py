"""Check the keys of NeMo's nodes: their types, and slips in their names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from launcher.checks.findings import Finding, Severity, check, error, name_likewise, warning
from launcher.errors import escape
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import is_encoder_decoder
from launcher.estimates.training import LATENT, LATENT_QUERY
from launcher.estimates.values import Values, full, is_number, is_whole
from launcher.plan import REFERENCE, Plan

_SIZES = "tensor_model_parallel pipeline_model_parallel virtual_pipeline_model_parallel context_parallel"
_STACK = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels"
_EXPERTS = "router_topk ffn_hidden_size shared_expert_intermediate_size router_num_groups router_group_topk"
_STACKS = ("model", "model.encoder", "model.decoder")

# Whole numbers, with the least that is valid.
_WHOLE: dict[str, int] = {
    **{f"trainer.{name}": 1 for name in ("num_nodes", "devices", "max_steps", "log_every_n_steps")},
    **{f"model.{name}_size": 1 for name in (*_SIZES.split(), "micro_batch", "global_batch")},
    **{f"model.expert_{name}_size": 1 for name in ("model_parallel", "tensor_parallel")},
    **{f"model.{name}": 1 for name in ("encoder_seq_length", "seq_length", "max_position_embeddings")},
    **{f"{stack}.{name}": 1 for stack in _STACKS for name in _STACK.split()},
    **{f"{stack}.activations_checkpoint_num_layers": 0 for stack in _STACKS},
    **{f"{stack}.num_layers_in_{end}_pipeline_stage": 1 for stack in _STACKS for end in ("first", "last")},
    "model.make_vocab_size_divisible_by": 1,
    "model.override_vocab_size": 1,
    "model.num_moe_experts": 1,
    **{f"model.moe_{name}": 1 for name in _EXPERTS.split()},
    **{f"model.{name}": 1 for name in (*LATENT, LATENT_QUERY)},
    "model.pipeline_model_parallel_split_rank": 0,
    "model.microbatch_group_size_per_vp_stage": 1,
    "model.seed": 0,
    "model.data.seq_length": 1,
    "model.data.seq_length_dec": 1,
    "model.data.num_workers": 0,
    "model.optim.sched.warmup_steps": 0,
    "model.optim.sched.constant_steps": 0,
}

TRAINER = "engine.megatron"
# Its messages name keys as in the file that it reads, which has no node `training`.
_KEY = re.compile(r"(?P<key>[\w.]+)(=| is missing)")
_NODE = re.compile(r"(?<![\w./])(?=((trainer|exp_manager|model|resume)\.\w|restore_from_path=))")

# A training requires these, a stack those.
_NEEDED = ("trainer.max_steps", keys.MICRO, keys.GLOBAL)
_NEEDED_OF_A_STACK = ("num_layers", "hidden_size", "num_attention_heads")

_MODEL_FLAGS = (
    "sequence_parallel megatron_amp_O2 mcore_gpt mcore_t5 fp8 fsdp overlap_p2p_comm batch_p2p_comm"
    " transformer_engine ub_tp_comm_overlap multi_latent_attention qk_layernorm moe_grouped_gemm"
    " moe_layer_recompute moe_pad_expert_input_to_capacity moe_router_enable_expert_bias fp8_params"
)
# Closer than for `did_you_mean`: NeMo has valid keys that our tree does not show.
_LIKENESS = 0.8


# Ranges of numbers: the words for them, and the test.
_Range = tuple[str, Callable[[float], bool]]
_AT_LEAST_0: _Range = ("a number of at least 0", lambda number: number >= 0)
_ABOVE_0: _Range = ("a number above 0", lambda number: number > 0)
_SHARE: _Range = ("a number of at least 0 and below 1", lambda number: 0 <= number < 1)

_NUMBERS: dict[str, _Range] = {
    "trainer.gradient_clip_val": _AT_LEAST_0,
    "model.optim.lr": _ABOVE_0,
    "model.optim.weight_decay": _AT_LEAST_0,
    "model.optim.sched.min_lr": _AT_LEAST_0,
    "model.init_method_std": _ABOVE_0,
    "model.layernorm_epsilon": _ABOVE_0,
    **{f"{stack}.{name}_dropout": _SHARE for stack in _STACKS for name in ("hidden", "attention", "ffn")},
    "model.data.masked_lm_prob": _SHARE,
    "model.moe_expert_capacity_factor": _ABOVE_0,
}

# Profilers that no shipped configuration names: their keys are near to those of `nsys_profile`.
_UNSHIPPED = ("model.torch_profile.", "model.memory_profile.")
# Keys that NeMo reads, with those below them, and no shipped configuration has: the NeMo launcher's sizes do.
_READ_BY_NEMO = (
    *("model.ub_tp_comm_overlap_cfg.", "model.mcore_customization_config.", "model.data.fim."),
    *("model.qkv_bias.", "model.rotary_interleaved.", "model.seq_len_interpolation_factor."),
    *("model.precision.", "model.reduce_amax.", "model.get_attention_mask_from_fusion.", "model.use_emha."),
    *("model.optim.grad_sync_dtype.", "model.tokenizer.trust_remote_code."),
)

_FLAGS = (
    *(f"model.{name}" for name in _MODEL_FLAGS.split()),
    *(f"{stack}.account_for_{part}_in_pipeline_split" for stack in _STACKS for part in ("embedding", "loss")),
    *(f"exp_manager.{name}" for name in ("resume_if_exists", "create_checkpoint_callback")),
)

# Keys that the checks read, also ones that no shipped configuration has.
KEYS = frozenset(
    (
        *_WHOLE,
        *_NUMBERS,
        *_FLAGS,
        "model.moe_layer_freq",
        "model.moe_router_score_function",
        "model.window_size",
        "model.window_attn_skip_freq",
        "model.recompute_modules",
    )
)


@check("type.whole", "sizes, counts and steps are whole numbers")
def whole_problems(values: Values) -> Iterator[Finding]:
    for key, least in _WHOLE.items():
        value = values.raw(key)
        if value is not None and not (is_whole(value) and value >= least):
            yield error(key, value, f"expected a whole number of at least {least}")
    two = is_encoder_decoder(values)
    length = "model.seq_length" if two else "model.encoder_seq_length"
    stacks = _STACKS[1:] if two else _STACKS[:1]
    of_stacks = [f"{stack}.{name}" for stack in stacks for name in _NEEDED_OF_A_STACK]
    for key in (*_NEEDED, length, *of_stacks):
        # A missing node is not judged.
        if values.node(key.partition(".")[0]) is not None and values.raw(key) is None:
            yield error(key, None, f"a whole number is needed{_note_if_absent(values, key)}")


def _note_if_absent(values: Values, key: str) -> str:
    node, _, name = key.rpartition(".")
    return "" if name in (values.node(node) or {}) else ", and the key is missing"


@check("type.number", "rates, dropouts and the like are numbers in their range")
def number_problems(values: Values) -> Iterator[Finding]:
    """Find invalid numbers, and a model without an optimizer or a learning rate."""
    for key, (valid, holds) in _NUMBERS.items():
        value = values.raw(key)
        if value is not None and not (is_number(value) and holds(value)):
            endless = isinstance(value, float) and not is_number(value)
            yield error(key, value, f"expected {valid}{', and not infinite' if endless else ''}")
    optimizer, rate = "model.optim", "model.optim.lr"
    if values.node("model") is None:
        return
    if values.node(optimizer) is None:
        yield error(optimizer, values.raw(optimizer), "an optimizer is needed: its name, lr and sched")
    elif values.raw(rate) is None:
        yield error(rate, None, f"a learning rate is needed{_note_if_absent(values, rate)}", "such as 1e-4")


@check("type.flag", "switches are True or False")
def flag_problems(values: Values) -> Iterator[Finding]:
    for key in _FLAGS:
        value = values.raw(key)
        if value is not None and not isinstance(value, (bool, Mapping)):
            yield error(key, value, "expected True or False")


@check(
    TRAINER,
    "with engine=megatron our trainer takes the configuration, and Hugging Face has the model to convert",
    "trainer_verdict",
)
def trainer_problems(trainer_verdict: str) -> Iterator[Finding]:
    """Report our trainer's reason to refuse the configuration."""
    if trainer_verdict:
        named = _KEY.match(trainer_verdict)
        key = full(named["key"]) if named else None
        yield Finding(Severity.ERROR, key, escape(_NODE.sub("training.", trainer_verdict)))


@check(
    "keys.unknown",
    "keys that no shipped configuration has are keys of the engine, and no slips of others",
    "added_keys",
    "shipped_keys",
)
def key_problems(
    values: Values, engine: str, added_keys: Iterable[str], shipped_keys: Iterable[str]
) -> Iterator[Finding]:
    """Find unknown keys of NeMo's nodes.

    Megatron-LM gets only options, NeMo ignores unknown keys silently, and our trainer refuses them itself. A
    key near to a known one is reported for every engine.
    """
    text, unread = "no shipped configuration has this key", []
    for key in added_keys:
        value = values.raw(key)
        near = nearest_key(key, shipped_keys) if not key.startswith(_UNSHIPPED) else None
        fix = f"did you mean {full(near)}?" if near is not None else None
        if engine == "nemo" and f"{key}.".startswith(_READ_BY_NEMO):
            continue
        if isinstance(value, Mapping) or (near is None and (value is None or value is False)):
            continue
        if engine == "megatron_lm":
            yield error(key, value, "engine=megatron_lm has no option for this key", fix)
        elif near is not None:
            yield warning(key, value, text, fix)
        elif engine == "nemo":
            unread.append(key)
    for key in unread[:1]:
        text += f", and NeMo ignores a key that it does not read{name_likewise(map(full, unread[1:]))}"
        yield warning(key, values.raw(key), text, also=unread[1:])


def nearest_key(key: str, shipped: Iterable[str]) -> str | None:
    """Return the shipped key nearest to a misspelt one, preferring the same node.

    `trainer`, `exp_manager` and `model` have different readers: a key of one is no slip in another.
    """
    (node, _, name), top = key.rpartition("."), f"{key.partition('.')[0]}."
    likeness = {}
    for other in filter(lambda other: other.startswith(top), shipped):
        other_node, _, other_name = other.rpartition(".")
        ratio = difflib.SequenceMatcher(None, _normalize(name), _normalize(other_name)).ratio()
        if ratio >= _LIKENESS:
            likeness[other] = (ratio, other_node == node)
    return max(sorted(likeness), key=lambda other: likeness[other]) if likeness else None


def _normalize(name: str) -> str:
    return name.lower().replace("_", "")


@check("keys.variables", "variables of the shell are in values that a shell expands", "unexpanded")
def variable_problems(plan: Plan, unexpanded: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    for key, value in unexpanded:
        match, fix = re.search(REFERENCE, value), "of the shell that launches: ${{oc.env:{}}}"
        assert match is not None
        if "env_vars." in key:
            fix = f"in each task: env_expand.{key.rpartition('.')[2]}, in place of {escape(key)}; {fix}"
        text, variable = f"{match[0]} stays as it is: no shell expands it", match["braced"] or match["name"]
        yield warning(key, value, text, fix.format(variable))
    cores = "SLURM_CPUS_PER_TASK"
    for name, value in plan.job.expansions.items():
        if cores in value and plan.job.resources.cpus_per_task is None:
            text = f"Slurm sets {cores} only where cluster.cpus_per_task is set"
            yield warning(f"env_expand.{name}", value, text, "cluster.cpus_per_task=...")


TYPES = (whole_problems, number_problems, flag_problems)
CHECKS = (key_problems, variable_problems, trainer_problems)
