"""Estimate the activations that a layer keeps for its backward pass.

Korthikanti et al. 2022 (arXiv 2205.05198), section 4: a GPT's layer keeps s b h (34 + 5 a s / h) bytes in 16
bits (equation 1); tensor parallelism divides 24 of the 34 and all of the scores (equation 2), sequence
parallelism the other 10 too (equation 4); attention's core, 5 a s² b, is not kept if it is recomputed
("selective", equation 6) or never written (Dao et al. 2022, FlashAttention, arXiv 2205.14135).
This module counts tensor by tensor, so that other widths, gated MLPs, grouped queries, rotary positions and
absent dropouts have their own numbers. Mixtures of experts and multi-latent attention are those of
megatron-core 0.12 to 0.16 (megatron/core/transformer/moe/, multi_latent_attention.py).
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.estimates.parallelism import Stack
from launcher.estimates.training import LATENT, LATENT_QUERY, Training, has_fused_attention
from launcher.estimates.values import Values
from slipway.arithmetic.parameters import expert_width

# A mask of a dropout; a logarithm of a softmax's sum, in fp32.
_MASK = 1
_LOG_SUM = 4
# megatron-core's probability where the configuration does not say.
_DROPOUT = 0.1


class Kept(NamedTuple):
    """Bytes: `split` by tensor parallelism, `whole` unless sequence parallelism divides them, and `fixed`."""

    split: float = 0
    whole: float = 0
    fixed: float = 0

    def plus(self, other: Kept) -> Kept:
        """Return the sum; ``+`` concatenates tuples."""
        return Kept(self.split + other.split, self.whole + other.whole, self.fixed + other.fixed)

    def times(self, number: float) -> Kept:
        return Kept(self.split * number, self.whole * number, self.fixed * number)

    def on_rank(self, tensor: int, sequence_parallel: bool) -> float:
        """Return the bytes of one tensor parallel rank."""
        return self.split / tensor + self.whole / (tensor if sequence_parallel else 1) + self.fixed


class Experts(NamedTuple):
    """A mixture of experts, for each token.

    `copies` of it go to experts, which `shared_by` GPUs share. `width` and `shared_width` are the hidden
    units of a routed expert and of the shared one, and `hidden_units` how many times a routed one keeps them.
    """

    number: int
    copies: float
    shared_by: int
    width: int
    shared_width: int
    hidden_units: int
    keeps_nothing: bool


class Layer:
    """Properties of a layer that its activations depend on; widths are those of all tensor parallel ranks.

    `bytes` are those of an element, `residual` of one of the residual stream, `factor` of one that a matrix
    multiplies, and `copy` of its copy in FP8, if it is needed in 16 bits too; `mask` those of a dropout's
    mask. `score` are the bytes for the attention of one token to another, 0 if they are never written; with
    `keeps_scores` they are kept. `result` is the width of attention's result, `narrow` that of multi-latent
    attention's vectors, and `rotary` that of the part of its keys that all heads share. `rotated` are the
    widths of queries and keys that are kept in addition to the unrotated ones, `angles` the bytes of a
    token's cosines and sines. `forgotten` are the parts of selective recomputing, by megatron-core's names.
    """

    def __init__(self, training: Training, stack: Stack) -> None:
        values, node = training.values, stack.node
        self.hidden, self.heads, self.inner = stack.hidden, stack.heads, stack.ffn
        self.attends_to = stack.attends_to
        self.bytes = element = training.element
        self.factor = 1 if training.has_fp8 else element
        self.copy = self.factor if self.factor < element else 0
        wide = values.flag(f"{node}.fp32_residual_connection") or not training.has_half_weights
        self.residual = 4 if wide else element
        self.mask = _MASK if values.number(f"{node}.hidden_dropout", _DROPOUT) else 0
        self.forgotten = _read_forgotten(values, node)
        self.score = _score(training, node)
        self.keeps_scores = self.score > 0 and "core_attn" not in self.forgotten
        self.query, self.keys, self.values = stack.width, stack.kv_width, stack.kv_width
        self.result, self.narrow, self.rotary, head = stack.width, 0, 0, stack.head
        self.is_latent = bool(values.raw("model.multi_latent_attention"))
        if self.is_latent:
            names = (LATENT_QUERY, *LATENT)
            query, rank, plain, head, value = (values.whole(f"model.{name}") or 0 for name in names)
            self.query = self.keys = self.heads * (plain + head)
            self.values = self.result = self.heads * value
            self.narrow, self.rotary = query + rank, head
        is_rotary = values.raw(f"{node}.position_embedding_type") == "rope"
        keeps_both = is_rotary and not self.is_latent and _keeps_unrotated(training)
        self.rotated = self.query + self.keys if keeps_both else 0
        self.angles = _angles(training, node, head) if is_rotary else 0
        self.hidden_units = _hidden_units(training, stack)
        self.experts = _experts(training, stack, self.forgotten)


def _read_forgotten(values: Values, node: str) -> frozenset[str]:
    """Return the parts that are recomputed selectively: attention's core unless the key names others."""
    if values.raw(f"{node}.activations_checkpoint_granularity") != "selective":
        return frozenset()
    modules = values.raw("model.recompute_modules")
    return frozenset(map(str, modules)) if isinstance(modules, (list, tuple)) else frozenset({"core_attn"})


