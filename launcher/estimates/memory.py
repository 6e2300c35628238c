"""The memory of a GPU at its peak, by pipeline stage: parameters, and the micro batches in flight.

Parameters, with gradient and optimizer: Rajbhandari et al. 2020, ZeRO (arXiv:1910.02054, section 3.1 and
figure 1): of each parameter 2 bytes for its weight, 2 for its gradient, and K = 12 for Adam's states in fp32.
Megatron adds gradients up in fp32, so that there are 18 bytes, and 6 + 12 / d with its distributed optimizer
(docs/user-guide/features/dist_optimizer.md there), d being data × context parallel; of a routed expert the
copies of it. With FP8, Transformer Engine keeps of each matrix of a layer a copy in 8 bits and its transpose,
from the first micro batch of a step on (transformer_engine/pytorch/module/linear.py, is_first_microbatch),
unless the weights are in FP8 themselves (NeMo's `fp8_params`): these and their transposes take as much as 16
bits.

Activations of all micro batches that a stage has begun and not ended, at its fullest: Narayanan et al. 2021
(arXiv:2104.04473, section 2.2): in the 1F1B schedule stage i of p (from 0) has begun at most p - i micro
batches. Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.3): interleaved, the first stage keeps
1 + (p - 1) / (p v) times the activations of all layers' share, v being the chunks of a stage. Full
recomputing keeps the input of a layer, 2 s b h, instead (table 2), or of several together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from launcher.estimates.activations import (
    Kept,
    Layer,
    kept_by_embedding,
    kept_by_layer,
    kept_by_output,
    kept_by_sparse_layer,
    working_memory,
)
from launcher.estimates.parallelism import NOTHING, RECOMPUTE, Recompute, Stack, recompute_of
from launcher.estimates.training import (
    DISTRIBUTED,
    HALF,
    Chunk,
    Training,
    layers_of,
    parameters_of,
    stages_of,
    training_of,
)
from launcher.estimates.values import Values
from slipway.arithmetic.parameters import Size

_MASTER = 4
_REMAINDER = 2
# The moments that an optimizer keeps of a parameter, in fp32: two for Adam, and for optimizers without a name
# here.
_ADAM = 8
_MOMENTS = {"sgd": 4, "lion": 4, "adafactor": 0}
# A weight in FP8, and its transpose.
_QUANTIZED = 2
# The softmax of the logits in fp32, and their gradient in 16 bits; megatron-core's fused loss has a
# second copy in fp32. Our trainer has the logits alone, and writes their gradient over them
# (slipway/trainer/model/loss.py).
_LOGIT = 4
_LOGIT_GRADIENT = 2


class StageMemory(NamedTuple):
    """The bytes that the fullest GPU of a pipeline stage holds at its peak.

    `layers` counts the transformer layers of the stage, `parameters` those of one GPU. `logits` are the bytes
    of the last stage for the vocabulary and the loss.
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
        """All of them together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def estimate_memory(config: Mapping[str, Any], nodes: int, engine: str) -> tuple[StageMemory, ...] | None:
    """Return the memory of each pipeline stage, the first one first.

    None where it is unknown: a value is missing or wrong, the layout does not fit the nodes, the vocabulary
    is unknown, the tasks have no GPU, or `training.find_unsupported_feature` names a feature.
    """
    training = training_of(config, nodes, engine)
    stages = stages_of(training) if training is not None else None
    if training is None or stages is None:
        return None
    each, tensor = bytes_per_parameter(training), training.parallel.tensor
    estimates, taught = [], stages_of(training.teacher) if training.teacher else None
    beside = activations_of(training, stages)
    for number, (stage, (activations, logits)) in enumerate(zip(stages, beside, strict=True)):
        held = parameters_of(training.parts, stage)
        dense, routed = held.on_rank(tensor), _count_routed(training, held)
        parameters = dense + routed
        matrices = _matrices(training, stage) if each.quantized else 0
        known = _teacher_bytes(training.teacher, taught[number]) if training.teacher and taught else 0
        estimates.append(
            StageMemory(
                stage=number,
                layers=sum(sum(chunk.layers) for chunk in stage),
                parameters=parameters,
                weights=parameters * each.weight + matrices * each.quantized + known,
                gradients=parameters * each.gradient,
                optimizer=-(-dense * each.optimizer // each.shared_by)
                + -(-routed * each.optimizer // each.experts_shared_by),
                activations=activations,
                logits=logits,
            )
        )
    return tuple(estimates)


def _teacher_bytes(teacher: Training, stage: tuple[Chunk, ...]) -> int:
    """Return the bytes of a teacher's weights on one GPU: frozen, and in the precision of its student."""
    return parameters_of(teacher.parts, stage).on_rank(teacher.parallel.tensor) * teacher.element


