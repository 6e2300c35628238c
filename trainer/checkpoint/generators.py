"""The random generators of a rank: what dropout draws from. Data are ordered without them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from trainer.distributed import Place
from trainer.model.seeding import seed_training


def sharded_generators(place: Place) -> ShardedObject:
    """Return this rank's generators as one of the pipeline stages' and tensor-parallel ranks'.

    Ranks that share both, data- and context-parallel ones, hold equal ones (:func:`check_equal`), so that
    their number may change.
    """
    layout = place.layout
    return ShardedObject(
        "random",
        _states(),
        (layout.pipeline, layout.tensor),
        (place.pipeline_rank, place.tensor_rank),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def check_equal() -> None:
    """Hold the generators of the data- and context-parallel ranks against each other; every rank calls this.

    Raises
    ------
    RuntimeError
        If they differ: a checkpoint that holds one of them would not continue the training.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    digests = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, _digest(_states()), group=group)
    if len(set(digests)) > 1:
        raise RuntimeError(f"the random generators of the data-parallel ranks differ: {digests}")


def start_anew(seed: int, step: int) -> None:
    """Set the generators where there are none to continue with: from the seed and the completed steps."""
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    seed_training(int.from_bytes(digest[:7], "big"))


def restore_generators(states: dict[str, Any], place: Place) -> None:
    """Set this rank's generators."""
    torch.set_rng_state(states["cpu"])
    if place.device.type == "cuda":
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
