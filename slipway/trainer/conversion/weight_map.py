"""The weight map: how Hugging Face's weights become ours, and ours theirs.

Each family of models defines its rows (:mod:`slipway.trainer.conversion.families`).

Our names are those of checkpoints, where the layers of a stack are one tensor ``[layers, ...]``. A row gives
our name, the shape of one layer's weight, and Hugging Face's names. Joining theirs into ours and splitting
ours into theirs moves numbers and computes none, so that both lose nothing, and turn gradients into gradients
as well. Shapes: ``n`` heads, ``g`` query groups, ``d`` channels of a head, ``h`` hidden, ``f`` feed-forward,
``v`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer.config.architecture import Architecture

Join = Callable[..., Any]
Split = Callable[[Any], tuple[Any, ...]]
Transform = tuple[Join, Split]

NO_HEAD_BIAS = (
    "Hugging Face's T5 has no such bias, and without it the model would be another one; "
    "model.tokens_head_bias=False trains a model without it"
)


@dataclass(frozen=True)
class Row:
    """The correspondence of one weight of ours with weights of Hugging Face.

    Attributes
    ----------
    ours
        Our name in a checkpoint; None where Hugging Face alone has a weight, which is zero.
    shape
        Of our weight, without the layers, and without padding of the vocabulary.
    theirs
        Hugging Face's names; none where we alone have a weight, which is zero.
    join, split
        Turn theirs into ours, and ours into theirs.
    layer
        The place in our stacked tensor; None where ours is not stacked.
    is_padded
        Whether the first dimension is the vocabulary, which a checkpoint pads.
    copies
        Other names under which megatron-core keeps the same weight.
    scale
        Our weight is theirs times this. The first T5 multiplies the input of its head by ``h ** -0.5``,
        and our norm before the head holds that factor.
    fold
        Changes our weight so that Hugging Face's model, without an option of ours, computes the same.
    """

    ours: str | None
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    join: Join
    split: Split
    layer: int | None = None
    is_padded: bool = False
    copies: tuple[str, ...] = ()
    scale: float = 1.0
    fold: Callable[[Any], Any] | None = None

    def to_ours(self, *theirs: Any) -> Any:
        """Return our weight, without padding.

        A scaled one has 64 bits: dividing it gives back the original weight, for any factor.

        Raises
        ------
        UserError
            If the weight has another shape than the description says, or is not in our model and not zero.
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
            Our weight, padded or not; None where our model does not have it.

        Raises
        ------
        UserError
            If Hugging Face's model has no place for a weight that is not zero.
        """
        if ours is None:
            import torch

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
        import torch

        if not self.theirs:
            return ()
        return tuple(tuple(part.shape) for part in self.split(torch.empty(self.shape, device="meta")))


def depths_of(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of layers of each of our stacked tensors, by name."""
    depths: dict[str, int] = {}
    for row in rows:
        if row.ours is not None and row.layer is not None:
            depths[row.ours] = max(depths.get(row.ours, 0), row.layer + 1)
    return depths


# A gated unit's two matrices, the one with the function first: [2 f, h].
_STACKED: Transform = (lambda gate, up: _cat([gate, up]), lambda ours: ours.chunk(2))
SAME: Transform = (lambda weight: weight, lambda ours: (ours,))
# Conv1D keeps its matrices as [in, out].
_TURNED: Transform = (lambda weight: weight.t(), lambda ours: (ours.t(),))


@dataclass(frozen=True)
class StackNames:
    """Hugging Face's names of a stack's weights.

    Attributes
    ----------
    layers, final_norm
        Those of the list of layers, and of the norm behind them.
    layer
        Those of a layer's parts, by ours: a norm, or the matrices that ours is joined of.
    is_conv
        Whether the matrices are of Conv1D, which keeps them as ``[in, out]`` and always has a bias.
    """

    layers: str
    layer: Mapping[str, tuple[str, ...]]
    final_norm: str
    is_conv: bool = False


def stack_rows(shape: Architecture, ours: str, names: StackNames) -> Iterator[Row]:
    """Yield the rows of a stack, which is called `ours`."""
    for layer in range(shape.num_layers):
        for part, theirs in names.layer.items():
            name, prefix = f"{ours}.layers.{part}", f"{names.layers}.{layer}."
            if part.endswith(("norm_", "norm.")):
                rows = _norm(shape, name, prefix + theirs[0])
            else:
                rows = _linear(shape, name, tuple(prefix + matrix for matrix in theirs), names.is_conv)
            for row in rows:
                yield row if row.ours is None else replace(row, layer=layer)
    yield from _norm(shape, f"{ours}.final_layernorm.", names.final_norm)


def _norm(shape: Architecture, ours: str, theirs: str) -> Iterator[Row]:
    weight = plain_row(f"{ours}weight", (shape.hidden_size,), f"{theirs}.weight")
    # The sum is rounded as in our forward pass.
    yield replace(weight, fold=_one_plus) if shape.zero_centered_gamma else weight
    if shape.normalization == "LayerNorm":
        yield plain_row(f"{ours}bias", (shape.hidden_size,), f"{theirs}.bias")


