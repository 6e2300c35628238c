"""Comparison of a checkpoint's weights and data with the model and the data of now. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipway.arithmetic.interventions import find_rewritten
from slipway.common.errors import UserError
from slipway.trainer.checkpoint.choice import Choice
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.checkpoint.marker import DP_RESHARDABLE, NOT_SHARDED
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.config.architecture import ROWS, Architecture
from slipway.trainer.config.layout import Layout
from slipway.trainer.config.resume import Resume
from slipway.trainer.config.settings import Settings
from slipway.trainer.data import identity
from slipway.trainer.data.identity import Identity
from slipway.trainer.logs import LOGGER

ACCEPT = "resume.accept_data"
_CONTEXT = "context_parallel_size"
_ANEW = "resume.load_optimizer=False takes the weights alone"


def shapes(settings: Settings, vocabulary: int) -> dict[str, Any]:
    """Return the settings that determine the shapes of the weights; `vocabulary` is padded."""
    return _shapes(settings.architecture, settings.encoder, vocabulary, settings.precision)


def shapes_of(description: Description) -> dict[str, Any]:
    """Return the same of a model that is described."""
    model = description
    return _shapes(model.decoder, model.encoder, model.padded_vocabulary, model.precision)


def _shapes(
    decoder: Architecture, encoder: Architecture | None, vocabulary: int, precision: str
) -> dict[str, Any]:
    of_encoder = _select_shapes(encoder) if encoder else {}
    return {
        **_select_shapes(decoder),
        **{f"encoder_{name}": value for name, value in of_encoder.items()},
        "padded_vocabulary": vocabulary,
        "precision": precision,
    }


def check(checkpoint: Checkpoint, shape: Mapping[str, Any], layout: Layout) -> None:
    """Hold a checkpoint against a model; how many ranks share it may differ.

    Raises
    ------
    UserError
        If the checkpoint's weights do not fit the model.
    """
    for name, value in checkpoint.marker.architecture.items():
        if shape.get(name, value) != value:
            raise UserError(
                f"the model has {name}={shape[name]}, but the checkpoint {checkpoint.path} has {value}: "
                f"{_suggest_change(name, value, layout)}, or train into another exp_manager.explicit_log_dir"
            )


def check_shapes(name: str, saved: Mapping[str, Any], description: Description) -> None:
    """Hold the shapes of weights against a model that starts from them; padding and precision may differ.

    Raises
    ------
    UserError
        Naming the key that differs, and the weights as `name`.
    """
    now = shapes_of(description)
    learned = description.decoder.position == "learned_absolute"
    free = ("padded_vocabulary", "precision", *(() if learned else _POSITIONS))
    for item, value in saved.items():
        if item in free or item not in now or now[item] == value:
            continue
        is_encoder = item.startswith("encoder_")
        plain = item.removeprefix("encoder_")
        node = "model.encoder" if is_encoder else "model.decoder" if description.encoder else "model"
        key = ROWS[plain].build_key(node)
        if description.encoder and plain == "tied_embeddings":
            key = "model.share_decoder_tokens_head_embeddings"
        raise UserError(f"{name} has {key}={value}, and the run {now[item]}: expected the same model")
    if (description.encoder is None) != ("encoder_num_layers" not in saved):
        kinds = ("a GPT", "a T5")
        now_t5 = description.encoder is not None
        raise UserError(
            f"{name} is {kinds[not now_t5]}, and the run {kinds[now_t5]}: expected the same model"
        )


_POSITIONS = ("max_positions", "encoder_max_positions")


def function_differences(saved: Description, now: Description) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys with which the same weights compute something else, each with both values."""
    for node, old, new in (("encoder", saved.encoder, now.encoder), ("decoder", saved.decoder, now.decoder)):
        if old is None or new is None:
            continue
        prefix = f"model.{node}" if now.encoder else "model"
        # Without rotary positions their keys change nothing.
        rotary = () if new.position == "rope" else ("rope", "rotary_percentage", "rotary_base")
        for item, row in ROWS.items():
            values = getattr(old, item), getattr(new, item)
            if item == "rope":
                values = replace(values[0], fusion=False), replace(values[1], fusion=False)
            if row.decides == "function" and item not in rotary and values[0] != values[1]:
                yield " or ".join((row.build_key(prefix), *row.also)), *values


