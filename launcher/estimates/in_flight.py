"""The activations of all micro batches that a pipeline stage has begun and not ended, at its fullest.

Narayanan et al. 2021 (arXiv 2104.04473, section 2.2): in the 1F1B schedule stage i of p (from 0) has begun at
most p - i micro batches. Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2.3): interleaved, the first
stage keeps 1 + (p - 1) / (p v) times the activations of all layers' share, v being the chunks of a stage.
Full recomputing keeps the input of a layer, 2 s b h, instead (table 2), or of several together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from launcher.estimates.activations import (
    Kept,
    Layer,
    kept_by_decoder_layer,
    kept_by_embedding,
    kept_by_layer,
    kept_by_output,
    kept_by_sparse_layer,
    layer_of,
    working_memory,
)
from launcher.estimates.reading import Training
from launcher.estimates.split import Chunk

# The softmax of the logits in fp32, and their gradient in 16 bits; megatron-core's fused loss has a
# second copy in fp32.
_LOGIT = 4
_LOGIT_GRADIENT = 2


class StageActivations(NamedTuple):
    activations: int
    logits: int


class _Recompute(NamedTuple):
    """Full recomputing: `method` uniform or block, of `layers` at a time, or of so many of a chunk."""

    method: str
    layers: int


class _Part(NamedTuple):
    """A stack as its activations go: bytes of one micro batch; `sparse` is a layer with experts."""

    layer: Kept
    sparse: Kept
    input: Kept
    working: Kept
    embedding: Kept
    closing: Kept
    recompute: _Recompute | None


def activations_of(training: Training, stages: tuple[tuple[Chunk, ...], ...]) -> Iterator[StageActivations]:
    """Of each pipeline stage."""
    parts = [_part(training, number) for number in range(len(training.stacks))]
    logits = _logits(training)
    known: dict[tuple[object, ...], StageActivations] = {}
    for number, stage in enumerate(stages):
        in_flight = tuple(sorted(_in_flight(training, number).items()))
        key = (stage, in_flight)
        if key not in known:
            known[key] = _stage(training, parts, stage, dict(in_flight), logits)
        yield known[key]


def _stage(
    training: Training, parts: list[_Part], stage: tuple[Chunk, ...], in_flight: dict[int, int], logits: int
) -> StageActivations:
    kept, working = Kept(), Kept()
    for number, chunk in enumerate(stage):
        kept = kept.plus(_chunk(training, parts, chunk).times(in_flight.get(number, 0)))
        working = max(working, _working(parts, chunk), key=sum)
    tensor, divided = training.shape.tensor, training.sequence_parallel
    has_logits = any(chunk.has_output for chunk in stage)
    # The logits are gone before the layers' gradients are computed.
    extra = working.on_rank(tensor, divided) - (logits if has_logits else 0)
    return StageActivations(round(kept.on_rank(tensor, divided) + max(extra, 0)), logits if has_logits else 0)


def _in_flight(training: Training, stage: int) -> Counter[int]:
    """How many micro batches each chunk of a stage has begun when the first of them goes back."""
    shape, number = training.shape, training.micro_batches
    if shape.virtual is None:
        return Counter({0: min(shape.pipeline - stage, number)})
    # megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches and get_schedule_table.
    begun = 2 * (shape.pipeline - stage - 1) + (shape.virtual - 1) * shape.group + 1
    found: Counter[int] = Counter()
    for start in range(0, number, shape.group):
        size = min(shape.group, number - start)
        for chunk in range(shape.virtual):
            taken = min(size, begun)
            found[chunk] += taken
            begun -= taken
        if begun == 0:
            break
    return found


def _chunk(training: Training, parts: list[_Part], chunk: Chunk) -> Kept:
    """What one micro batch leaves in a chunk."""
    total = Kept()
    for number, (part, layers) in enumerate(zip(parts, chunk.layers, strict=True)):
        if chunk.embeds and layers:
            total = total.plus(part.embedding)
        total = total.plus(_layers(part, layers, chunk.sparse))
        if chunk.closes[number]:
            total = total.plus(part.closing)
    if len(parts) > 1 and chunk.layers[1]:
        # What the encoder found, for the attention of the decoder's layers.
        total = total.plus(parts[0].input)
    if training.engine == "megatron" and training.shape.pipeline > 1 and not chunk.has_output:
        # Our trainer does not free what it has sent to the next stage.
        total = total.plus(parts[-1].input)
    return total


def _layers(part: _Part, layers: int, sparse: int) -> Kept:
    if part.recompute is None:
        return part.layer.times(layers - sparse).plus(part.sparse.times(sparse))
    if part.recompute.method == "uniform":
        return part.input.times(-(-layers // part.recompute.layers))
    again = min(part.recompute.layers, layers)
    # The layers that keep all are the last ones, and those with experts are taken to be.
    kept, kept_sparse = layers - again, min(sparse, layers - again)
    dense = part.layer.times(kept - kept_sparse)
    return part.input.times(again).plus(dense).plus(part.sparse.times(kept_sparse))


def _working(parts: list[_Part], chunk: Chunk) -> Kept:
    """What the backward pass of a layer takes, with what was recomputed for it."""
    found = Kept()
    for part, layers in zip(parts, chunk.layers, strict=True):
        if not layers:
            continue
        needed = part.working
        if part.recompute is not None:
            again = part.recompute.layers if part.recompute.method == "uniform" else 1
            most = part.sparse if chunk.sparse else part.layer
            needed = needed.plus(most.times(min(again, layers)))
        found = max(found, needed, key=sum)
    return found


def _part(training: Training, number: int) -> _Part:
    layer = layer_of(training, training.stacks[number])
    length = training.lengths[number]
    tokens = training.shape.micro * length / training.shape.context
    if number == 0:
        kept = kept_by_layer(layer, length)
    else:
        kept = kept_by_decoder_layer(layer, length, training.lengths[0])
    return _Part(
        layer=kept.times(tokens),
        sparse=kept_by_sparse_layer(layer, length).times(tokens),
        input=Kept(whole=layer.hidden * layer.residual).times(tokens),
        working=working_memory(layer, length).times(tokens),
        embedding=kept_by_embedding(layer).times(tokens),
        closing=kept_by_output(layer).times(tokens),
        recompute=_recompute(training, training.stacks[number].node, layer),
    )


def _recompute(training: Training, node: str, layer: Layer) -> _Recompute | None:
    values = training.values
    if values.raw(f"{node}.activations_checkpoint_granularity") != "full":
        return None
    layers = values.whole(f"{node}.activations_checkpoint_num_layers", 1, least=0) or 0
    if layers == 0:
        return None
    return _Recompute(str(values.raw(f"{node}.activations_checkpoint_method") or "uniform"), layers)


def _logits(training: Training) -> int:
    """The loss of one micro batch: it goes back as soon as it is there."""
    shape, values = training.shape, training.values
    tokens = shape.micro * training.lengths[-1] / shape.context
    width = training.vocabulary / shape.tensor
    half = training.precision != "32"
    fused = values.flag("model.cross_entropy_loss_fusion")
    each = _LOGIT * (2 if fused else 1) + (_LOGIT_GRADIENT if half else 0)
    return round(tokens * (width * each + _deferred(training, width)))


def _deferred(training: Training, width: float) -> float:
    """For each token, what waits until the end of the step for the gradient of the output's weights.

    megatron/core/tensor_parallel/layers.py: the gradients of the logits of so many micro batches, and what
    was multiplied with the weights.
    """
    values = training.values
    if not values.flag("model.defer_embedding_wgrad_compute") or training.shape.pipeline == 1:
        return 0
    limit = values.whole("model.wgrad_deferral_limit", 0, least=0) or training.micro_batches
    hidden = (training.stacks[-1].hidden or 0) / (training.shape.tensor if training.sequence_parallel else 1)
    element = 4 if training.precision == "32" else 2
    return min(limit, training.micro_batches) * element * (width + hidden)
