"""The memory of a GPU at its peak, by pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.preflight.estimates.in_flight import activations_of
from launcher.preflight.estimates.reading import training_of
from launcher.preflight.estimates.split import parameters_of, stages_of
from launcher.preflight.estimates.states import bytes_per_parameter


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What the fullest GPU of a pipeline stage holds at its peak, in bytes.

    `layers` are the transformer layers of the stage; `parameters` those of one GPU. `logits` is what the last
    stage needs for the vocabulary and the loss.
    """

    stage: int
    layers: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def estimate_memory(config: Mapping[str, Any], nodes: int, engine: str) -> tuple[StageMemory, ...] | None:
    """The memory of each pipeline stage, the first one first.

    ``None`` where it cannot be told: a value is missing or wrong, the layout does not fit the nodes, the
    vocabulary is not known, or the tasks have no GPU; nor of a mixture of experts, or of FSDP.
    """
    training = training_of(config, nodes, engine)
    stages = stages_of(training) if training is not None else None
    if training is None or stages is None:
        return None
    each = bytes_per_parameter(training)
    found = []
    for number, (stage, kept) in enumerate(zip(stages, activations_of(training, stages), strict=True)):
        parameters = parameters_of(training.parts, stage).on_rank(training.shape.tensor)
        found.append(
            StageMemory(
                stage=number,
                layers=sum(sum(chunk.layers) for chunk in stage),
                parameters=parameters,
                weights=parameters * each.weight,
                gradients=parameters * each.gradient,
                optimizer=-(-parameters * each.optimizer // each.shared_by),
                activations=kept.activations,
                logits=kept.logits,
            )
        )
    return tuple(found)
