"""Export of weights of ours: the tensors of a safetensors directory, each read when it is its turn."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.checkpoint.tensor_files import TensorFiles, TensorInfo
from slipway.trainer.conversion.families import rows_of
from slipway.trainer.conversion.safetensors_files import Entry
from slipway.trainer.conversion.sources import Source
from slipway.trainer.conversion.weight_map import Row, depths_of

# The first parts of the names of a megatron-core checkpoint's tensors that are not the model's.
_OTHERS = ("optimizer", "random", "rng_state")
# The masters by the weights' names, in the formats of optimizer states that have them whole.
_MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")
_EXTRA = "_extra_state"


def model_entries(
    weights: TensorFiles, description: Description, dtype: torch.dtype | None, origin: str
) -> list[Entry]:
    """Return the tensors of Hugging Face's model, in its order.

    Parameters
    ----------
    description
        The model that they are of.
    dtype
        The type of the result; None: the one that holds all weights.
    origin
        Where the weights are from, for messages.

    Raises
    ------
    UserError
        If the weights are not those of the description, or Hugging Face has no such model.
    """
    rows = list(rows_of(description))
    infos = weights.tensors()
    _check_fit(rows, infos, description, origin)
    if dtype is None:
        # The first T5's import has a norm in 64 bits, which is one of 32 again in Hugging Face's.
        types = (infos[row.ours].dtype for row in rows if row.ours is not None and row.scale == 1.0)
        dtype = functools.reduce(torch.promote_types, types)
    entries = []
    for row in rows:
        parts = _parts(weights, row, dtype)
        if not row.theirs:
            # It has to be zero.
            next(parts, None)
        for name, shape in zip(row.theirs, row.their_shapes, strict=True):
            entries.append(Entry(name, TensorInfo(shape, dtype), partial(next, parts)))
    return entries


def plain_entries(weights: Source, dtype: torch.dtype | None, is_megatron_core: bool) -> list[Entry]:
    """Return the tensors under the names that they have.

    Parameters
    ----------
    dtype
        The type of floating-point tensors; None: as it is.
    is_megatron_core
        Whether the names are megatron-core's, as ours and Megatron-LM's are: only the model's tensors are
        returned, and 32 bits are those of the optimizer's masters. Of other programs every tensor is.
    """
    infos = weights.tensors()
    has_masters = is_megatron_core and dtype == torch.float32
    return [
        Entry(
            name,
            TensorInfo(info.shape, dtype) if dtype and info.dtype.is_floating_point else info,
            partial(weights.read, _find_most_precise(name, infos) if has_masters else name),
        )
        for name, info in infos.items()
        if not (is_megatron_core and _is_beside_model(name))
    ]


def total_bytes(entries: list[Entry]) -> int:
    """Return the size of all tensors together."""
    return sum(entry.info.size_bytes for entry in entries)


def note_masters(weights: TensorFiles, dtype: torch.dtype | None) -> str | None:
    """Return from where 32-bit weights of a model in 16 bits are taken; None if there is nothing to say."""
    infos = weights.tensors()
    halves = [name for name, info in infos.items() if info.dtype == torch.bfloat16 and not _is_other(name)]
    if dtype != torch.float32 or not halves:
        return None
    if all(_find_most_precise(name, infos) != name for name in halves):
        return "the weights are the optimizer's 32-bit masters"
    return (
        "the weights are the model's, in bf16: the optimizer's masters are not there, or are in the shards "
        "of its ranks (python -m slipway.trainer.checkpoint.reshard writes a copy that has them whole)"
    )


def _parts(weights: TensorFiles, row: Row, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the weights of Hugging Face that one of ours becomes, which is read for the first of them."""
    if row.ours is None:
        yield from row.to_theirs(None, dtype)
        return
    name = _find_most_precise(row.ours, weights.tensors()) if dtype == torch.float32 else row.ours
    ours = weights.read(name, row.layer)
    # Numbers that are only moved are converted while they are written, a block at a time.
    yield from row.to_theirs(ours, ours.dtype if row.scale == 1.0 else dtype)


def _find_most_precise(name: str, infos: Mapping[str, TensorInfo]) -> str:
    """Return the name of a weight's 32-bit master if it has one, or its own."""
    if infos[name].dtype != torch.float32:
        for prefix in _MASTERS:
            master = infos.get(prefix + name)
            if master is not None and master.shape == infos[name].shape and master.dtype == torch.float32:
                return prefix + name
    return name


def _check_fit(
    rows: list[Row], infos: Mapping[str, TensorInfo], description: Description, origin: str
) -> None:
    """Hold the weights against the rows of a model: none is missing, of another shape, or left over."""
    depths = depths_of(rows)
    for row in rows:
        if row.ours is None:
            continue
        info = infos.get(row.ours)
        if info is None:
            raise UserError(
                f"{origin} has no {row.ours}, which a model of its description has: "
                "it is of another architecture"
            )
        shape = row.shape
        if row.is_padded:
            shape = (description.padded_vocabulary, *shape[1:])
        if row.layer is not None:
            shape = (depths[row.ours], *shape)
        if info.shape != shape:
            raise UserError(
                f"{origin}: {row.ours} has the shape {list(info.shape)}, and a model of its description "
                f"{list(shape)}: it is of another architecture or vocabulary"
            )
        if row.is_padded and row.shape[0] > info.shape[0]:
            raise UserError(
                f"{origin}: the tokenizer has {row.shape[0]:,} tokens ({description.vocabulary.origin}), and "
                f"{row.ours} has {info.shape[0]:,}: it is another tokenizer than the model was trained with"
            )
    known = {name for row in rows for name in (row.ours, *row.copies)}
    unknown = [name for name in infos if name not in known and not _is_other(name)]
    if unknown:
        raise UserError(
            f"{origin} has {unknown[0]}, which a model of its description has not: "
            "it is of another architecture"
        )


def _is_other(name: str) -> bool:
    return _is_beside_model(name) or _EXTRA in name


def _is_beside_model(name: str) -> bool:
    return name.partition(".")[0] in _OTHERS
