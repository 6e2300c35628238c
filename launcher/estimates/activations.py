"""The activations that a layer keeps for its backward pass.

Korthikanti et al. 2022 (arXiv 2205.05198), section 4: a GPT's layer keeps s b h (34 + 5 a s / h) bytes in 16
bits (equation 1); tensor parallelism divides 24 of the 34 and all of the scores (equation 2), sequence
parallelism the other 10 too (equation 4); what attention computes inside, 5 a s² b, is not kept where it is
recomputed ("selective", equation 6) or never written (Dao et al. 2022, FlashAttention, arXiv 2205.14135).
Here it is counted tensor by tensor, so that other widths, gated MLPs, grouped queries, rotary positions and
absent dropouts have their own numbers. What a mixture of experts and multi-latent attention keep is that of
megatron-core 0.12 to 0.16 (megatron/core/transformer/moe/, multi_latent_attention.py).
"""

from __future__ import annotations

from typing import NamedTuple

from arithmetic.parameters import expert_width
from launcher.estimates.model import has_fused_attention
from launcher.estimates.parallelism import Stack
from launcher.estimates.training import Training
from launcher.estimates.values import Values

# A mask of a dropout; a logarithm of a softmax's sum, in fp32.
_MASK = 1
_LOG_SUM = 4
# megatron-core's probability where the configuration does not say.
_DROPOUT = 0.1


class Kept(NamedTuple):
    """Bytes that tensor parallelism divides, those that only sequence parallelism divides, and the others."""

    split: float = 0
    whole: float = 0
    fixed: float = 0

    def plus(self, other: Kept) -> Kept:
        return Kept(self.split + other.split, self.whole + other.whole, self.fixed + other.fixed)

    def times(self, number: float) -> Kept:
        return Kept(self.split * number, self.whole * number, self.fixed * number)

    def on_rank(self, tensor: int, sequence_parallel: bool) -> float:
        return self.split / tensor + self.whole / (tensor if sequence_parallel else 1) + self.fixed


class Latent(NamedTuple):
    """The widths of multi-latent attention: of the narrow vectors, and of all heads' keys and values.

    `query` is that of the queries' narrow vector, 0 where they have none.
    """

    query: int
    rank: int
    rotated: int
    values: int


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


class Layer(NamedTuple):
    """What a layer's activations depend on; widths are those of all tensor-parallel ranks together.

    `bytes` of an element, `residual` of one of the sum that runs through the layers, `factor` of one that a
    matrix is multiplied with. `score` is what there is of the attention of one token to one other, 0 if it is
    never written; `keeps_scores` whether it is kept. `rotated` are the widths of queries and keys that are
    kept beside what they were rotated from, `angles` is what rotating keeps of the angles, for each token.
    `forgotten` are the parts that selective recomputing computes again, as megatron-core names them.
    """

    hidden: int
    heads: int
    query: int
    keys: int
    hidden_units: int
    inner: int
    bytes: int
    factor: int
    residual: int
    has_dropout: bool
    rotated: int
    angles: float
    score: int
    keeps_scores: bool
    latent: Latent | None = None
    experts: Experts | None = None
    forgotten: frozenset[str] = frozenset()


def layer_of(training: Training, stack: Stack) -> Layer:
    """Read a stack's keys."""
    values, node = training.values, stack.node
    hidden, heads = stack.hidden or 0, stack.heads or 0
    latent = _latent(training, heads)
    head = stack.kv_channels or hidden // heads
    element = 4 if training.precision == "32" else 2
    wide = values.flag(f"{node}.fp32_residual_connection") or not training.has_half_weights
    score = _score(training, node, element)
    query, keys = heads * head, (stack.groups or heads) * head
    if latent is not None:
        head = values.whole("model.qk_pos_emb_head_dim") or 0
        query = keys = heads * ((values.whole("model.qk_head_dim") or 0) + head)
    forgotten = _forgotten(values, node)
    return Layer(
        hidden=hidden,
        heads=heads,
        query=query,
        keys=keys,
        hidden_units=_hidden_units(training, node),
        inner=stack.ffn or 4 * hidden,
        bytes=element,
        factor=1 if training.has_fp8 else element,
        residual=4 if wide else element,
        has_dropout=bool(values.number(f"{node}.hidden_dropout", _DROPOUT)),
        rotated=query + keys if latent is None and _keeps_unrotated(training, node) else 0,
        angles=_angles(training, node, head),
        score=score,
        keeps_scores=score > 0 and "core_attn" not in forgotten,
        latent=latent,
        experts=_experts(training, forgotten),
        forgotten=forgotten,
    )