def _count_routed(training: Training, size: Size) -> int:
    """Return the parameters of routed experts on one GPU."""
    return size.routed // (training.parallel.expert * training.parallel.expert_tensor)


def _matrices(training: Training, stage: tuple[Chunk, ...]) -> int:
    """Return the parameters of the layers' matrices on one GPU; FP8 keeps copies of them."""
    total = Size()
    for chunk in stage:
        for layers, stack in zip(chunk.layers, training.parts.stacks, strict=True):
            total += layers_of(stack, layers, chunk.sparse)
    return total.split // training.parallel.tensor + _count_routed(training, total)


class ParameterBytes(NamedTuple):
    """Bytes of one parameter on one GPU.

    `shared_by` is the number of GPUs that share the optimizer's, and `experts_shared_by` those of a routed
    expert; `quantized` are the bytes of the FP8 copies of a matrix of a layer.
    """

    weight: int
    gradient: int
    optimizer: int
    shared_by: int
    experts_shared_by: int
    quantized: int


def bytes_per_parameter(training: Training) -> ParameterBytes:
    """Return the bytes that the engine allocates for a parameter."""
    name = str(training.values.raw("model.optim.name") or "")
    parallel, shared_by = training.parallel, (1, 1)
    if name in DISTRIBUTED:
        # The copies of a routed expert: megatron/core/parallel_state.py, expert data parallel.
        experts = max(training.data * parallel.model // parallel.experts, 1)
        shared_by = training.data * parallel.context, experts
    has_copies = training.has_fp8 and not training.values.flag("model.fp8_params")
    others = *shared_by, _QUANTIZED if has_copies else 0
    moments = _MOMENTS.get(name, _ADAM)
    if not training.has_half_weights:
        # NeMo without `megatron_amp_O2` keeps the 16-bit copies that autocast makes until the backward pass.
        copy = 2 if training.precision != "32" else 0
        return ParameterBytes(4 + copy, 4, moments, *others)
    if training.precision == "16" and training.engine != "nemo":
        # Gradients in 16 bits, and again in fp32 with the master weights: megatron/core/optimizer.
        return ParameterBytes(2, 2, 4 + _MASTER + moments, *others)
    gradient = 4
    if training.engine == "nemo" and training.values.raw("model.optim.grad_sync_dtype") in HALF:
        gradient = 2
    master = _MASTER
    if training.engine == "nemo" and name == "distributed_fused_adam" and training.precision == "bf16":
        # Apex keeps the 16 bits by which an fp32 weight differs from a bf16 one (NeMo's
        # megatron_base_model.py: store_param_remainders).
        master = _REMAINDER
    return ParameterBytes(2, gradient, master + moments, *others)


class _Part(NamedTuple):
    """The activations of a stack, in bytes of one micro batch; `sparse` is a layer with experts."""

    recompute: Recompute
    layer: Kept
    sparse: Kept
    input: Kept
    working: Kept
    embedding: Kept
    closing: Kept


def activations_of(training: Training, stages: tuple[tuple[Chunk, ...], ...]) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each pipeline stage that are no parameters': of activations, and of logits."""
    parts = [_part(training, stack) for stack in training.stacks]
    logits = _logits(training)
    known: dict[tuple[object, ...], tuple[int, int]] = {}
    for number, stage in enumerate(stages):
        in_flight = tuple(sorted(_count_in_flight(training, number).items()))
        key = (stage, in_flight)
        if key not in known:
            known[key] = _stage(training, parts, stage, dict(in_flight), logits)
        yield known[key]


def _stage(
    training: Training, parts: list[_Part], stage: tuple[Chunk, ...], in_flight: dict[int, int], logits: int
) -> tuple[int, int]:
    kept, working = Kept(), Kept()
    for number, chunk in enumerate(stage):
        kept = kept.plus(_chunk(training, parts, chunk).times(in_flight.get(number, 0)))
        working = max(working, _working(parts, chunk), key=sum)
    tensor, divided = training.parallel.tensor, training.sequence_parallel
    if not any(chunk.has_output for chunk in stage):
        logits = 0
    # The logits are gone before the layers' gradients are computed.
    extra = working.on_rank(tensor, divided) - logits
    return round(kept.on_rank(tensor, divided) + max(extra, 0)), logits


def _count_in_flight(training: Training, stage: int) -> Counter[int]:
    """Count the micro batches that each chunk of a stage has begun when the first of them goes back."""
    parallel, number = training.parallel, training.micro_batches
    if parallel.virtual is None:
        return Counter({0: min(parallel.pipeline - stage, number)})
    # megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches and get_schedule_table.
    begun = 2 * (parallel.pipeline - stage - 1) + (parallel.virtual - 1) * parallel.group + 1
    counts: Counter[int] = Counter()
    for start in range(0, number, parallel.group):
        size = min(parallel.group, number - start)
        for chunk in range(parallel.virtual):
            taken = min(size, begun)
            counts[chunk] += taken
            begun -= taken
        if begun == 0:
            break
    return counts


def _chunk(training: Training, parts: list[_Part], chunk: Chunk) -> Kept:
    """Return the activations that one micro batch leaves in a chunk."""
    total = Kept()
    for number, (part, layers) in enumerate(zip(parts, chunk.layers, strict=True)):
        if chunk.embeds and layers:
            total = total.plus(part.embedding)
        total = total.plus(_layers(part, layers, chunk.sparse))
        if chunk.closes[number]:
            total = total.plus(part.closing)
    if len(parts) > 1 and chunk.layers[1]:
        # The encoder's output, for the attention of the decoder's layers.
        total = total.plus(parts[0].input)
    if training.engine == "megatron" and training.parallel.pipeline > 1 and not chunk.has_output:
        # Our trainer does not free its output to the next stage.
        total = total.plus(parts[-1].input)
    if training.teacher is not None:
        # A teacher's hidden states come and go with the student's.
        ends = (not chunk.embeds) + (not chunk.has_output)
        total = total.plus(_part(training.teacher, training.teacher.stacks[0]).input.times(ends))
    return total


def _layers(part: _Part, layers: int, sparse: int) -> Kept:
    again = part.recompute.layers or 0
    if part.recompute.method == "uniform":
        return part.input.times(-(-layers // again))
    again = min(again, layers)
    # The layers that keep all are the last ones, and those with experts are taken to be.
    kept, kept_sparse = layers - again, min(sparse, layers - again)
    dense = part.layer.times(kept - kept_sparse)
    return part.input.times(again).plus(dense).plus(part.sparse.times(kept_sparse))


def _working(parts: list[_Part], chunk: Chunk) -> Kept:
    """Return the working memory of a layer's backward pass, with recomputed activations."""
    most = Kept()
    for part, layers in zip(parts, chunk.layers, strict=True):
        if not layers:
            continue
        again = part.recompute.layers or 0
        if part.recompute.method != "uniform":
            again = min(again, 1)
        largest = part.sparse if chunk.sparse else part.layer
        most = max(most, part.working.plus(largest.times(min(again, layers))), key=sum)
    return most


def _part(training: Training, stack: Stack) -> _Part:
    layer = Layer(training, stack)
    tokens = training.parallel.micro * stack.length / training.parallel.context
    by_token = (
        kept_by_layer(layer),
        kept_by_sparse_layer(layer),
        Kept(whole=layer.hidden * layer.residual),
        working_memory(layer),
        kept_by_embedding(layer),
        kept_by_output(layer),
    )
    return _Part(_read_recompute(training.values, stack.node), *(kept.times(tokens) for kept in by_token))


def _read_recompute(values: Values, node: str) -> Recompute:
    """Return the full recomputing of a stack, with the layers that it takes at a time, or of a chunk."""
    recompute = recompute_of(values, node)
    layers = values.whole(f"{node}.{RECOMPUTE}_num_layers", 1, least=0)
    if recompute.granularity != "full" or not layers:
        return NOTHING
    return recompute._replace(method=str(recompute.method or "uniform"), layers=layers)


def _logits(training: Training) -> int:
    """Return the bytes of the loss of one micro batch, which goes back at once."""
    parallel, values = training.parallel, training.values
    tokens = parallel.micro * training.stacks[-1].length / parallel.context
    width = training.vocabulary / parallel.tensor
    half = training.precision != "32"
    fused = values.flag("model.cross_entropy_loss_fusion")
    each = _LOGIT * (2 if fused else 1) + (_LOGIT_GRADIENT if half else 0)
    if training.engine == "megatron":
        each = training.element * (1 if training.teacher is None else 2)
    return round(tokens * (width * each + _count_deferred(training, width)))


def _count_deferred(training: Training, width: float) -> float:
    """Return the bytes of a token that wait until the end of the step for the output's gradient.

    megatron/core/tensor_parallel/layers.py: the gradients of the logits of so many micro batches, and the
    inputs that the weights were multiplied with.
    """
    values = training.values
    if not values.flag("model.defer_embedding_wgrad_compute") or training.parallel.pipeline == 1:
        return 0
    limit = values.whole("model.wgrad_deferral_limit", 0, least=0) or training.micro_batches
    hidden = training.stacks[-1].hidden / (training.parallel.tensor if training.sequence_parallel else 1)
    return min(limit, training.micro_batches) * training.element * (width + hidden)