def _linear(shape: Architecture, ours: str, theirs: tuple[str, ...], is_conv: bool) -> Iterator[Row]:
    """Yield the rows of a matrix ``[out, in]`` and its bias."""
    kind = ours.rpartition(".")[2]
    is_qkv, size = kind == "linear_qkv", _sizes(shape)[kind]
    transform = _TURNED if is_conv else SAME
    if is_qkv:
        transform = _conv_qkv(shape) if is_conv else _group_qkv(shape)
    elif len(theirs) > 1:
        transform = _group_kv_by_head(shape) if kind == "linear_kv" else _STACKED
    is_interleaved = is_qkv and shape.position == "rope" and shape.rope.interleaved
    fold = partial(_order_by_halves, shape) if is_interleaved else None
    for part, extent in (("weight", size), ("bias", size[:1])):
        names = tuple(f"{name}.{part}" for name in theirs)
        if part == "weight" or shape.bias or (is_qkv and shape.qkv_bias):
            yield Row(f"{ours}.{part}", extent, names, *transform, fold=fold)
        elif is_conv:
            yield Row(None, extent, names, *transform)


def plain_row(ours: str, shape: tuple[int, ...], theirs: str) -> Row:
    """Return the row of a weight that is the same in both."""
    return Row(ours, shape, (theirs,), *SAME)


def words_row(vocabulary: int, shape: Architecture, ours: str, theirs: str) -> Row:
    """Return the row of a matrix with a row for each token."""
    return replace(plain_row(ours, (vocabulary, shape.hidden_size), theirs), is_padded=True)


def _sizes(shape: Architecture) -> dict[str, tuple[int, int]]:
    """Return the sizes of our matrices, ``[out, in]``."""
    hidden, wide = shape.hidden_size, shape.ffn_hidden_size
    attention, groups = shape.num_attention_heads * shape.kv_channels, shape.num_query_groups
    return {
        "linear_qkv": (attention + 2 * groups * shape.kv_channels, hidden),
        "linear_q": (attention, hidden),
        "linear_kv": (2 * attention, hidden),
        "linear_proj": (hidden, attention),
        "linear_fc1": (wide * (2 if shape.activation.endswith("glu") else 1), hidden),
        "linear_fc2": (hidden, wide),
    }


def _cat(parts: Sequence[Any], dim: int = 0) -> Any:
    # Not at the top: mistakes in a configuration are reported where torch is not installed.
    import torch

    return torch.cat(tuple(parts), dim=dim)


def _one_plus(weight: Any) -> Any:
    return 1 + weight


def _group(groups: int, sizes: list[int]) -> Transform:
    """Return the pair for matrices ``[groups * size, h]``, which ours joins group by group."""

    def join(*theirs: Any) -> Any:
        return _cat([part.reshape(groups, -1, *part.shape[1:]) for part in theirs], 1).flatten(0, 1)

    def split(ours: Any) -> tuple[Any, ...]:
        parts = ours.reshape(groups, sum(sizes), *ours.shape[1:]).split(sizes, dim=1)
        return tuple(part.flatten(0, 1) for part in parts)

    return join, split


def _group_qkv(shape: Architecture) -> Transform:
    """``[n d, h]`` and twice ``[g d, h]``: by group its queries, key and value, ``[(n + 2 g) d, h]``."""
    groups, channels = shape.num_query_groups, shape.kv_channels
    return _group(groups, [shape.num_attention_heads // groups * channels, channels, channels])


def _conv_qkv(shape: Architecture) -> Transform:
    """Return the pair for a Conv1D of all three, ``[h, 3 n d]``, and its bias, ``[3 n d]``."""
    join, split = _group_qkv(shape)
    return lambda weight: join(*weight.t().chunk(3)), lambda ours: (_cat(split(ours)).t(),)


def _group_kv_by_head(shape: Architecture) -> Transform:
    """Twice ``[n d, h]``, of cross-attention: head by head its key and its value, ``[2 n d, h]``."""
    return _group(shape.num_attention_heads, [shape.kv_channels] * 2)


def _order_by_halves(shape: Architecture, ours: Any) -> Any:
    """Order the channels of queries and keys for rotary pairs of one channel of each half.

    Ours are pairs of neighbours with ``model.rotary_interleaved``. Scores are sums over the channels: their
    order is the model's own affair, as long as queries and keys agree.
    """
    groups, channels = shape.num_query_groups, shape.kv_channels
    rows = ours.reshape(groups, -1, channels, *ours.shape[1:])
    turning = rows[:, :-1]
    pairs = _cat([turning[:, :, 0::2], turning[:, :, 1::2]], 2)
    return _cat([pairs, rows[:, -1:]], 1).reshape(ours.shape)


def _check_zero(name: str, weights: tuple[Any, ...], reason: str) -> None:
    largest = max(float(weight.abs().max()) for weight in weights)
    if largest != 0.0:
        raise UserError(f"{name} is not zero (its largest value is {largest:.3g}): {reason}")
