"""The time of a step in one layout, on one type of GPU, which `check` prints and `suggest` ranks by.

The model counts matrix products, with their tiles; the core of attention; other reads and writes of memory;
the communication of tensor, context, pipeline and data parallel that GPUs wait for; recomputing; the slowest
pipeline stage, and its bubble; the optimizer. docs/suggest.md has the formulas, their sources and their
comparison with published times; the constants are in `launcher/attained.json`.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from launcher.attained import Attained
from launcher.estimates.parallelism import COUNTED_ENDS, OWN_ENDS, Layout, Stack, stacks_of
from launcher.estimates.training import (
    DISTRIBUTED,
    HALF,
    has_fused_attention,
    model_type_of,
    read_countable_model,
    teacher_of,
)
from launcher.estimates.values import Values
from slipway.arithmetic.gpus import Gpu
from slipway.arithmetic.layout import ParallelConfig
from slipway.arithmetic.parameters import count_parameters, vocabulary_size

# GPUs without a published network get that of the A100's machines, 200 Gbit/s for each.
_NETWORK = 25e9
# PCIe 4.0 × 16, for GPUs without NVLink.
_PCIE = 32e9
# The two products of attention's core are five in its backward pass, as a fused kernel computes the scores
# once more: Dao 2023 (arXiv 2307.08691), section 4.1.
_FUSED_BACKWARD = 2.5
# Reads and writes of an optimizer, by parameter: its gradient, a master copy, two moments, and the weight.
_OPTIMIZER_BYTES = 30
# Reads and writes of our trainer without Transformer Engine for each micro batch, by parameter: a gradient in
# 16 bits is added to the one in fp32 (megatron/core/distributed/distributed_data_parallel.py).
_ADDED_BYTES = 10
# Reads and writes of the loss, by logit; of our trainer slipway/trainer/model/loss.py.
_LOSS_BYTES = {"nemo": 16, "megatron_lm": 16, "megatron": 6}
# From here on a T5's vocabulary is that of mT5.
_LARGE_VOCABULARY = 200_000
# Features without a known step time, by their usual names.
NOT_TIMED = {
    "model.num_moe_experts": "how long experts take is not estimated",
    "model.multi_latent_attention": "how long multi-latent attention takes is not estimated",
    "model.window_size": "how long attention to a sliding window takes is not estimated",
}
# The size of a vocabulary with an unknown tokenizer.
_VOCABULARY = 50_304


class ModelWork(NamedTuple):
    """A model, and the properties of its run that the speed of a step depends on.

    `gradient_bytes` are those of a gradient that is sent; with `shares_optimizer` data parallel ranks share
    the optimizer. `own_ends` are the configured layers of the first and the last stage; `counted_ends` are
    True where the embedding and the loss count as a layer. `overlaps_*` is communication that the
    configuration overlaps with computing. `is_plain` is our trainer without Transformer Engine; with
    `compiles` it compiles whole layers where the layout allows it. The `teacher` only computes forward.
    """

    stacks: tuple[Stack, ...]
    vocabulary: int
    parameters: int
    devices: int
    engine: str
    family: str
    flash: bool
    fp8: bool
    gradient_bytes: int
    shares_optimizer: bool
    own_ends: tuple[int | None, int | None]
    counted_ends: tuple[bool, bool]
    overlaps_tensor: bool
    overlaps_pipeline: bool
    overlaps_data: bool
    is_plain: bool
    compiles: bool
    teacher: Stack | None = None

    def stages(self, stack: Stack, pipeline: int) -> int:
        """Return the pipeline stages of a stack: a T5's encoder has the first half of them."""
        if len(self.stacks) == 1 or pipeline == 1:
            return pipeline
        return pipeline // 2 if stack is self.stacks[0] else pipeline - pipeline // 2


