"""Save and restore a training with megatron-core's distributed checkpointing (format ``torch_dist``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from slipway.common.errors import UserError
from slipway.trainer.checkpoint import compatible, rng_state
from slipway.trainer.checkpoint.async_save import AsyncSave
from slipway.trainer.checkpoint.bucket_index import distributed_optimizers, has_empty_share, sharded_index
from slipway.trainer.checkpoint.choice import Choice
from slipway.trainer.checkpoint.marker import DP_RESHARDABLE, FULLY_RESHARDABLE, NOT_SHARDED, Marker
from slipway.trainer.checkpoint.reader import restrict_pickles
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.checkpoint.strategies import SaveStrategy, load_strategy
from slipway.trainer.distributed import RankContext, is_any_set, run_on_all_ranks
from slipway.trainer.logs import LOGGER
from slipway.trainer.model.model import Model


@dataclass
class Progress:
    """The progress of a training: completed steps, and the samples consumed by them."""

    step: int = 0
    consumed_samples: int = 0


def save(
    directory: Path,
    name: str,
    model: Model,
    optimizer: Any,
    progress: Progress,
    rank_context: RankContext,
    marker: Marker,
    strategy: SaveStrategy,
    background: bool,
) -> AsyncSave:
    """Begin to write a checkpoint; every rank calls this.

    Parameters
    ----------
    model, optimizer, progress
        The state to save, together with the random generators.
    marker
        The checkpoint's marker; the format of the optimizer's states is filled in.
    background
        Whether the training goes on while the files are written.

    Returns
    -------
    AsyncSave
        It holds the state of this moment; later changes of the training do not reach it.
    """
    rng_state.make_equal(rank_context)
    form = optimizer_format(optimizer, rank_context)
    weights = model.sharded_state_dict()
    index = sharded_index(optimizer, weights) if form == DP_RESHARDABLE else {}
    state = {
        **_tensors(weights, optimizer, form, is_loading=False),
        **({"optimizer_index": index} if index else {}),
        "random": rng_state.sharded_generators(rank_context),
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
    }
    marker = replace(marker, optimizer=form)
    return AsyncSave(directory, name, state, marker, rank_context, strategy, background)


def optimizer_format(optimizer: Any, rank_context: RankContext) -> str:
    """Return the format in which the states of an optimizer are saved; every rank calls this.

    Megatron-LM's default too is ``dp_reshardable`` (checkpointing.py, `_build_sharded_state_dict_metadata`):
    nothing is gathered, and each rank writes its own shards.
    """
    if not distributed_optimizers(optimizer):
        return NOT_SHARDED
    return (
        FULLY_RESHARDABLE if is_any_set(has_empty_share(optimizer), rank_context.device) else DP_RESHARDABLE
    )


def restore(choice: Choice, model: Model, optimizer: Any, rank_context: RankContext, seed: int) -> Progress:
    """Load a checkpoint into the model, the optimizer and the random generators; every rank calls this.

    Parameters
    ----------
    choice
        Which, and whether the optimizer's states are taken from it too. The model has to be of its shapes
        (:func:`slipway.trainer.checkpoint.compatible.check`), and the optimizer of its format.
    seed
        Where the generators start from if other ranks share the model than did in the checkpoint.

    Raises
    ------
    UserError
        If the optimizer's buckets are others than the checkpoint's.
    """
    checkpoint = choice.checkpoint
    targets = _tensors(
        model.sharded_state_dict(),
        optimizer if choice.load_optimizer else None,
        # Earlier versions saved no other.
        checkpoint.marker.optimizer or FULLY_RESHARDABLE,
        is_loading=True,
    )
    if choice.load_optimizer and checkpoint.marker.optimizer == DP_RESHARDABLE:
        run_on_all_ranks(lambda: _check_buckets(checkpoint, targets["optimizer"]))
    continues = compatible.is_laid_out_as(checkpoint, rank_context.layout)
    if continues:
        targets["random"] = rng_state.sharded_generators(rank_context)
    state = _load(checkpoint.path, targets)
    model.load_state_dict(state["model"])
    if choice.load_optimizer:
        with torch.no_grad():
            optimizer.load_state_dict(state["optimizer"])
        if choice.load_optimizer == "masters":
            _reset_moments(optimizer)
    else:
        # The masters, where there are any, come from the weights.
        optimizer.reload_model_params()
    if continues and rng_state.fits(state["random"]):
        rng_state.restore_generators(state["random"], rank_context)
    else:
        rng_state.start_anew(seed, state["step"])
        if rank_context.is_main:
            LOGGER.info(
                "the checkpoint was written %s: dropout does not continue bit by bit",
                "on another kind of device" if continues else "with other parallel sizes",
            )
    return Progress(state["step"], state["consumed_samples"])


def _reset_moments(optimizer: Any) -> None:
    """Set Adam's moments to 0, and the step counts by which their bias is corrected."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                if name in state:
                    state[name].zero_()
        for group in part.optimizer.param_groups:
            # Transformer Engine's and Apex' fused Adam count here.
            if "step" in group:
                group["step"] = 0 * group["step"]


def load_weights(checkpoint: Path, model: Model) -> None:
    """Load the weights alone from a checkpoint's directory into a model; every rank calls this.

    The vocabulary may be padded otherwise: the rows that only the model has are zero then.
    """
    weights = model.sharded_state_dict()
    saved = _index(checkpoint)
    # Transformer Engine's, which weights that were imported have not.
    absent = {
        chunk: [
            name
            for name, item in part.items()
            if isinstance(item, ShardedObject) and item.unique_key not in saved
        ]
        for chunk, part in weights.items()
    }
    wanted = {
        chunk: {name: item for name, item in part.items() if name not in absent[chunk]}
        for chunk, part in weights.items()
    }
    content = _load(checkpoint, {"model": wanted})["model"]
    model.load_state_dict(
        {chunk: {**part, **dict.fromkeys(absent[chunk])} for chunk, part in content.items()}
    )


def _index(checkpoint: Path) -> Any:
    with restrict_pickles():
        return FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata


def _load(checkpoint: Path, targets: dict[str, Any]) -> dict[str, Any]:
    try:
        with restrict_pickles():
            state: dict[str, Any] = dist_checkpointing.load(targets, str(checkpoint), load_strategy())
    except CheckpointException as error:
        # It is no Exception, and would be handled as an interrupt.
        raise RuntimeError(f"the checkpoint {checkpoint} cannot be read") from error
    return state


def _tensors(weights: dict[str, Any], optimizer: Any, form: str, is_loading: bool) -> dict[str, Any]:
    """Return the weights, and an optimizer's states if given, as megatron-core's sharded tensors."""
    if optimizer is None:
        return {"model": weights}
    metadata = {"distrib_optim_sharding_type": form}
    states = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": states}


def _check_buckets(checkpoint: Checkpoint, states: dict[str, Any]) -> None:
    """Hold the buckets of a DistributedOptimizer against those of a checkpoint."""
    saved = _index(checkpoint.path)
    for tensor in nested_values(states):
        if isinstance(tensor, ShardedTensor):
            size = getattr(saved.get(tensor.key), "size", None)
            if size != torch.Size(tensor.global_shape):
                raise UserError(compatible.explain_other_buckets(checkpoint))
