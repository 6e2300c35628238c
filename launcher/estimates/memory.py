"""The memory of a GPU at its peak, by pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.estimates.in_flight import activations_of
from launcher.estimates.reading import Training, training_of
from launcher.estimates.split import Chunk, layers_of, parameters_of, stages_of
from launcher.estimates.states import bytes_per_parameter
from launcher.parameters import Size


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
    vocabulary is not known, or the tasks have no GPU; nor of what `reading.uncounted` names.
    """
    training = training_of(config, nodes, engine)
    stages = stages_of(training) if training is not None else None
    if training is None or stages is None:
        return None
    each, tensor = bytes_per_parameter(training), training.shape.tensor
    found = []
    for number, (stage, kept) in enumerate(zip(stages, activations_of(training, stages), strict=True)):
        held = parameters_of(training.parts, stage)
        dense, routed = held.on_rank(tensor), _routed(training, held)
        parameters = dense + routed
        matrices = _matrices(training, stage) if each.quantized else 0
        found.append(
            StageMemory(
                stage=number,
                layers=sum(sum(chunk.layers) for chunk in stage),
                parameters=parameters,
                weights=parameters * each.weight + matrices * each.quantized,
                gradients=parameters * each.gradient,
                optimizer=-(-dense * each.optimizer // each.shared_by)
                + -(-routed * each.optimizer // each.experts_shared_by),
                activations=kept.activations,
                logits=kept.logits,
            )
        )
    return tuple(found)


def _routed(training: Training, size: Size) -> int:
    """Return the parameters of routed experts on one GPU."""
    return size.routed // (training.shape.expert * training.shape.expert_tensor)


def _matrices(training: Training, stage: tuple[Chunk, ...]) -> int:
    """Return the parameters of the layers' matrices on one GPU, which FP8 has copies of."""
    total = Size()
    for chunk in stage:
        for layers, stack in zip(chunk.layers, training.parts.stacks, strict=True):
            total += layers_of(stack, layers, chunk.sparse)
    return total.split // training.shape.tensor + _routed(training, total)