def work_of(values: Values, devices: int, engine: str) -> ModelWork | None:
    """Return the work of a job's model; None if one of its sizes is unknown, or it cannot be timed."""
    model, stacks, family = read_countable_model(values), tuple(stacks_of(values)), model_type_of(values)
    if model is None or values.reason(NOT_TIMED) is not None:
        return None
    teacher = teacher_of(values)
    if teacher is not None and read_countable_model(teacher) is None:
        return None
    vocabulary = vocabulary_size(model) or _VOCABULARY
    first, last = map(values.whole, OWN_ENDS)
    embedding, loss = map(values.flag, COUNTED_ENDS)
    flash = all(has_fused_attention(values, stack.node, engine) for stack in stacks)
    is_plain = engine == "megatron" and not values.flag("model.transformer_engine")
    return ModelWork(
        stacks=stacks,
        vocabulary=vocabulary,
        parameters=count_parameters(model, vocabulary, family),
        devices=devices,
        engine=engine,
        family="mt5" if family == "t5" and vocabulary >= _LARGE_VOCABULARY else family,
        flash=flash,
        fp8=values.flag("model.fp8"),
        gradient_bytes=2 if values.raw("model.optim.grad_sync_dtype") in HALF else 4,
        shares_optimizer=values.raw("model.optim.name") in DISTRIBUTED,
        own_ends=(first, last),
        counted_ends=(embedding, loss),
        overlaps_tensor=values.flag("model.ub_tp_comm_overlap"),
        overlaps_pipeline=values.flag("model.overlap_p2p_comm"),
        overlaps_data=values.flag("model.optim.overlap_grad_sync"),
        is_plain=is_plain,
        compiles=is_plain and flash and values.flag("model.compile_layers", default=True),
        teacher=next(iter(stacks_of(teacher)), None) if teacher is not None else None,
    )


class _Layer(NamedTuple):
    """Seconds of a layer for a micro batch; `core` is attention's in the forward pass."""

    forward: float
    backward: float
    core: float