def _forgotten(values: Values, node: str) -> frozenset[str]:
    """Return what selective recomputing computes again: attention's core, unless it names the parts."""
    if values.raw(f"{node}.activations_checkpoint_granularity") != "selective":
        return frozenset()
    named = values.raw("model.recompute_modules")
    return frozenset(map(str, named)) if isinstance(named, (list, tuple)) else frozenset({"core_attn"})


def _latent(training: Training, heads: int) -> Latent | None:
    values = training.values
    if not values.raw("model.multi_latent_attention"):
        return None
    rank, rotated, value = (
        values.whole(f"model.{name}") or 0 for name in ("kv_lora_rank", "qk_pos_emb_head_dim", "v_head_dim")
    )
    return Latent(values.whole("model.q_lora_rank") or 0, rank, rotated, heads * value)


def _experts(training: Training, forgotten: frozenset[str]) -> Experts | None:
    """Read the keys of a mixture of experts, each of which is as busy as the others.

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
        shared_by=training.shape.expert_tensor,
        width=expert_width(model),
        shared_width=values.whole("model.moe_shared_expert_intermediate_size", 0, least=0) or 0,
        hidden_units=_hidden_units(training, "model") + (0 if _is_fused(values, "model") else 1),
        keeps_nothing="moe" in forgotten or values.flag("model.moe_layer_recompute"),
    )


def _keeps_unrotated(training: Training, node: str) -> bool:
    """Return True if queries, keys and values are kept as they came, in one, beside the rotated ones.

    The values are a part of what came, and keep all of it where attention is PyTorch's or megatron-core's.
    Transformer Engine's makes copies of what is not contiguous (transformer_engine/pytorch/attention/
    dot_product_attention/utils.py, get_qkv_layout), and nobody needs the rest any more.
    """
    values = training.values
    has_engine = training.engine != "megatron" and values.flag("model.transformer_engine")
    return values.raw(f"{node}.position_embedding_type") == "rope" and not has_engine


def _hidden_units(training: Training, node: str) -> int:
    """What an MLP keeps, in times of its width: what goes into its function, and what comes out.

    Of a gated one two halves and their product; without the fused kernel also the half behind the function,
    and in megatron-core 0.16 the other half with its offset.
    """
    activation = str(training.values.raw(f"{node}.activation") or "gelu")
    if not activation.endswith("glu"):
        return 2
    if _is_fused(training.values, node):
        return 3
    return 4 if training.engine == "nemo" else 5


def _is_fused(values: Values, node: str) -> bool:
    """Return True if one kernel computes a gated function; that of experts weighs its result, too.

    Without it the weighing keeps what it weighs (megatron/core/transformer/moe/experts.py).
    """
    activation = str(values.raw(f"{node}.activation") or "gelu")
    gated = activation.endswith("glu") and activation != "reglu"
    return gated and values.flag(f"{node}.bias_activation_fusion", True)


def _angles(training: Training, node: str, head: int) -> float:
    """Cosines and sines of queries and keys, of one micro batch's positions, unless the kernel is fused."""
    values = training.values
    if values.raw(f"{node}.position_embedding_type") != "rope" or values.flag("model.apply_rope_fusion"):
        return 0
    element = 4 if training.precision == "32" else 2
    return (
        4 * element * head * (values.number(f"{node}.rotary_percentage", 1.0) or 1.0) / training.shape.micro
    )


def _score(training: Training, node: str, element: int) -> int:
    """The softmax, and behind a dropout its mask and its result; 0 where a fused kernel writes none.

    megatron-core's own attention computes its softmax in fp32 for our trainer.
    """
    values = training.values
    if has_fused_attention(values, node, training.engine):
        return 0
    dropout = _MASK if values.number(f"{node}.attention_dropout", _DROPOUT) else 0
    if training.engine == "megatron":
        return 4 + element + dropout
    return element + (dropout + element if dropout else 0)


def kept_by_layer(layer: Layer, length: int) -> Kept:
    """A layer of self-attention and an MLP, for each of its tokens, of sequences of some length."""
    return _self_attention(layer, length).plus(_mlp(layer))


def kept_by_sparse_layer(layer: Layer, length: int) -> Kept:
    """Count the same of a layer whose MLP is a mixture of experts."""
    return _self_attention(layer, length).plus(_mixture(layer)) if layer.experts else Kept()


def kept_by_decoder_layer(layer: Layer, length: int, source: int) -> Kept:
    """A layer of a T5's decoder for each of its tokens: it attends to `source` tokens of the encoder too."""
    memory = Kept(split=2 * layer.keys * layer.bytes * source / length)
    queries = Kept(split=2 * layer.query * layer.bytes + _scores(layer, source))
    return kept_by_layer(layer, length).plus(queries).plus(memory).plus(_around(layer))


