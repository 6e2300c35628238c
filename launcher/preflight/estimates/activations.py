"""The activations that a layer keeps for its backward pass.

Korthikanti et al. 2022 (arXiv 2205.05198), section 4: a GPT's layer keeps s b h (34 + 5 a s / h) bytes in 16
bits (equation 1); tensor parallelism divides 24 of the 34 and all of the scores (equation 2), sequence
parallelism the other 10 too (equation 4); what attention computes inside, 5 a s² b, is not kept where it is
recomputed ("selective", equation 6) or never written (Dao et al. 2022, FlashAttention, arXiv 2205.14135).
Here it is counted tensor by tensor, so that other widths, gated MLPs, grouped queries, rotary positions and
absent dropouts have their own numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.preflight.estimates.countable import has_fused_attention
from launcher.preflight.estimates.reading import Training
from launcher.preflight.shape import Stack

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


class Layer(NamedTuple):
    """What a layer's activations depend on; widths are those of all tensor-parallel ranks together.

    `bytes` of an element, `residual` of one of the sum that runs through the layers. `score` is what there is
    of the attention of one token to one other, 0 if it is never written; `keeps_scores` whether it is kept.
    `angles` is what rotating keeps of the angles, for each token.
    """

    hidden: int
    heads: int
    query: int
    keys: int
    inner_kept: int
    bytes: int
    residual: int
    has_dropout: bool
    is_rotary: bool
    angles: float
    score: int
    keeps_scores: bool


def layer_of(training: Training, stack: Stack) -> Layer:
    """Read a stack's keys."""
    values, node = training.values, stack.node
    hidden, heads = stack.hidden or 0, stack.heads or 0
    head = stack.kv_channels or hidden // heads
    inner = stack.ffn or 4 * hidden
    element = 4 if training.precision == "32" else 2
    activation = str(values.raw(f"{node}.activation") or "gelu")
    wide = values.flag(f"{node}.fp32_residual_connection") or not training.has_half_weights
    score = _score(training, node, element)
    return Layer(
        hidden=hidden,
        heads=heads,
        query=heads * head,
        keys=(stack.groups or heads) * head,
        inner_kept=inner * _hidden_units(training, node, activation),
        bytes=element,
        residual=4 if wide else element,
        has_dropout=bool(values.number(f"{node}.hidden_dropout", _DROPOUT)),
        is_rotary=values.raw(f"{node}.position_embedding_type") == "rope",
        angles=_angles(training, node, head),
        score=score,
        keeps_scores=score > 0 and values.raw(f"{node}.activations_checkpoint_granularity") != "selective",
    )


def _hidden_units(training: Training, node: str, activation: str) -> int:
    """What an MLP keeps, in times of its width: what goes into its function, and what comes out.

    Of a gated one two halves and their product; without the fused kernel also the half behind the function,
    and in megatron-core 0.16 the other half with its offset.
    """
    if not activation.endswith("glu"):
        return 2
    if training.values.flag(f"{node}.bias_activation_fusion", True) and activation != "reglu":
        return 3
    return 4 if training.engine == "nemo" else 5


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
    hidden_units = Kept(layer.bytes * layer.inner_kept, 3 * layer.bytes * layer.hidden)
    again = 0 if layer.keeps_scores else layer.score
    scores = Kept((again + 2 * layer.bytes) * layer.heads * length) if layer.score else Kept()
    return max(hidden_units, scores, key=sum)


def _self_attention(layer: Layer, length: int) -> Kept:
    """Queries, keys and values, and the result.

    Rotated queries and keys are new tensors, and the values that came with the others keep those too.
    """
    three = layer.query + 2 * layer.keys
    rotated = layer.query + layer.keys if layer.is_rotary else 0
    split = layer.bytes * (three + rotated + layer.query) + _scores(layer, length)
    return Kept(split, fixed=layer.angles).plus(_around(layer))


def _mlp(layer: Layer) -> Kept:
    return Kept(layer.bytes * layer.inner_kept).plus(_around(layer))


def _around(layer: Layer) -> Kept:
    """The norm's input and result in front of a part of a layer, and the dropout's mask behind it."""
    mask = _MASK if layer.has_dropout else 0
    return Kept(whole=layer.hidden * (layer.residual + layer.bytes + mask))


def _scores(layer: Layer, length: int) -> float:
    """Those of a token, or the logarithm of its softmax's sum."""
    return (layer.score * length if layer.keeps_scores else _LOG_SUM) * layer.heads