def check_optimizer(choice: Choice, form: str, layout: Layout) -> None:
    """Check that the training can load a checkpoint's optimizer states; earlier versions name no format.

    Parameters
    ----------
    choice
        The checkpoint, and whether its optimizer states are loaded at all.
    form
        The format in which the training saves (:mod:`slipway.trainer.checkpoint.marker`).
    layout
        How the training shares the model.

    Raises
    ------
    UserError
        If the training cannot load them: it spreads optimizer states and the checkpoint's are whole, or the
        other way round; or they are in the shards of other parallel sizes.
    """
    saved, path = choice.checkpoint.marker.optimizer, choice.checkpoint.path
    if not choice.load_optimizer or not saved:
        return
    if (saved == NOT_SHARDED) != (form == NOT_SHARDED):
        have, here = ("whole", "spreads them") if saved == NOT_SHARDED else ("spread", "has them whole")
        raise UserError(
            f"the optimizer states of the checkpoint {path} are {have} over the data-parallel ranks"
            f"{'' if have == 'spread' else ' on each of them'}, and this training {here}: "
            f"model.optim.name, or the fused Adam of Transformer Engine or Apex, has changed. {_ANEW}"
        )
    if saved != DP_RESHARDABLE:
        return
    if form != DP_RESHARDABLE:
        raise UserError(explain_other_buckets(choice.checkpoint))
    others = _find_other_sizes(choice.checkpoint, layout).items()
    # Other context-parallel ranks load the same shards.
    if sizes := [f"model.{name}={old}, now {new}" for name, (old, new) in others if name != _CONTEXT]:
        raise UserError(
            f"the checkpoint {path} was saved with other sizes ({', '.join(sizes)}), and its optimizer "
            f"states are in the shards of those: {_reshard(path)}"
        )


def explain_other_buckets(checkpoint: Checkpoint) -> str:
    """Return the refusal of a checkpoint whose optimizer states are in other buckets than now."""
    return (
        f"the optimizer states of the checkpoint {checkpoint.path} are in other buckets than this "
        "training's: model.optim.overlap_grad_sync or the size of its buckets has changed, or there "
        f"are more ranks than a bucket has parts for: {_reshard(checkpoint.path)}"
    )


def check_data(checkpoint: Checkpoint, data: Identity, accepted: str | None) -> None:
    """Compare the data that a checkpoint was trained on with the data of now; a checkpoint may record none.

    Data that the configuration names otherwise are only logged: the user has named them.

    Parameters
    ----------
    accepted
        The digest of the exchange that the user accepts, if any.

    Raises
    ------
    UserError
        If a file of the same name, or the tokenizer, has another content, and that was not accepted.
    """
    trained_on = identity.from_json(checkpoint.marker.data)
    changed = identity.differences(trained_on, data)
    changes = "; ".join(map(str, changed))
    if not identity.accepts(accepted, changed):
        raise UserError(
            f"the checkpoint {checkpoint.path} was trained on other data: {changes}: put the files back, or "
            f"train into another exp_manager.explicit_log_dir; {ACCEPT}={identity.digest(changed)} goes on "
            "with the new ones"
        )
    if changed:
        LOGGER.warning(
            "the data differ from those of %s, accepted with %s=%s: %s",
            checkpoint.path,
            ACCEPT,
            accepted,
            changes,
        )
    old, new = identity.find_renamed(trained_on, data) if trained_on else ([], [])
    if old or new:
        LOGGER.warning("the data changed: %s → %s", ", ".join(old) or "none", ", ".join(new) or "none")


def check_past(checkpoint: Checkpoint, resume: Resume) -> None:
    """Check that an intervention begins after the samples that a checkpoint was trained on.

    Raises
    ------
    UserError
        If the arithmetic on it would not give the samples that were trained on.
    """
    marker, now = checkpoint.marker, resume.record()
    key = find_rewritten(now, marker.resume, marker.consumed_samples)
    if key is not None:
        raise UserError(
            f"resume.{key}={now[key]}: the checkpoint {checkpoint.path} was trained up to sample "
            f"{marker.consumed_samples} with {marker.resume.get(key, [])}: keep that, and begin at "
            "this sample or later; resume.checkpoint goes back to an earlier one"
        )


def is_laid_out_as(checkpoint: Checkpoint, layout: Layout) -> bool:
    """Return whether a checkpoint was written with the same model layout, so that dropout continues."""
    return not _find_other_sizes(checkpoint, layout)


def _find_other_sizes(checkpoint: Checkpoint, layout: Layout) -> dict[str, tuple[int, int]]:
    """Return the parallel sizes that differ, the checkpoint's before the training's."""
    saved = checkpoint.marker
    sizes = {
        "tensor_model_parallel_size": (saved.tensor_model_parallel_size, layout.tensor),
        "pipeline_model_parallel_size": (saved.pipeline_model_parallel_size, layout.pipeline),
        "virtual_pipeline_model_parallel_size": (saved.virtual_pipeline_model_parallel_size, layout.virtual),
        _CONTEXT: (saved.context_parallel_size, layout.context),
    }
    return {name: (old, new) for name, (old, new) in sizes.items() if old != new}


def _reshard(path: Path) -> str:
    return (
        f"`python -m slipway.trainer.checkpoint.reshard {shlex.quote(str(path))}` writes a copy that all "
        f"sizes can load. {_ANEW}"
    )


def _select_shapes(architecture: Architecture) -> dict[str, Any]:
    return {name: value for name, value in asdict(architecture).items() if ROWS[name].decides == "shapes"}


def _suggest_change(name: str, value: Any, layout: Layout) -> str:
    # The padding takes part in the softmax, so that another one is another model.
    if name == "padded_vocabulary" and value % layout.tensor == 0:
        return f"model.make_vocab_size_divisible_by={value // layout.tensor} keeps it"
    return "keep it"
