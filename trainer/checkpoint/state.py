"""Save and restore a training with megatron-core's distributed checkpointing (format ``torch_dist``)."""

from __future__ import annotations

import queue
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from trainer.checkpoint import store
from trainer.config.architecture import Architecture
from trainer.distributed import Place, from_main
from trainer.errors import UserError

# What the weights' shapes depend on; dropout, fusions and recomputing may change between launches.
_SHAPES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_positions",
    "position",
    "activation",
    "normalization",
    "zero_centered_gamma",
    "bias",
    "tied_embeddings",
)
_FULLY_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass
class Progress:
    """How far the training has come: completed steps and samples consumed by them."""

    step: int = 0
    consumed_samples: int = 0


def shapes(architecture: Architecture, vocabulary: int, precision: str) -> dict[str, Any]:
    """Return what a checkpoint's weights depend on."""
    chosen = {name: value for name, value in asdict(architecture).items() if name in _SHAPES}
    return {**chosen, "padded_vocabulary": vocabulary, "precision": precision}


def save(
    directory: Path,
    name: str,
    model: Any,
    optimizer: Any,
    progress: Progress,
    place: Place,
    shape: dict[str, Any],
) -> Path:
    """Write a checkpoint; every rank calls this.

    Returns
    -------
    Path
        The complete checkpoint. Until it is complete it lies under a hidden name without a marker.
    """
    unfinished = from_main(lambda: store.begin(directory, name))
    # megatron-core would keep a server process for this queue, which outlives a killed rank and holds its
    # stdout open. Saving is synchronous here: the queue never leaves this process.
    filesystem_async._results_queue = queue.Queue()
    # One writer process per rank: each is a fork of this one, and storage is slower than one core.
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(_state(model, optimizer, progress, place, False), str(unfinished), strategy)
    dist.barrier()
    marker = store.Marker(
        step=progress.step,
        consumed_samples=progress.consumed_samples,
        world_size=place.layout.world,
        tensor_model_parallel_size=place.layout.tensor,
        pipeline_model_parallel_size=1,
        architecture=shape,
    )
    return from_main(lambda: store.finish(unfinished, marker))


def restore(found: store.Found, model: Any, optimizer: Any, place: Place, shape: dict[str, Any]) -> Progress:
    """Load a checkpoint into the model, the optimizer and the random generators.

    Raises
    ------
    UserError
        If the model or the tensor-parallel size is not the checkpoint's.
    """
    _check(found, place, shape)
    state = dist_checkpointing.load(_state(model, optimizer, Progress(), place, True), str(found.path))
    model.module.load_state_dict(state["model"])
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    _restore_random(state["random"], place)
    return Progress(state["step"], state["consumed_samples"])


def _check(found: store.Found, place: Place, shape: dict[str, Any]) -> None:
    saved = found.marker
    way_out = "keep it, or train into another exp_manager.explicit_log_dir"
    if saved.tensor_model_parallel_size != place.layout.tensor:
        raise UserError(
            f"model.tensor_model_parallel_size={place.layout.tensor}, but the checkpoint {found.path} was "
            f"written with {saved.tensor_model_parallel_size}: {way_out}"
        )
    for name, value in saved.architecture.items():
        if shape.get(name, value) != value:
            raise UserError(
                f"the model has {name}={shape[name]}, but the checkpoint {found.path} has {value}: {way_out}"
            )


def _state(model: Any, optimizer: Any, progress: Progress, place: Place, is_loading: bool) -> dict[str, Any]:
    weights = model.module.sharded_state_dict()
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=_FULLY_RESHARDABLE
        ),
        "random": _random_state(place),
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
    }


def _random_state(place: Place) -> ShardedObject:
    """Return this rank's generators; data-parallel ranks hold equal ones, so that their number may change."""
    states = {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }
    return ShardedObject(
        "random", states, (place.layout.tensor,), (place.tensor_rank,), replica_id=place.data_rank
    )


def _restore_random(states: dict[str, Any], place: Place) -> None:
    torch.set_rng_state(states["cpu"])
    if place.device.type == "cuda":
        torch.cuda.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(states["tracker"])
