"""The index of the optimizer's buckets: the place of each part of a weight.

In the format ``dp_reshardable`` megatron-core stores masters and moments as its DistributedOptimizer holds
them: weights of a tensor- and pipeline-parallel rank flattened one behind the other, with padding. The index
lets :mod:`slipway.trainer.checkpoint.reshard` find each weight without the model, and without
megatron-core, which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

# Where megatron-core puts the states of DistributedOptimizers, and how the key of an index ends.
SHARDED = "optimizer.distributed."
INDEX = "weights_in_buckets"


class Piece(NamedTuple):
    """A contiguous piece of a bucket, and its place in a whole weight.

    Attributes
    ----------
    bucket
        The name of the bucket's tensors in the checkpoint, less `.param`, `.exp_avg` and `.exp_avg_sq`.
    start
        The first element in the bucket.
    weight
        The name of the weight.
    whole
        The shape of the whole weight.
    offset, shape
        The part of it, as many axes as `whole` has.
    """

    bucket: str
    start: int
    weight: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """Return the DistributedOptimizers in megatron-core's chain; none if states are whole on each rank."""
    from megatron.core.optimizer import DistributedOptimizer

    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(part, DistributedOptimizer)]


def has_empty_share(optimizer: Any) -> bool:
    """Return whether this rank updates nothing of some bucket, which megatron-core cannot save as it is.

    Buckets are padded to a multiple of the ranks: of a small one the last ranks may have the padding alone.
    """
    return any(
        not share["param_map"]
        for part in distributed_optimizers(optimizer)
        for buffer in part.gbuf_ranges
        for shares in buffer.values()
        for share in shares
    )


def sharded_index(optimizer: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the index of each DistributedOptimizer as a checkpoint holds it: a list of tuples of a piece.

    Parameters
    ----------
    weights
        The model's sharded state, before any replica is reassigned.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return {
        str(number): ShardedObject(
            f"{_prefix(part)}.{INDEX}",
            [tuple(piece) for piece in _pieces(part, weights)],
            (1,),
            (0,),
            replica_id=part.data_parallel_group.rank(),
        )
        for number, part in enumerate(distributed_optimizers(optimizer))
    }


def _prefix(part: Any) -> str:
    return f"{SHARDED}dp_group_idx_{part.data_parallel_group_idx}"


def _pieces(part: Any, weights: dict[str, Any]) -> Iterator[Piece]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded, _ = extract_sharded_tensors_and_factories(weights)
    of_parameter = {item.data: item for item in nested_values(sharded)}
    for number, buffer in enumerate(part.buffers):
        (dtype,) = part.gbuf_ranges[number]
        for parameter, (start, _, bucket) in buffer.param_index_map.items():
            name = f"{_prefix(part)}.gbuf_idx_{number}.dtype_{dtype}.bucket_idx_{bucket}"
            begin = start - buffer.buckets[bucket].offset
            item = of_parameter[parameter]
            # A gated MLP's matrix is two of the checkpoint's, one behind the other.
            parts = nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item]
            for tensor in parts:
                if is_main_replica(tensor.replica_id):
                    yield Piece(
                        name,
                        begin + tensor.data.storage_offset() - parameter.storage_offset(),
                        tensor.key,
                        tuple(map(int, tensor.global_shape)),
                        tuple(map(int, tensor.global_offset)),
                        (1,) * tensor.prepend_axis_num + tuple(map(int, tensor.local_shape)),
                    )