def _experts(training: Training, stack: Stack, forgotten: frozenset[str]) -> Experts | None:
    """Return the mixture of experts, if there is one, each expert as busy as the others.

    With a capacity each expert takes as many copies as its share times the capacity, or no more than these.
    """
    values, model = training.values, training.values.node("model") or {}
    number = values.whole("model.num_moe_experts")
    if not number:
        return None
    copies: float = values.whole("model.moe_router_topk", 2) or 2
    capacity = values.number("model.moe_expert_capacity_factor")
    if capacity is not None and capacity > 0:
        is_padded = values.flag("model.moe_pad_expert_input_to_capacity")
        copies *= capacity if is_padded else min(capacity, 1)
    return Experts(
        number=number,
        copies=copies,
        shared_by=training.parallel.expert_tensor,
        width=expert_width(model),
        shared_width=values.whole("model.moe_shared_expert_intermediate_size", 0, least=0) or 0,
        hidden_units=_hidden_units(training, stack) + (0 if _is_fused(values, stack) else 1),
        keeps_nothing="moe" in forgotten or values.flag("model.moe_layer_recompute"),
    )


def _keeps_unrotated(training: Training) -> bool:
    """Return True if the fused queries, keys and values are kept in addition to the rotated ones.

    The values are a view of the fused tensor, and keep all of it for attention of PyTorch and
    megatron-core. Transformer Engine copies views that are not contiguous (transformer_engine/pytorch/
    attention/dot_product_attention/utils.py, get_qkv_layout), which frees the fused tensor.
    """
    return training.engine == "megatron" or not training.values.flag("model.transformer_engine")


def _hidden_units(training: Training, stack: Stack) -> int:
    """Return the multiples of its width that an MLP keeps: the input and the output of its function.

    A gated MLP keeps two halves and their product; without the fused kernel also the half behind the
    function, and in megatron-core 0.16 the other half with its offset.
    """
    if not stack.is_gated:
        return 2
    if _is_fused(training.values, stack):
        return 3
    return 4 if training.engine == "nemo" else 5


def _is_fused(values: Values, stack: Stack) -> bool:
    """Return True if one kernel computes a gated function, and weighs the result of experts.

    Without it the weighing keeps its input (megatron/core/transformer/moe/experts.py).
    """
    has_kernel = stack.is_gated and stack.activation != "reglu"
    return has_kernel and values.flag(f"{stack.node}.bias_activation_fusion", True)


def _angles(training: Training, node: str, head: int) -> float:
    """Return the bytes of cosines and sines of a micro batch's positions, by token; 0 with a fused kernel."""
    values = training.values
    if values.flag("model.apply_rope_fusion"):
        return 0
    part = values.number(f"{node}.rotary_percentage", 1.0) or 1.0
    return 4 * training.element * head * part / training.parallel.micro


def _score(training: Training, node: str) -> int:
    """Return the bytes of a score: softmax, dropout's mask and result; 0 where a fused kernel writes none.

    megatron-core's own attention computes its softmax in fp32 for our trainer.
    """
    values = training.values
    if has_fused_attention(values, node, training.engine):
        return 0
    dropout = _MASK if values.number(f"{node}.attention_dropout", _DROPOUT) else 0
    element = training.element
    if training.engine == "megatron":
        return 4 + element + dropout
    return element + (dropout + element if dropout else 0)


def kept_by_layer(layer: Layer) -> Kept:
    """Return the bytes that a layer of attentions and an MLP keeps, by token."""
    kept, length = _self_attention(layer).plus(_mlp(layer)), layer.attends_to[0]
    for source in layer.attends_to[1:]:  # the tokens of the encoder, of a T5's decoder
        memory = Kept(split=2 * layer.keys * layer.bytes * source / length)
        queries = Kept(split=2 * layer.query * layer.bytes + _scores(layer, source))
        kept = kept.plus(queries).plus(memory).plus(_count_around(layer))
    return kept


