"""The weight map: how Hugging Face's weights become ours, and ours theirs; one table a family.

Our names are those of checkpoints, where the layers of a stack are one tensor ``[layers, ...]``. A row gives
our name, the shape of one layer's weight, and Hugging Face's names. Joining theirs into ours and splitting
ours into theirs moves numbers and computes none, so that both lose nothing, and turn gradients into gradients
as well. Shapes: ``n`` heads, ``g`` query groups, ``d`` channels of a head, ``h`` hidden, ``f`` feed-forward,
``v`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.config.architecture import Architecture
from slipway.trainer.conversion.huggingface import NO_HEAD_BIAS, family_of

Join = Callable[..., Any]
Split = Callable[[Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Row:
    """The correspondence of one weight of ours with weights of Hugging Face.

    Attributes
    ----------
    ours
        Our name in a checkpoint; None where Hugging Face alone has a weight, which is zero.
    layer
        The place in our stacked tensor; None where ours is not stacked.
    shape
        Of our weight, without the layers, and without padding of the vocabulary.
    theirs
        Hugging Face's names; none where we alone have a weight, which is zero.
    join, split
        Turn theirs into ours, and ours into theirs.
    is_padded
        Whether the first dimension is the vocabulary, which a checkpoint pads.
    copies
        Other names under which megatron-core keeps the same weight.
    scale
        Our weight is theirs times this. The first T5 multiplies what goes into its head by ``h ** -0.5``,
        and our norm before the head holds that factor.
    fold
        Makes ours the weight that Hugging Face's model computes with where it lacks an option of ours.
    """

    ours: str | None
    layer: int | None
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    join: Join
    split: Split
    is_padded: bool = False
    copies: tuple[str, ...] = ()
    scale: float = 1.0
    fold: Callable[[Any], Any] | None = None

    def to_ours(self, *theirs: Any) -> Any:
        """Return our weight, without padding.

        A scaled one has 64 bits: dividing it gives back what was multiplied, whatever the factor is.

        Raises
        ------
        UserError
            If the weight has another shape than the description says, or is not zero and we have none.
        """
        if self.ours is None:
            _check_zero(", ".join(self.theirs), theirs, "our model has no such weight")
            return None
        try:
            weight = self.join(*theirs)
        except (RuntimeError, ValueError):
            weight = None
        if weight is None or tuple(weight.shape) != self.shape:
            shapes = ", ".join(str(list(part.shape)) for part in theirs)
            raise UserError(
                f"{', '.join(self.theirs)}: expected {', '.join(str(list(x)) for x in self.their_shapes)} "
                f"as config.json has it, not {shapes}"
            )
        return weight if self.scale == 1.0 else weight.double() * self.scale

    def to_theirs(self, ours: Any, dtype: Any) -> tuple[Any, ...]:
        """Return Hugging Face's weights.

        Parameters
        ----------
        ours
            Our weight, padded or not; None where we have none.
        dtype
            The type of the result.

        Raises
        ------
        UserError
            If Hugging Face's model has no place for a weight that is not zero.
        """
        if ours is None:
            return self.split(torch.zeros(self.shape, dtype=dtype))
        if self.is_padded:
            ours = ours[: self.shape[0]]
        if not self.theirs:
            _check_zero(str(self.ours), (ours,), NO_HEAD_BIAS)
            return ()
        if self.fold is not None:
            ours = self.fold(ours)
        if self.scale != 1.0:
            ours = ours.double() / self.scale
        return tuple(part.to(dtype) for part in self.split(ours))

    @property
    def their_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of Hugging Face's weights."""
        if not self.theirs:
            return ()
        return tuple(tuple(part.shape) for part in self.split(torch.empty(self.shape, device="meta")))


def rows_of(description: Description) -> Iterator[Row]:
    """Yield the rows of a model, in the order in which Hugging Face's weights are written.

    Raises
    ------
    UserError
        Naming the key that Hugging Face's models have no counterpart of.
    """
    shape, encoder = description.decoder, description.encoder
    family = family_of(shape, encoder)
    size = description.vocabulary.size
    words = _words(size, shape, "embedding.word_embeddings.weight", EMBEDDINGS[family])
    yield words
    if family == "t5":
        assert encoder is not None
        yield from _t5_stack(encoder, "encoder", 1)
        yield from _t5_decoder(shape, size)
        return
    yield from _gpt2(shape) if family == "gpt2" else _llama(shape)
    if not shape.tied_embeddings:
        yield _words(size, shape, "output_layer.weight", "lm_head.weight")


