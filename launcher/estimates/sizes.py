"""The model of a job, as far as time and space are counted with it: looked at beforehand."""

from __future__ import annotations

from typing import NamedTuple

from launcher.estimates.countable import is_countable, model_type_of
from launcher.estimates.flops import sample_flops, sample_tokens
from launcher.estimates.values import Values
from launcher.parameters import count_parameters, vocabulary_size


class Sized(NamedTuple):
    """A model whose sizes are all known.

    `vocabulary` is padded. `flops` are the model FLOPs of one sample, forward and backward, and `tokens` what
    it counts as. `has_experts` tells a mixture of experts, `parameters` those of all of them.
    """

    model_type: str
    vocabulary: int
    parameters: int
    flops: int
    tokens: int
    has_experts: bool = False


def sized(values: Values) -> Sized | None:
    """Return a job's model; ``None`` where a size is missing or none, or the vocabulary is not known."""
    model, model_type = values.node("model"), model_type_of(values)
    if model is None or not is_countable(values):
        return None
    vocabulary = vocabulary_size(model)
    if vocabulary is None:
        return None
    return Sized(
        model_type,
        vocabulary,
        count_parameters(model, vocabulary, model_type),
        sample_flops(model, vocabulary, model_type),
        sample_tokens(model, model_type),
        bool(model.get("num_moe_experts")),
    )