class Speed:
    """The seconds of a step of one model, on one number of nodes of one type of GPU."""

    def __init__(self, work: ModelWork, gpu: Gpu, nodes: int, attained: Attained) -> None:
        self._work, self._nodes, self._attained = work, nodes, attained
        self._world = nodes * work.devices
        self.products = attained.products(gpu.generation, gpu.capability)
        self._half = gpu.peak * self.products.half
        self._linear, self._tile = self._half, attained.tile_half
        # Products are in FP8 if the job asks for it, the GPU has it, and its rate is published.
        self.counts_fp8 = work.fp8 and self.products.fp8 is not None and "fp8" in gpu.peaks
        if self.counts_fp8:
            assert self.products.fp8 is not None
            self._linear, self._tile = gpu.peaks["fp8"] * self.products.fp8, attained.tile_fp8
        self._attention = gpu.peak * self.products.attention
        self._memory = gpu.memory_bandwidth * attained.memory
        # NVLink joins a node's GPUs, of some machines those of several nodes; where it does not, PCIe does.
        self._joined = max(gpu.nvlink_gpus, work.devices) if gpu.nvlink else work.devices
        node = gpu.nvlink if gpu.nvlink and gpu.nvlink_gpus >= work.devices else _PCIE
        self._node = node * attained.links
        self._network = (_NETWORK if gpu.nic is None else gpu.nic) * attained.links
        self._layers: dict[tuple[Stack, int, int, int, bool], _Layer] = {}
        self._ends: dict[tuple[int, int, int], float] = {}

    def step(self, layout: Layout, parallel: ParallelConfig) -> float:
        """Return the seconds of a step; `parallel` is that of the layout.

        The pipeline's bubble is (p - 1) / v micro batches: Narayanan et al. 2021 (arXiv 2104.04473), section
        2.2.2. The other stages wait for the slowest one, which may be the last, for its logits.
        """
        slowest = self._time_slowest(layout)
        bubble = (layout.pipeline - 1) / (layout.virtual or 1)
        seconds = slowest * (parallel.micro_batches(self._nodes) + bubble)
        seconds += self._data_parallel(layout, parallel, slowest) + self._optimizer(layout, parallel)
        table, engine = self._attained, self._work.engine
        seconds += table.megatron["step"] if engine == "megatron" else table.step
        seconds *= 1 + table.straggling * log2(self._nodes)
        factor = table.megatron["compiled"] if self.compiles(layout) else table.engines[engine]
        return seconds * factor * table.families[self._work.family]

    def compiles(self, layout: Layout) -> bool:
        """Return True if whole layers are compiled: slipway/trainer/config/layout.py."""
        return self._work.compiles and layout.tensor == layout.context == 1

    def _time_slowest(self, layout: Layout) -> float:
        """Return the seconds of the slowest stage for a micro batch, forward and backward."""
        stacks, logits = self._work.stacks, self._logits(layout)
        if layout.pipeline == 1:
            return sum(self._stage(stack, layout, stack.layers) for stack in stacks) + logits
        longest = 0.0
        for stack in stacks:
            layers, last = self._layers_of(stack, layout)
            seconds = self._stage(stack, layout, layers)
            if stack is stacks[-1]:
                seconds = max(seconds, self._stage(stack, layout, last) + logits)
            longest = max(longest, seconds + self._time_handover(stack, layout))
        return longest

    def _layers_of(self, stack: Stack, layout: Layout) -> tuple[int, int]:
        """Return the layers of most stages of a stack, and of its last one."""
        stages, total = self._work.stages(stack, layout.pipeline), stack.layers
        embedding, loss = (True, True) if layout.counts_ends else self._work.counted_ends
        first, last = self._work.own_ends
        total += embedding + loss - (first or 0) - (last or 0)
        stages -= (first is not None) + (last is not None)
        most = -(-total // max(stages, 1))
        return max(most, first or 0), (most if last is None else last) - loss

    def _stage(self, stack: Stack, layout: Layout, layers: int) -> float:
        """Return the seconds of layers for a micro batch, forward and backward, with recomputing."""
        forward, backward, core = self._layer(stack, layout)
        recompute, teacher = layout.recompute, self._work.teacher
        again = recompute.part(-(-layers // (layout.virtual or 1))) * forward
        if recompute.granularity == "selective":
            again = core
        if teacher is not None:
            again += self._layer(teacher, layout).forward * teacher.layers / stack.layers
        return layers * (forward + backward + again)

    def _layer(self, stack: Stack, layout: Layout) -> _Layer:
        # The parts of a layout that a layer depends on, which thousands of layouts share.
        alike = stack, layout.tensor, layout.context, layout.micro, layout.sequence_parallel
        if alike not in self._layers:
            self._layers[alike] = self._time_layer(stack, layout)
        return self._layers[alike]

    def _time_layer(self, stack: Stack, layout: Layout) -> _Layer:
        tensor = layout.tensor
        tokens = layout.micro * stack.length / layout.context
        sides = _matrices(stack, tensor)
        products = sum(_product(tokens, *side, self._linear, self._tile) for side in sides)
        core, core_backward = self._core(stack, layout)
        # Norms, dropouts and residuals, which sequence parallel shares out (Korthikanti et al. 2022, arXiv
        # 2205.05198, section 4.2.2), and the activation of the MLP.
        whole = 22 * tokens * stack.hidden / (tensor if layout.sequence_parallel else 1)
        inner = (6 if stack.is_gated else 4) * tokens * stack.ffn / tensor
        moved = (whole + inner) / self._memory
        # FP8 casts the operand of a product: forward its input, backward the gradient of its output.
        casts = self._attained.casts * tokens / self._memory if self.counts_fp8 else 0.0
        cast, cast_backward = (casts * sum(side[way] for side in sides) for way in (0, 1))
        # A sum over the ranks behind each attention and the MLP; both schemes send as much, as an all-reduce
        # is a reduce-scatter and an all-gather; backward as forward.
        sent = (len(stack.attends_to) + 1) * 2 * tokens * stack.hidden * 2 * (tensor - 1) / tensor
        if self.counts_fp8 and layout.sequence_parallel:  # gathered in 8 bits, scattered in 16
            sent *= 0.75
        waits = sent / self._link(tensor)
        if self._work.overlaps_tensor:
            waits *= self._attained.exposed_tensor
        is_separate = self._work.is_plain and not self.compiles(layout)
        least = self._attained.megatron["launch"] if is_separate else self._attained.launch
        forward = max(products + core + moved + cast, least) + waits
        # Two products in the backward pass for each one of the forward pass.
        backward = max(2 * (products + moved) + core_backward + cast_backward, 2 * least) + waits
        return _Layer(forward, backward, core)

    def _core(self, stack: Stack, layout: Layout) -> tuple[float, float]:
        """Return the seconds of attention's core, forward and backward, with the ring of keys and values."""
        tensor, context = layout.tensor, layout.context
        forward = backward = 0.0
        for attended in stack.attends_to:
            pairs = layout.micro * stack.length * attended / context
            flops = 4 * pairs * stack.width / tensor
            if self._work.flash:
                computed = flops / (1 if stack.node == "model.encoder" else 2) / self._attention
                again = _FUSED_BACKWARD * computed
            else:
                # Scores in 16 bits, their softmax and its dropout: Korthikanti et al. 2022, section 4.1.
                computed = flops / self._half + 10 * pairs * stack.heads / tensor / self._memory
                again = 2 * computed
            sent = 2 * 2 * layout.micro * attended * stack.kv_width / tensor * (context - 1) / context
            around = sent / self._link(tensor * context)
            # Keys and values of the other ranks arrive while the present ones are used; backward, their
            # gradients go around too.
            forward += max(computed, around)
            backward += max(again, 2 * around)
            # Each part of the keys gives a part of the output, which is added to the others; backward, of the
            # gradients of the queries.
            added = self._attained.rings * layout.micro * stack.length / context * stack.width / tensor
            parts = added * (context - 1) / self._memory
            forward, backward = forward + parts, backward + parts
        return forward, backward

    def _logits(self, layout: Layout) -> float:
        """Return the seconds of the output layer and the loss of a micro batch, forward and backward."""
        key = layout.tensor, layout.context, layout.micro
        if key not in self._ends:
            last = self._work.stacks[-1]
            tokens = layout.micro * last.length / layout.context
            share = self._work.vocabulary / layout.tensor
            product = _product(tokens, last.hidden, share, self._half, self._attained.tile_half)
            moved = _LOSS_BYTES[self._work.engine] * tokens * share / self._memory
            self._ends[key] = 3 * product + moved
            if (teacher := self._work.teacher) is not None:
                known = _product(tokens, teacher.hidden, share, self._half, self._attained.tile_half)
                self._ends[key] += known + moved
        return self._ends[key]

    def _time_handover(self, stack: Stack, layout: Layout) -> float:
        """Return the seconds that a stage waits for sending a micro batch on and back.

        Megatron numbers the ranks by tensor, context, data and pipeline (megatron/core/parallel_state.py):
        the next stage is in another node, if there is one.
        """
        size = 2 * layout.micro * stack.length * stack.hidden / (layout.context * layout.tensor)
        link = self._node if self._world <= self._joined else self._network
        waits = 2 * (layout.virtual or 1) * size / link
        return waits * (self._attained.exposed_pipeline if self._work.overlaps_pipeline else 1)

    def _data_parallel(self, layout: Layout, parallel: ParallelConfig, micro_batch: float) -> float:
        """Return the seconds that data parallel waits for gradients, and for updated parameters.

        Where it overlaps, gradients are sent during the last micro batch's backward pass, and parameters
        during the first one's forward pass; with model chunks, while the other chunks are computed too.
        """
        group = parallel.data(self._nodes) * layout.context
        if group == 1:
            return 0.0
        link = self._ring(layout.tensor, group)
        each = self._work.parameters / (layout.tensor * layout.pipeline) * (group - 1) / group / link
        gradients, parameters = self._work.gradient_bytes * each, 2 * each
        if not self._work.shares_optimizer:  # an all-reduce without a gather
            gradients, parameters = 2 * gradients, 0.0
        if not self._work.overlaps_data:
            return gradients + parameters
        chunks = layout.virtual or 1
        hidden = micro_batch * (1 + (layout.pipeline - 1) * (chunks - 1) / chunks)
        # Hidden communication takes SMs and memory bandwidth from computing.
        least = self._attained.exposed_data
        waits = max(gradients * least, gradients - hidden * 2 / 3)
        return waits + max(parameters * least, parameters - hidden / 3)

    def _ring(self, tensor: int, group: int) -> float:
        """Return the bandwidth of a data parallel group's ring.

        The group's members in a node have a port each, and NCCL's rings use all of them at a time: with
        tensor size 1 eight times as much goes out of a node as with 8.
        """
        members = max(self._joined // tensor, 1)
        if group <= members:
            return self._node
        return min(self._node, members * self._network)

    def _optimizer(self, layout: Layout, parallel: ParallelConfig) -> float:
        """Return the seconds of the optimizer, which reads and writes its states once.

        Our trainer's separate additions of gradients are counted too, for all micro batches.
        """
        mine = self._work.parameters / (layout.tensor * layout.pipeline)
        added = _ADDED_BYTES * mine * parallel.micro_batches(self._nodes) if self._work.is_plain else 0
        if self._work.shares_optimizer:
            mine /= parallel.data(self._nodes) * layout.context
        return (_OPTIMIZER_BYTES * mine + added) / self._memory

    def _link(self, group: int) -> float:
        """Return the slowest link of groups of so many neighbouring GPUs."""
        is_joined = self._world <= self._joined or self._joined % group == 0
        return self._node if group <= self._joined and is_joined else self._network


def _matrices(stack: Stack, tensor: int) -> list[tuple[float, float]]:
    """Return the matrices of a layer on one tensor parallel rank: inner side × columns."""
    inputs, outputs = (stack.width + 2 * stack.kv_width) / tensor, stack.width / tensor
    attentions = [(stack.hidden, inputs), (outputs, stack.hidden)] * len(stack.attends_to)
    ways_in = 2 if stack.is_gated else 1
    return [*attentions, (stack.hidden, ways_in * stack.ffn / tensor), (stack.ffn / tensor, stack.hidden)]


def _product(rows: float, inner: float, columns: float, rate: float, tile: float) -> float:
    """Return the seconds of a matrix product; each of its sides is longer by a tile.

    NVIDIA, "Matrix Multiplication Background User's Guide": tile and wave quantization.
    """
    ideal = 2 * rows * inner * columns / rate
    return ideal * (1 + tile / rows) * (1 + tile / inner) * (1 + tile / columns)
