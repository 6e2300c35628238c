"""The weights that a training starts from: another checkpoint's, at step 0 with a fresh optimizer.

The rows that pad the vocabulary take part in the softmax. Where the run pads otherwise than the checkpoint,
they are the mean of all tokens' rows: their logit is then the mean of the logits, which is at most
``log(mean(exp(logits)))`` (Jensen), so that the loss rises by no more than ``log(1 + padding / tokens)``.
Zeros, or random rows, would dominate the softmax of a model whose logits are far below 0, as GPT-2's are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slipway.common.errors import UserError
from slipway.trainer.checkpoint import compatible, reader, state, store
from slipway.trainer.checkpoint.choice import check_owners
from slipway.trainer.checkpoint.description import Description, description_from_json
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.config.distillation import TEACHER
from slipway.trainer.config.settings import Settings
from slipway.trainer.conversion.teacher import Teacher, spread_layers
from slipway.trainer.distributed import RankContext, broadcast_from_rank0, run_on_all_ranks
from slipway.trainer.logs import LOGGER
from slipway.trainer.model.model import Model

KEY = "training.restore_from_path"
# The parameters whose first dimension is the vocabulary.
_OF_WORDS = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")


def load(
    path: Path,
    settings: Settings,
    description: Description,
    rank_context: RankContext,
    model: Model,
    optimizer: Any,
) -> Checkpoint:
    """Load weights into a new model and its optimizer's masters; every rank calls this.

    Parameters
    ----------
    path
        A checkpoint, or a directory of checkpoints: its newest complete one.

    Raises
    ------
    UserError
        If there is no complete checkpoint, it is damaged or another user's, or of another model.
    """
    checkpoint = broadcast_from_rank0(lambda: _find(path, settings, description))
    damage = reader.verify(checkpoint, rank_context)
    if damage is not None:
        raise UserError(f"{KEY}={path}: {checkpoint.path} is damaged ({damage})")
    state.load_weights(checkpoint.path, model)
    saved = checkpoint.marker.architecture["padded_vocabulary"]
    if saved != description.padded_vocabulary:
        _pad(model, _read_description(checkpoint, description).vocabulary.size)
    optimizer.reload_model_params()
    if rank_context.is_main:
        LOGGER.info("starting from the weights of %s, at step 0 with a fresh optimizer", checkpoint.path)
    return checkpoint


def take_layers(
    teacher: Teacher, description: Description, rank_context: RankContext, model: Model, optimizer: Any
) -> None:
    """Copy embeddings and layers of a teacher into its new student; every rank calls this.

    Raises
    ------
    UserError
        If their layers are not of one kind.
    """
    name, known = f"{TEACHER}={teacher.path}: the teacher", teacher.description
    saved = {**compatible.shapes_of(known), "num_layers": description.decoder.num_layers}
    compatible.check_shapes(name, saved, description)
    layers = spread_layers(description.decoder.num_layers, known.decoder.num_layers)
    state = model.sharded_state_dict()
    run_on_all_ranks(lambda: teacher.fill(state, layers))
    _pad(model, known.vocabulary.size)
    optimizer.reload_model_params()
    if rank_context.is_main:
        LOGGER.info("starting from the teacher's layers %s", ", ".join(map(str, layers)))


def _find(path: Path, settings: Settings, description: Description) -> Checkpoint:
    try:
        checkpoint = store.open_named(path)
    except UserError as error:
        raise UserError(f"{KEY}={path}: {error}") from None
    check_owners(checkpoint.path, None, settings.resume.trust_owner)
    saved = _read_description(checkpoint, description)
    compatible.check_shapes(f"{KEY}={path}: the checkpoint", checkpoint.marker.architecture, description)
    tokens, words = saved.vocabulary.size, description.vocabulary
    if not words.size <= tokens <= description.padded_vocabulary:
        raise UserError(
            f"{KEY}={path}: the checkpoint has {tokens:,} tokens, and model.tokenizer {words.size:,} "
            f"({words.origin}), padded to {description.padded_vocabulary:,}: expected the tokenizer of the "
            "checkpoint, or model.override_vocab_size"
        )
    for key, old, new in compatible.function_differences(saved, description):
        LOGGER.warning("%s=%s: the checkpoint was trained with %s, and computes otherwise now", key, new, old)
    return checkpoint


def _read_description(checkpoint: Checkpoint, default: Description) -> Description:
    """Return the description of a checkpoint's model, or `default` for a checkpoint of an earlier version."""
    content = checkpoint.marker.model
    return description_from_json(content, str(checkpoint.path)) if content else default


def _pad(model: Model, tokens: int) -> None:
    """Fill the rows behind the tokens with the mean of the tokens' rows."""
    group = parallel_state.get_tensor_model_parallel_group()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        if not name.endswith(_OF_WORDS):
            continue
        own = max(0, min(len(parameter), tokens - rank * len(parameter)))
        with torch.no_grad():
            mean = parameter[:own].double().sum(0) / tokens
            dist.all_reduce(mean, group=group)
            parameter[own:] = mean.to(parameter.dtype)
