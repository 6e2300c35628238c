"""The model of a job: its kind, its sizes, and the FLOPs of a sample."""

from __future__ import annotations

from typing import NamedTuple

from arithmetic.flops import sample_flops, sample_tokens
from arithmetic.parameters import count_parameters, has_learned_positions, vocabulary_size
from launcher.estimates.parallelism import is_encoder_decoder, stacks_of
from launcher.estimates.values import Values

# Sizes that may be left out, and are whole numbers where they are not.
_OF_STACK = ("num_query_groups", "kv_channels", "relative_attention_num_buckets")
_OF_MODEL = (
    "model.make_vocab_size_divisible_by",
    "model.override_vocab_size",
    "model.tensor_model_parallel_size",
    "model.data.seq_length_dec",
    "model.tokenizer.num_sentinel_tokens",
    "model.num_moe_experts",
    "model.moe_router_topk",
    "model.moe_ffn_hidden_size",
    "model.moe_shared_expert_intermediate_size",
)
# Sizes of multi-latent attention: those that it needs, and one that may be missing.
LATENT = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
LATENT_QUERY = "q_lora_rank"
_NODES = ("model.tokenizer", "model.data")
# Optimizers that data parallel ranks share, and the types of gradients in 16 bits.
DISTRIBUTED = ("mcore_distributed_optim", "distributed_fused_adam")
HALF = ("bf16", "bfloat16")
_PRECISIONS = ("bf16", "16", "32")


def is_countable(values: Values) -> bool:
    """Return True if a model has all its sizes, and each is one: counting with them then never fails."""
    stacks = stacks_of(values)
    needed: list[int | None] = []
    for stack in stacks:
        needed += [stack.layers, stack.hidden, stack.heads, stack.ffn, len(stack.attends_to)]
    nodes = ("model", *(stack.node for stack in stacks))
    # A T5's embedding is its encoder's.
    first = {**(values.node("model") or {}), **(values.node(nodes[-len(stacks)]) or {})}
    if has_learned_positions(first):
        needed.append(values.whole("model.max_position_embeddings"))
    optional = [f"{node}.{name}" for node in nodes for name in _OF_STACK]
    return (
        bool(stacks)
        and all(needed)
        and all(_is_left_out(values, key) or values.whole(key) for key in (*optional, *_OF_MODEL))
        and all(_is_left_out(values, key) or values.node(key) is not None for key in _NODES)
        and (model_type_of(values) == "gpt" or not values.raw("model.num_moe_experts"))
        and _has_latent_sizes(values)
        and has_layer_flags(values, "moe_layer_freq", values.raw("model.num_moe_experts"))
        and has_layer_flags(values, "window_attn_skip_freq", values.raw("model.window_size"))
    )


def _has_latent_sizes(values: Values) -> bool:
    if not values.raw("model.multi_latent_attention"):
        return True
    query = f"model.{LATENT_QUERY}"
    sizes = [values.whole(f"model.{name}") for name in LATENT]
    return None not in sizes and (_is_left_out(values, query) or values.whole(query) is not None)


def has_layer_flags(values: Values, name: str, is_used: object) -> bool:
    """Return True if a key that selects layers is a number, or has a flag for each layer."""
    value = values.raw(f"model.{name}")
    if not is_used or value is None or values.whole(f"model.{name}") is not None:
        return True
    are_flags = isinstance(value, (list, tuple)) and all(flag in (0, 1) for flag in value)
    return are_flags and len(value) == values.whole("model.num_layers")


def _is_left_out(values: Values, key: str) -> bool:
    # Megatron reads 0 as none.
    return values.raw(key) in (None, 0)


def model_type_of(values: Values) -> str:
    """Return ``gpt``, ``t5`` or ``bert``, by the keys that only these have."""
    if is_encoder_decoder(values):
        return "t5"
    return "bert" if "bert_binary_head" in (values.node("model") or {}) else "gpt"


def precision_of(values: Values) -> str:
    """Return ``bf16``, ``16`` or ``32``."""
    precision = str(values.raw("trainer.precision") or 32)
    return next((name for name in _PRECISIONS if precision.startswith(name)), "32")


def has_fused_attention(values: Values, node: str, engine: str) -> bool:
    """Return True if a kernel computes the core of attention without writing its scores.

    Our trainer has PyTorch's fused attention on GPUs without Transformer Engine, unless the configuration
    asks for megatron-core's own. `node` is that of a stack.
    """
    if engine == "megatron":
        return bool(values.raw("model.attention_backend") != "local")
    switches = ("model.use_flash_attention", f"{node}.use_flash_attention", "model.transformer_engine")
    return precision_of(values) != "32" and any(values.flag(key) for key in switches)


class ModelSize(NamedTuple):
    """A model's sizes, all of them known.

    `flops` are the model FLOPs of one sample, forward and backward, and `tokens` those that it counts as.
    `parameters` include all experts of a mixture.
    """

    parameters: int
    flops: int
    tokens: int
    has_experts: bool = False


def model_size(values: Values) -> ModelSize | None:
    """Return the sizes of a job's model; None where one is missing or invalid, or the vocabulary unknown."""
    model, model_type = values.node("model"), model_type_of(values)
    if model is None or not is_countable(values):
        return None
    vocabulary = vocabulary_size(model)
    if vocabulary is None:
        return None
    return ModelSize(
        count_parameters(model, vocabulary, model_type),
        sample_flops(model, vocabulary, model_type),
        sample_tokens(model, model_type),
        bool(model.get("num_moe_experts")),
    )
