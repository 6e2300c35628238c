"""The types of NeMo's keys that the rest counts with, or whose mistakes would show on the nodes alone."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from launcher.preflight.findings import Finding, error
from launcher.preflight.values import Values, is_number, is_whole

_SIZES = "tensor_model_parallel pipeline_model_parallel virtual_pipeline_model_parallel context_parallel"
_STACK = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels"
_STACKS = ("model", "model.encoder", "model.decoder")

# Whole numbers, with the least that is valid.
_WHOLE: dict[str, int] = {
    **{f"trainer.{name}": 1 for name in ("num_nodes", "devices", "max_steps", "log_every_n_steps")},
    **{f"model.{name}_size": 1 for name in (*_SIZES.split(), "micro_batch", "global_batch")},
    **{f"model.expert_{name}_size": 1 for name in ("model_parallel", "tensor_parallel")},
    **{f"model.{name}": 1 for name in ("encoder_seq_length", "seq_length", "max_position_embeddings")},
    **{f"{stack}.{name}": 1 for stack in _STACKS for name in _STACK.split()},
    **{f"{stack}.activations_checkpoint_num_layers": 0 for stack in _STACKS},
    "model.make_vocab_size_divisible_by": 1,
    "model.num_moe_experts": 1,
    "model.pipeline_model_parallel_split_rank": 0,
    "model.microbatch_group_size_per_vp_stage": 1,
    "model.seed": 0,
    "model.data.seq_length": 1,
    "model.data.seq_length_dec": 1,
    "model.data.num_workers": 0,
    "model.optim.sched.warmup_steps": 0,
    "model.optim.sched.constant_steps": 0,
}

# A training cannot be without these, where their node is there.
_NEEDED = (
    *(f"trainer.{name}" for name in ("max_steps",)),
    *(f"model.{name}_batch_size" for name in ("micro", "global")),
    *(
        f"{stack}.{name}"
        for stack in _STACKS
        for name in ("num_layers", "hidden_size", "num_attention_heads")
    ),
)


class Range(NamedTuple):
    """The numbers that are valid: from `least` on, it included or not, and below `below`."""

    least: float = 0
    included: bool = True
    below: float | None = None

    def holds(self, value: float) -> bool:
        above = value >= self.least if self.included else value > self.least
        return above and (self.below is None or value < self.below)

    def __str__(self) -> str:
        start = f"a number of at least {self.least:g}" if self.included else f"a number above {self.least:g}"
        return start if self.below is None else f"{start} and below {self.below:g}"


_DROPOUT = Range(below=1)
_POSITIVE = Range(included=False)

_NUMBERS: dict[str, Range] = {
    "trainer.gradient_clip_val": Range(),
    "model.optim.lr": _POSITIVE,
    "model.optim.weight_decay": Range(),
    "model.optim.sched.min_lr": Range(),
    "model.init_method_std": _POSITIVE,
    "model.layernorm_epsilon": _POSITIVE,
    **{f"{stack}.{name}_dropout": _DROPOUT for stack in _STACKS for name in ("hidden", "attention", "ffn")},
    "model.data.masked_lm_prob": Range(below=1),
}

_MODEL_FLAGS = (
    "sequence_parallel megatron_amp_O2 mcore_gpt mcore_t5 fp8 fsdp overlap_p2p_comm batch_p2p_comm"
    " transformer_engine ub_tp_comm_overlap"
)
_FLAGS = (
    *(f"model.{name}" for name in _MODEL_FLAGS.split()),
    *(f"exp_manager.{name}" for name in ("resume_if_exists", "create_checkpoint_callback")),
)


def whole_problems(values: Values) -> Iterator[Finding]:
    for key, least in _WHOLE.items():
        value = values.raw(key)
        if value is not None and not (is_whole(value) and value >= least):
            yield error("type.whole", key, value, f"expected a whole number of at least {least}")
    for key in _NEEDED:
        node, _, name = key.rpartition(".")
        held = values.node(node)
        if held is not None and name in held and held[name] is None:
            yield error("type.whole", key, None, "a whole number is needed")


def number_problems(values: Values) -> Iterator[Finding]:
    for key, valid in _NUMBERS.items():
        value = values.raw(key)
        if value is not None and not (is_number(value) and valid.holds(value)):
            yield error("type.number", key, value, f"expected {valid}")


def flag_problems(values: Values) -> Iterator[Finding]:
    for key in _FLAGS:
        value: Any = values.raw(key)
        if value is not None and not isinstance(value, bool) and not isinstance(value, Mapping):
            yield error("type.flag", key, value, "expected True or False")