def kept_by_sparse_layer(layer: Layer) -> Kept:
    """Return the bytes that a layer with a mixture of experts keeps, by token."""
    return _self_attention(layer).plus(_mixture(layer, layer.experts)) if layer.experts else Kept()


def kept_by_output(layer: Layer) -> Kept:
    """Return the bytes of the last norm's input and result, by token."""
    return Kept(whole=layer.hidden * (layer.residual + layer.bytes))


def kept_by_embedding(layer: Layer) -> Kept:
    """Return the bytes of the dropout's mask, by token; the sum itself is the first layer's input."""
    return Kept(whole=layer.hidden * layer.mask)


def working_memory(layer: Layer) -> Kept:
    """Estimate the bytes that the backward pass of a layer needs in addition to the kept ones, by token.

    The gradients of the MLP's hidden units and of its input and output, which are whole on each rank while it
    multiplies them; or those of the scores, which selective recomputing writes first.
    """
    inner = layer.hidden_units * layer.inner
    hidden_units = Kept(layer.bytes * inner, 3 * layer.bytes * layer.hidden)
    if experts := layer.experts:
        of_experts = layer.bytes * experts.hidden_units * experts.copies * experts.width
        sent = 3 * layer.bytes * layer.hidden * experts.copies
        hidden_units = max(hidden_units, Kept(of_experts, sent), key=sum)
    again = 0 if layer.keeps_scores else layer.score
    scores = Kept((again + 2 * layer.bytes) * layer.heads * layer.attends_to[0]) if layer.score else Kept()
    return max(hidden_units, scores, key=sum)


def _self_attention(layer: Layer) -> Kept:
    """Count queries, keys, values and the result; FP8 keeps a narrow copy too.

    Multi-latent attention keeps its narrow vectors before and behind their norms; its queries, keys and
    values are concatenations: their parts are not kept.
    """
    heads = layer.bytes * (layer.query + layer.keys + layer.values + layer.rotated)
    if layer.is_latent and "mla_up_proj" in layer.forgotten:
        heads = 0
    narrow = layer.bytes * (layer.narrow + layer.rotary) + layer.factor * layer.narrow
    split = heads + layer.result * (layer.bytes + layer.copy) + _scores(layer, layer.attends_to[0])
    around = _count_around(layer, layer.is_latent and "layernorm" in layer.forgotten)
    return Kept(split, narrow, layer.angles).plus(around)


def _mlp(layer: Layer) -> Kept:
    if "mlp" in layer.forgotten:
        return Kept(whole=layer.hidden * (layer.residual + layer.bytes))
    return Kept(_hidden_kept(layer, layer.inner, layer.hidden_units)).plus(_count_around(layer))


def _hidden_kept(layer: Layer, width: float, times: int) -> float:
    """Count hidden units; those that the matrix on the way out multiplies may be in FP8."""
    return width * (layer.bytes * (times - 1) + layer.factor)


def _mixture(layer: Layer, experts: Experts) -> Kept:
    """Count the router's scores, the copies of a token for its experts, and the experts' hidden units.

    megatron/core/transformer/moe: the router keeps logits, scores and probabilities in fp32 and a mask. The
    copies are those behind the last permutation, on each of the GPUs that share an expert.
    """
    around = _count_around(layer, "layernorm" in layer.forgotten)
    if experts.keeps_nothing:
        return around
    router = experts.number * (3 * 4 + _MASK)
    copies = layer.factor * layer.hidden * experts.copies * experts.shared_by
    width = experts.copies * experts.width
    kept = _hidden_kept(layer, width, experts.hidden_units)
    if "moe_act" in layer.forgotten:
        kept -= layer.factor * width
    shared = Kept(_hidden_kept(layer, experts.shared_width, layer.hidden_units), layer.copy * layer.hidden)
    return Kept(kept, router + copies).plus(shared if experts.shared_width else Kept()).plus(around)


def _count_around(layer: Layer, forgets_result: bool = False) -> Kept:
    """Count the norm's input and result in front of a part of a layer, and the dropout's mask behind it."""
    result = 0 if forgets_result else layer.factor
    return Kept(whole=layer.hidden * (layer.residual + result + layer.mask))


def _scores(layer: Layer, length: int) -> float:
    """Return the bytes of a token's scores, or of the logarithm of its softmax's sum."""
    return (layer.score * length if layer.keeps_scores else _LOG_SUM) * layer.heads
