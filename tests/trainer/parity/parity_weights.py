"""The product's weight map, by the names that parameters have in a model."""

from __future__ import annotations

from slipway.trainer.checkpoint.description import describe
from slipway.trainer.config.settings import Settings
from slipway.trainer.conversion.families import rows_of
from slipway.trainer.conversion.weight_map import Row
from slipway.trainer.data.vocabulary import Vocabulary

# A checkpoint names the norms by where Transformer Engine has them.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def rows_by_parameter(settings: Settings, vocabulary: int) -> dict[str, Row]:
    """Return the row of each parameter."""
    description = describe(settings, Vocabulary(vocabulary, 0, "the reference's"), vocabulary)
    return {_parameter(row.ours, row.layer): row for row in rows_of(description) if row.ours is not None}


def _parameter(name: str, layer: int | None) -> str:
    for saved_name, model_name in _NORMS.items():
        name = name.replace(saved_name, model_name)
    return name if layer is None else name.replace(".layers.", f".layers.{layer}.")