def depths_of(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of layers of each of our stacked tensors, by name."""
    depths: dict[str, int] = {}
    for row in rows:
        if row.ours is not None and row.layer is not None:
            depths[row.ours] = max(depths.get(row.ours, 0), row.layer + 1)
    return depths


EMBEDDINGS: Mapping[str, str] = {
    "gpt2": "transformer.wte.weight",
    "llama": "model.embed_tokens.weight",
    "stablelm": "model.embed_tokens.weight",
    "t5": "shared.weight",
}


def _gpt2(shape: Architecture) -> Iterator[Row]:
    hidden, wide, attention = shape.hidden_size, shape.ffn_hidden_size, _attention_size(shape)
    # Conv1D keeps its matrices as [in, out].
    turned, qkv = (_turned, lambda ours: (_turned(ours),)), _conv_qkv(shape)
    positions, stack = (shape.max_positions, hidden), _Stack(shape, "decoder", "transformer.h")
    yield _plain("embedding.position_embeddings.weight", positions, "transformer.wpe.weight")
    for layer in range(shape.num_layers):
        linear, norm = partial(stack.linear, layer, biased=True), partial(stack.norm, layer)
        yield from norm("self_attention.linear_qkv.layer_norm_", "ln_1")
        yield from linear("self_attention.linear_qkv", ("attn.c_attn",), qkv, (_qkv_size(shape), hidden))
        yield from linear("self_attention.linear_proj", ("attn.c_proj",), turned, (hidden, attention))
        yield from norm("mlp.linear_fc1.layer_norm_", "ln_2")
        yield from linear("mlp.linear_fc1", ("mlp.c_fc",), turned, (wide, hidden))
        yield from linear("mlp.linear_fc2", ("mlp.c_proj",), turned, (hidden, wide))
    yield from _norm(shape, "decoder.final_layernorm.", "transformer.ln_f.")


def _llama(shape: Architecture) -> Iterator[Row]:
    """Yield the rows of a Llama, and of a StableLM, whose norms have biases."""
    hidden, wide, attention = shape.hidden_size, shape.ffn_hidden_size, _attention_size(shape)
    halves = partial(_halved, shape) if shape.rope.interleaved else None
    stack = _Stack(shape, "decoder", "model.layers")
    queries = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    for layer in range(shape.num_layers):
        linear, norm = partial(stack.linear, layer), partial(stack.norm, layer)
        yield from linear(
            "self_attention.linear_qkv", queries, _grouped_qkv(shape), (_qkv_size(shape), hidden), fold=halves
        )
        yield from linear("self_attention.linear_proj", ("self_attn.o_proj",), _SAME, (hidden, attention))
        yield from linear("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), _STACKED, (2 * wide, hidden))
        yield from linear("mlp.linear_fc2", ("mlp.down_proj",), _SAME, (hidden, wide))
        yield from norm("self_attention.linear_qkv.layer_norm_", "input_layernorm")
        yield from norm("mlp.linear_fc1.layer_norm_", "post_attention_layernorm")
    yield from _norm(shape, "decoder.final_layernorm.", "model.norm.")


def _t5_decoder(shape: Architecture, vocabulary: int) -> Iterator[Row]:
    """Yield the decoder's rows, and the head's.

    The first T5 has a tied head and a factor before it. megatron-core's tied head has no factor, and a bias
    unless ``model.tokens_head_bias=False``.
    """
    tied, norm = shape.tied_embeddings, "decoder.final_layernorm.weight"
    for row in _t5_stack(shape, "decoder", 2):
        yield replace(row, scale=shape.hidden_size**-0.5) if tied and row.ours == norm else row
    if shape.head_bias:
        size, copies = (vocabulary,), ("output_layer.bias",)
        zeros = partial(torch.zeros, size)
        yield Row("lm_head.output_layer.bias", None, size, (), zeros, _SAME[1], is_padded=True, copies=copies)
    if not tied:
        head = _words(vocabulary, shape, "lm_head.output_layer.weight", "lm_head.weight")
        yield replace(head, copies=("output_layer.weight",))


def _t5_stack(shape: Architecture, name: str, feed_forward: int) -> Iterator[Row]:
    """Yield one stack's rows; `feed_forward` is the place of that block in Hugging Face's layers."""
    hidden, wide, attention = shape.hidden_size, shape.ffn_hidden_size, _attention_size(shape)
    own, cross, dense = "layer.0.SelfAttention", "layer.1.EncDecAttention", f"layer.{feed_forward}"
    gated = shape.activation.endswith("glu")
    first = tuple(f"{dense}.DenseReluDense.{part}" for part in (("wi_0", "wi_1") if gated else ("wi",)))
    stack = _Stack(shape, name, f"{name}.block")
    for layer in range(shape.num_layers):
        linear, norm = partial(stack.linear, layer), partial(stack.norm, layer)
        queries = tuple(f"{own}.{part}" for part in "qkv")
        yield from linear(
            "self_attention.linear_qkv", queries, _grouped_qkv(shape), (_qkv_size(shape), hidden)
        )
        yield from linear("self_attention.linear_proj", (f"{own}.o",), _SAME, (hidden, attention))
        if layer == 0:
            # Hugging Face has the relative positions in the first layer, for all.
            assert shape.relative is not None
            buckets = (shape.relative.buckets, shape.num_attention_heads)
            their = f"{name}.block.0.{own}.relative_attention_bias.weight"
            yield _plain(f"{name}_relative_pos_emb.relative_attention_bias.weight", buckets, their)
        yield from norm("self_attention.linear_qkv.layer_norm_", "layer.0.layer_norm")
        if name == "decoder":
            keys = tuple(f"{cross}.{part}" for part in "kv")
            yield from linear("cross_attention.linear_q", (f"{cross}.q",), _SAME, (attention, hidden))
            yield from linear("cross_attention.linear_kv", keys, _headed_kv(shape), (2 * attention, hidden))
            yield from linear("cross_attention.linear_proj", (f"{cross}.o",), _SAME, (hidden, attention))
            yield from norm("pre_cross_attn_layernorm.", "layer.1.layer_norm")
        size = (wide * len(first), hidden)
        yield from linear("mlp.linear_fc1", first, _STACKED if gated else _SAME, size)
        yield from linear("mlp.linear_fc2", (f"{dense}.DenseReluDense.wo",), _SAME, (hidden, wide))
        yield from norm("mlp.linear_fc1.layer_norm_", f"{dense}.layer_norm")
    yield from _norm(shape, f"{name}.final_layernorm.", f"{name}.final_layer_norm.")


class _Stack:
    """The rows of a stack's layers; names are relative to a layer."""

    def __init__(self, shape: Architecture, ours: str, theirs: str) -> None:
        self._shape, self._ours, self._theirs = shape, f"{ours}.layers.", theirs

    def linear(
        self,
        layer: int,
        ours: str,
        theirs: tuple[str, ...],
        transform: tuple[Join, Split],
        size: tuple[int, int],
        biased: bool = False,
        fold: Callable[[Any], Any] | None = None,
    ) -> Iterator[Row]:
        """Yield the rows of a matrix ``[out, in]`` and its bias; `biased` if theirs has one in any case."""
        for kind, extent in (("weight", size), ("bias", size[:1])):
            if kind == "bias" and not (biased or self._shape.bias):
                continue
            name = f"{self._ours}{ours}.{kind}"
            names = tuple(f"{self._theirs}.{layer}.{source}.{kind}" for source in theirs)
            row = Row(name, layer, extent, names, *transform, fold=fold)
            yield row if kind == "weight" or self._shape.bias else replace(row, ours=None, layer=None)

    def norm(self, layer: int, ours: str, theirs: str) -> Iterator[Row]:
        """Yield the rows of a norm."""
        for row in _norm(self._shape, f"{self._ours}{ours}", f"{self._theirs}.{layer}.{theirs}."):
            yield replace(row, layer=layer)


def _norm(shape: Architecture, ours: str, theirs: str) -> Iterator[Row]:
    weight = _plain(f"{ours}weight", (shape.hidden_size,), f"{theirs}weight")
    # The sum is rounded as in our forward pass.
    yield replace(weight, fold=_one_plus) if shape.zero_centered_gamma else weight
    if shape.normalization == "LayerNorm":
        yield _plain(f"{ours}bias", (shape.hidden_size,), f"{theirs}bias")


def _plain(ours: str, shape: tuple[int, ...], theirs: str) -> Row:
    return Row(ours, None, shape, (theirs,), *_SAME)


def _words(vocabulary: int, shape: Architecture, ours: str, theirs: str) -> Row:
    return replace(_plain(ours, (vocabulary, shape.hidden_size), theirs), is_padded=True)


def _attention_size(shape: Architecture) -> int:
    return shape.num_attention_heads * shape.kv_channels


def _qkv_size(shape: Architecture) -> int:
    return (shape.num_attention_heads + 2 * shape.num_query_groups) * shape.kv_channels


def _turned(weight: Any) -> Any:
    return weight.t()


def _one_plus(weight: Any) -> Any:
    return 1 + weight


def _grouped(groups: int, sizes: list[int]) -> tuple[Join, Split]:
    """Return the pair for matrices ``[groups * size, h]``, which ours joins group by group."""

    def join(*theirs: Any) -> Any:
        parts = [part.reshape(groups, -1, *part.shape[1:]) for part in theirs]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def split(ours: Any) -> tuple[Any, ...]:
        parts = ours.reshape(groups, sum(sizes), *ours.shape[1:]).split(sizes, dim=1)
        return tuple(part.flatten(0, 1) for part in parts)

    return join, split


def _grouped_qkv(shape: Architecture) -> tuple[Join, Split]:
    """``[n d, h]`` and twice ``[g d, h]``: by group its queries, key and value, ``[(n + 2 g) d, h]``."""
    groups, channels = shape.num_query_groups, shape.kv_channels
    return _grouped(groups, [shape.num_attention_heads // groups * channels, channels, channels])


def _conv_qkv(shape: Architecture) -> tuple[Join, Split]:
    """Return the pair for a Conv1D of all three, ``[h, 3 n d]``, and its bias, ``[3 n d]``."""
    join, split = _grouped_qkv(shape)
    return lambda weight: join(*_turned(weight).chunk(3)), lambda ours: (_turned(torch.cat(split(ours))),)


def _headed_kv(shape: Architecture) -> tuple[Join, Split]:
    """Twice ``[n d, h]``, of cross-attention: head by head its key and its value, ``[2 n d, h]``."""
    return _grouped(shape.num_attention_heads, [shape.kv_channels] * 2)


def _halved(shape: Architecture, ours: Any) -> Any:
    """Order the channels of queries and keys for rotary pairs of one channel of each half.

    Ours are pairs of neighbours with ``model.rotary_interleaved``. Scores are sums over the channels: their
    order is the model's own affair, as long as queries and keys agree.
    """
    groups, channels = shape.num_query_groups, shape.kv_channels
    rows = ours.reshape(groups, -1, channels, *ours.shape[1:])
    turning = rows[:, :-1]
    pairs = torch.cat([turning[:, :, 0::2], turning[:, :, 1::2]], dim=2)
    return torch.cat([pairs, rows[:, -1:]], dim=1).reshape(ours.shape)


# A gated unit's two matrices, the one with the function first: [2 f, h].
_STACKED: tuple[Join, Split] = (lambda gate, up: torch.cat([gate, up]), lambda ours: ours.chunk(2))
_SAME: tuple[Join, Split] = (lambda weight: weight, lambda ours: (ours,))


def _check_zero(name: str, weights: tuple[Any, ...], reason: str) -> None:
    largest = max(float(weight.abs().max()) for weight in weights)
    if largest != 0.0:
        raise UserError(f"{name} is not zero (its largest value is {largest:.3g}): {reason}")