def kept_by_output(layer: Layer) -> Kept:
    """The last norm and its result, which the output multiplies."""
    return Kept(whole=layer.hidden * (layer.residual + layer.bytes))


def kept_by_embedding(layer: Layer) -> Kept:
    """The mask of its dropout; the sum itself is the first layer's input."""
    return Kept(whole=layer.hidden * _MASK if layer.has_dropout else 0)


def working_memory(layer: Layer, length: int) -> Kept:
    """What the backward pass of a layer has beside what was kept, for each token, by and large.

    The gradients of the MLP's hidden units and of its input and output, which are whole on each rank while it
    multiplies them; or those of the scores, which selective recomputing has to write first.
    """
    inner = layer.hidden_units * layer.inner
    hidden_units = Kept(layer.bytes * inner, 3 * layer.bytes * layer.hidden)
    if layer.experts is not None:
        experts = layer.experts
        of_experts = layer.bytes * experts.hidden_units * experts.copies * experts.width
        sent = 3 * layer.bytes * layer.hidden * experts.copies
        hidden_units = max(hidden_units, Kept(of_experts, sent), key=sum)
    again = 0 if layer.keeps_scores else layer.score
    scores = Kept((again + 2 * layer.bytes) * layer.heads * length) if layer.score else Kept()
    return max(hidden_units, scores, key=sum)


def _self_attention(layer: Layer, length: int) -> Kept:
    """Count queries, keys and values, and the result, of which FP8 keeps a narrow copy, too."""
    if layer.latent is not None:
        return _latent_attention(layer, layer.latent, length)
    result = layer.query * (layer.bytes + _copy(layer))
    split = layer.bytes * (layer.query + 2 * layer.keys + layer.rotated) + result + _scores(layer, length)
    return Kept(split, fixed=layer.angles).plus(_around(layer))


def _latent_attention(layer: Layer, latent: Latent, length: int) -> Kept:
    """Count the narrow vectors, before and behind their norms; queries, keys and values of all heads.

    These are copies of what they are put together from, which is not kept.
    """
    narrow = latent.query + latent.rank
    whole = layer.bytes * (narrow + latent.rotated) + layer.factor * narrow
    result = latent.values * (layer.bytes + _copy(layer))
    heads = layer.bytes * (layer.query + layer.keys + latent.values)
    if "mla_up_proj" in layer.forgotten:
        heads = 0
    split = heads + result + _scores(layer, length)
    return Kept(split, whole, layer.angles).plus(_around(layer, "layernorm" in layer.forgotten))


def _mlp(layer: Layer) -> Kept:
    if "mlp" in layer.forgotten:
        return Kept(whole=layer.hidden * (layer.residual + layer.bytes))
    return Kept(_hidden_kept(layer, layer.inner, layer.hidden_units)).plus(_around(layer))


def _hidden_kept(layer: Layer, width: float, times: int) -> float:
    """Count hidden units, the last of which are what the matrix on the way out is multiplied with."""
    return width * (layer.bytes * (times - 1) + layer.factor)


def _mixture(layer: Layer) -> Kept:
    """Count the router's scores, the copies of a token that experts are given, and the experts' hidden units.

    megatron/core/transformer/moe: the router keeps logits, scores and probabilities in fp32 and a mask. The
    copies are those behind the last permutation, on each of the GPUs that share an expert.
    """
    experts = layer.experts
    assert experts is not None
    around = _around(layer, "layernorm" in layer.forgotten)
    if experts.keeps_nothing:
        return around
    router = experts.number * (3 * 4 + _MASK)
    given = layer.factor * layer.hidden * experts.copies * experts.shared_by
    width = experts.copies * experts.width
    kept = _hidden_kept(layer, width, experts.hidden_units)
    if "moe_act" in layer.forgotten:
        kept -= layer.factor * width
    shared = Kept(_hidden_kept(layer, experts.shared_width, layer.hidden_units), _copy(layer) * layer.hidden)
    return Kept(kept, router + given).plus(shared if experts.shared_width else Kept()).plus(around)


def _around(layer: Layer, forgets_result: bool = False) -> Kept:
    """The norm's input and result in front of a part of a layer, and the dropout's mask behind it."""
    mask = _MASK if layer.has_dropout else 0
    result = 0 if forgets_result else layer.factor
    return Kept(whole=layer.hidden * (layer.residual + result + mask))


def _copy(layer: Layer) -> int:
    """Return the bytes that FP8 keeps beside an element that is needed as it is."""
    return layer.factor if layer.factor < layer.bytes else 0


def _scores(layer: Layer, length: int) -> float:
    """Those of a token, or the logarithm of its softmax's sum."""
    return (layer.score * length if layer.keeps_scores else _LOG_SUM) * layer.heads
