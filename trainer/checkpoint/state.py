"""Save and restore a training with megatron-core's distributed checkpointing (format ``torch_dist``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import CheckpointException

from trainer.checkpoint import compatible, rng_state
from trainer.checkpoint.async_save import AsyncSave
from trainer.checkpoint.choice import Choice
from trainer.checkpoint.marker import Marker
from trainer.checkpoint.reader import restricted_pickles
from trainer.distributed import RankContext
from trainer.logs import LOGGER
from trainer.model.model import Model

# The distributed optimizer's states by parameter, whatever the layout. dp_reshardable is faster, and what it
# loads is not what it saved: a training continued from it diverges in silence.
_FULLY_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


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
    background: bool,
) -> AsyncSave:
    """Begin to write a checkpoint; every rank calls this.

    Parameters
    ----------
    directory, name
        Where, and under which name.
    model, optimizer, progress
        What is saved; the random generators are as well.
    rank_context
        This process.
    marker
        What is known of the checkpoint beforehand.
    background
        Whether the training goes on while the files are written.

    Returns
    -------
    AsyncSave
        The state is as it was in this moment, whatever the training changes from now on.
    """
    rng_state.make_equal(rank_context)
    state = {
        **_tensors(model, optimizer, is_loading=False),
        "random": rng_state.sharded_generators(rank_context),
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
    }
    return AsyncSave(directory, name, state, marker, rank_context, background)


def restore(choice: Choice, model: Model, optimizer: Any, rank_context: RankContext, seed: int) -> Progress:
    """Load a checkpoint into the model, the optimizer and the random generators; every rank calls this.

    Parameters
    ----------
    choice
        Which, and whether the optimizer's states are taken from it too. The model has to be of its shapes
        (:func:`trainer.checkpoint.compatible.check`).
    model, optimizer
        What is loaded into.
    rank_context
        This process.
    seed
        Where the generators start from if other ranks share the model than did in the checkpoint.
    """
    checkpoint = choice.checkpoint
    targets = _tensors(model, optimizer if choice.load_optimizer else None, is_loading=True)
    continues = compatible.is_laid_out_as(checkpoint, rank_context.layout)
    if continues:
        targets["random"] = rng_state.sharded_generators(rank_context)
    try:
        with restricted_pickles():
            state = dist_checkpointing.load(targets, str(checkpoint.path))
    except CheckpointException as error:
        # It is no Exception, and would be handled as an interrupt.
        raise RuntimeError(f"the checkpoint {checkpoint.path} cannot be read") from error
    model.load_state_dict(state["model"])
    if choice.load_optimizer:
        with torch.no_grad():
            optimizer.load_state_dict(state["optimizer"])
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


def _tensors(model: Model, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    """Return the weights, and an optimizer's states if given, as megatron-core's sharded tensors."""
    weights = model.sharded_state_dict()
    if optimizer is None:
        return {"model": weights}
    states = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_FULLY_RESHARDABLE)
    return {"model": weights, "optimizer": states}
