"""The random generators of a rank: what dropout draws from. Data are ordered without them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from slipway.trainer.distributed import RankContext
from slipway.trainer.logs import LOGGER
from slipway.trainer.model.seeding import seed_training


def sharded_generators(rank_context: RankContext) -> ShardedObject:
    """Return this rank's generators as one of the pipeline stages' and tensor-parallel ranks'.

    Ranks that share both, data- and context-parallel ones, hold equal ones (:func:`make_equal`), so that
    their number may change.
    """
    layout = rank_context.layout
    return ShardedObject(
        "random",
        _states(),
        (layout.pipeline, layout.tensor),
        (rank_context.pipeline_rank, rank_context.tensor_rank),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def make_equal(rank_context: RankContext) -> None:
    """Give all data- and context-parallel ranks the generators of the first, should any differ.

    A checkpoint holds one rank's. On GPUs a rank may draw more numbers than another, such as for a kernel
    that it chose otherwise; ending a healthy training would save nothing. Every rank calls this.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    digests = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, _digest(_states()), group=group)
    if len(set(digests)) == 1:
        return
    first: list[Any] = [_states()]
    dist.broadcast_object_list(first, src=dist.get_process_group_ranks(group)[0], group=group)
    restore_generators(first[0], rank_context)
    LOGGER.warning(
        "the random generators of the %d data-parallel ranks differ: all continue with the first rank's, "
        "so that dropout differs from an uninterrupted training",
        len(digests),
    )


def start_anew(seed: int, step: int) -> None:
    """Set the generators from the seed and the completed steps, if no saved state can be continued."""
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    seed_training(int.from_bytes(digest[:7], "big"))


def fits(states: dict[str, Any]) -> bool:
    """Return whether generators are those of this kind of device: a CPU's state is no GPU's."""
    return bool(states["device"].numel() == torch.cuda.get_rng_state().numel())


def restore_generators(states: dict[str, Any], rank_context: RankContext) -> None:
    """Set this rank's generators."""
    torch.set_rng_state(states["cpu"])
    if rank_context.device.type == "cuda":
        torch.cuda.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def _states() -> dict[str, Any]:
    return {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }


def _digest(states: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    named = {"cpu": states["cpu"], "device": states["device"], **states["tracker"]}
    for name, state in sorted(named.items()):
        digest.update(name.encode() + b"\0" + state.cpu().numpy().tobytes())
    return digest.hexdigest()
