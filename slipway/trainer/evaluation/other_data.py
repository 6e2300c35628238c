"""Differences between an evaluation's data and those of a checkpoint's training. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.marker import Marker
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.data import identity
from slipway.trainer.evaluation.spec import Perplexity


def differences(marker: Marker, settings: Settings, perplexity: Perplexity) -> Iterator[str]:
    """Yield the files and keys that differ; of data that `perplexity` names the tokenizer alone is compared.

    A checkpoint of an earlier version may say nothing of either.
    """
    trained_on, blend = identity.from_json(marker.data), settings.data.heldout
    is_own = perplexity.data_prefix is None
    now = identity.identify_data(settings.data, blend.prefixes if blend and is_own else ())
    yield from map(str, identity.differences(trained_on, now))
    if not is_own:
        return
    # The training's identity is without the data of a split `test` that has its own files.
    if trained_on and (perplexity.split != "test" or settings.data.splits is not None):
        yield from (
            f"{name}: the training had no such data" for name in identity.find_renamed(trained_on, now)[1]
        )
    try:
        before = _windows(read_settings(perplexity.training_keys(marker.configuration)))
    except UserError:
        return  # of another version
    for key, value in _windows(settings).items():
        if before[key] != value:
            yield f"{key}: {before[key]} → {value}"


def _windows(settings: Settings) -> dict[str, Any]:
    """Return what decides which windows of the data are held out, and what counts in them, by the keys."""
    data, blend = settings.data, settings.data.heldout
    weights = blend.weights if blend else None
    return {
        "model.data.data_impl": data.kind,
        "the weights of model.data.data_prefix": weights and [float(weight) for weight in weights],
        "model.data.splits_string": data.splits and [float(share) for share in data.splits],
        "model.encoder_seq_length": settings.seq_length,
        "model.seed": settings.seed,
        "model.data.eod_mask_loss": data.eod_mask_loss,
        "model.data.reset_position_ids": data.reset_positions,
        "model.data.reset_attention_mask": data.reset_attention,
        "the spans of model.data": settings.denoising,
    }
