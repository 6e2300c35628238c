"""Save and restore a training with megatron-core's distributed checkpointing (format ``torch_dist``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import CheckpointException

from trainer.checkpoint import generators, store
from trainer.checkpoint.marker import Marker
from trainer.checkpoint.writer import make_strategy
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
    directory: Path, name: str, model: Any, optimizer: Any, progress: Progress, place: Place, marker: Marker
) -> store.Found:
    """Write a checkpoint; every rank calls this.

    Parameters
    ----------
    directory, name
        Where, and under which name.
    model, optimizer, progress
        What is saved; the random generators are as well.
    place
        This process.
    marker
        What is known of the checkpoint beforehand; its files and its serial are filled in.

    Returns
    -------
    Found
        The complete checkpoint. Until it is complete it lies under a hidden name without a marker.
    """
    generators.check_equal()
    unfinished = from_main(lambda: store.begin(directory, name))
    state = _state(model, optimizer, progress, place, False)
    with _as_exception(f"the checkpoint {unfinished} cannot be written"):
        dist_checkpointing.save(state, str(unfinished), make_strategy())
    # A barrier too: nobody returns before every rank's files are on disk.
    parts: list[dict[str, int]] = [{}] * place.layout.world
    dist.all_gather_object(parts, store.sync_part(unfinished, place.world.rank))
    files = {name: size for part in parts for name, size in part.items()}
    return from_main(lambda: store.finish(unfinished, name, replace(marker, files=files)))


def restore(found: store.Found, model: Any, optimizer: Any, place: Place, shape: dict[str, Any]) -> Progress:
    """Load a checkpoint into the model, the optimizer and the random generators.

    Raises
    ------
    UserError
        If the model or the tensor-parallel size is not the checkpoint's.
    """
    _check(found, place, shape)
    with _as_exception(f"the checkpoint {found.path} cannot be read"):
        state = dist_checkpointing.load(_state(model, optimizer, Progress(), place, True), str(found.path))
    model.module.load_state_dict(state["model"])
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    generators.restore_generators(state["random"], place)
    return Progress(state["step"], state["consumed_samples"])


@contextlib.contextmanager
def _as_exception(message: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which is no Exception and would be handled as an interrupt."""
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(message) from error


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
        "random": generators.sharded_generators(place),
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
    }
