"""How long a step takes in one layout compared with another: good for ranking them, not for a calendar.

What is counted: the matrix products, with their tiles; what is read and written besides; what tensor, context
and data parallel send and the GPUs wait for; what is recomputed; the slowest pipeline stage, and its bubble.
docs/suggest.md has the formulas, their sources and what they were compared with.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.hardware import Gpu
from launcher.preflight.estimates.work import Stack, Work
from launcher.preflight.shape import Shape

# The part of the peak that a large matrix product gets, and the side of the tiles it is made of: a product of
# m × k × n loses about one tile in each (NVIDIA, "Matrix Multiplication Background User's Guide": tile and
# wave quantization).
_BEST = 0.8
_TILE = 128
# Of what memory and links could carry at most.
_OF_MEMORY = 0.8
_OF_LINKS = 0.8
# What a layer's forward pass takes at the very least: its kernels are launched one after the other.
_LAUNCHES = 1.5e-4
# What is left to wait for where sending overlaps with computing (ub_tp_comm_overlap, overlap_p2p_comm).
_NOT_HIDDEN = 0.5


class _Wires(NamedTuple):
    """Bytes per second of a GPU: its memory, its links to the others of a node, its share of the network."""

    memory: float
    node: float
    network: float


# The data sheets of the GPUs and of NVIDIA's machines with them: NVLink in one direction, and the InfiniBand
# of a DGX-1, a DGX A100 and a DGX H100 divided by its eight GPUs.
_WIRES = {
    "v100": _Wires(0.9e12, 150e9, 6.25e9),
    "a100": _Wires(2.0e12, 300e9, 25e9),
    "h100": _Wires(3.35e12, 450e9, 50e9),
    "h200": _Wires(4.8e12, 450e9, 50e9),
}


class Recompute(NamedTuple):
    """What is computed again in the backward pass: NeMo's three ``activations_checkpoint_*``."""

    granularity: str | None = None
    method: str | None = None
    layers: int | None = None

    def part(self, layers: int) -> float:
        """The part of the layers of a model chunk that is computed again as a whole."""
        if self.granularity != "full":
            return 0.0
        return min((self.layers or 0) / max(layers, 1), 1.0) if self.method == "block" else 1.0


class Layout(NamedTuple):
    """What a user may change to fit a model on its GPUs and to be faster there."""

    tensor: int
    pipeline: int
    virtual: int | None
    context: int
    micro: int
    sequence_parallel: bool
    recompute: Recompute


class Speed:
    """The seconds of a step of one model, on one number of nodes of one type of GPU."""

    def __init__(self, work: Work, gpu: Gpu, nodes: int) -> None:
        self._work, self._gpu, self._nodes = work, gpu, nodes
        self._wires = _WIRES.get(gpu.name.partition("-")[0], _WIRES["a100"])
        self._layers: dict[tuple[Stack, Layout], tuple[float, float]] = {}

    def step(self, layout: Layout, shape: Shape) -> float:
        """The seconds of a step; `shape` is that of the layout.

        The pipeline's bubble is (p - 1) / v micro batches: Narayanan et al. 2021 (arXiv 2104.04473), section
        2.2.2. The others wait for the slowest stage, which may be the last, for its logits.
        """
        stages = [self._stage(stack, layout) for stack in self._work.stacks]
        slowest = max(max(stages[:-1], default=0.0), stages[-1] + self._logits(layout))
        if layout.pipeline == 1:
            slowest = sum(stages) + self._logits(layout)
        bubble = (layout.pipeline - 1) / (layout.virtual or 1)
        return slowest * (shape.micro_batches(self._nodes) + bubble) + self._reduction(layout, shape, slowest)

    def _stage(self, stack: Stack, layout: Layout) -> float:
        """The slowest stage of a stack: one micro batch, forward and backward."""
        stages = self._work.stages(stack, layout.pipeline)
        layers = -(-stack.layers // stages)
        # Only what of a layout a layer depends on; thousands of layouts share it.
        alike = layout._replace(pipeline=1, virtual=None, recompute=Recompute())
        if (stack, alike) not in self._layers:
            self._layers[stack, alike] = self._layer(stack, alike)
        forward, attention = self._layers[stack, alike]
        recompute = layout.recompute
        again = recompute.part(-(-layers // (layout.virtual or 1))) * forward
        if recompute.granularity == "selective":
            again = attention
        # Two products in the backward pass for each one of the forward pass.
        return layers * (3 * forward + again) + self._handing_over(stack, layout)

    def _layer(self, stack: Stack, layout: Layout) -> tuple[float, float]:
        """Seconds of the forward pass of a layer, and of its attention's core in that."""
        tensor, context = layout.tensor, layout.context
        tokens = layout.micro * stack.length / context
        products = sum(self._product(tokens, *sides) for sides in stack.products(tensor))
        core = self._core(stack, layout)
        # Norms, dropouts and residuals, which sequence parallel shares out (Korthikanti et al. 2022, arXiv
        # 2205.05198, section 4.2.2), and the activation of the MLP.
        whole = 22 * tokens * stack.hidden / (tensor if layout.sequence_parallel else 1)
        inner = (2 * stack.ways_in + 2) * tokens * stack.ffn / tensor
        moved = (whole + inner) / (_OF_MEMORY * self._wires.memory)
        # Both schemes send as much: an all-reduce is a reduce-scatter and an all-gather.
        sent = stack.reductions * 2 * tokens * stack.hidden * 2 * (tensor - 1) / tensor
        waits = sent / (_OF_LINKS * self._link(tensor)) * (_NOT_HIDDEN if self._work.overlaps_tensor else 1)
        return max(products + core + moved, _LAUNCHES) + waits, core

    def _product(self, rows: float, inner: float, columns: float) -> float:
        ideal = 2 * rows * inner * columns / (_BEST * self._gpu.peak)
        return ideal * (1 + _TILE / rows) * (1 + _TILE / inner) * (1 + _TILE / columns)

    def _core(self, stack: Stack, layout: Layout) -> float:
        """The two products of the attention's core, its softmax and dropout, and keys that go around."""
        tensor, context = layout.tensor, layout.context
        seconds = 0.0
        for attended in stack.attends_to:
            pairs = layout.micro * stack.length * attended / context
            computed = 4 * pairs * stack.width / tensor / (_BEST * self._gpu.peak)
            if self._work.flash:
                computed /= 2 if stack.causal else 1
            else:
                computed += 10 * pairs * stack.heads / tensor / (_OF_MEMORY * self._wires.memory)
            sent = 2 * 2 * layout.micro * attended * stack.kv_width / tensor * (context - 1) / context
            # Keys and values of the other ranks arrive while what is there is computed with.
            seconds += max(computed, sent / (_OF_LINKS * self._link(tensor * context)))
        return seconds

    def _logits(self, layout: Layout) -> float:
        """The output layer and the loss of a micro batch, forward and backward."""
        last = self._work.stacks[-1]
        tokens = layout.micro * last.length / layout.context
        share = self._work.vocabulary / layout.tensor
        moved = 16 * tokens * share / (_OF_MEMORY * self._wires.memory)
        return 3 * self._product(tokens, last.hidden, share) + moved

    def _handing_over(self, stack: Stack, layout: Layout) -> float:
        """What each chunk of a stage sends on and back for a micro batch, and waits for."""
        if layout.pipeline == 1:
            return 0.0
        size = 2 * layout.micro * stack.length * stack.hidden / (layout.context * layout.tensor)
        link = self._link(layout.tensor * layout.context * layout.pipeline)
        waits = 2 * (layout.virtual or 1) * size / (_OF_LINKS * link)
        return waits * (_NOT_HIDDEN if self._work.overlaps_pipeline else 1)

    def _reduction(self, layout: Layout, shape: Shape, micro_batch: float) -> float:
        """What data parallel waits for: gradients, and parameters where each rank updates a part of them.

        4 bytes for a gradient and 2 for a parameter. Where it overlaps, the last micro batch's backward pass
        and the first one's forward pass hide it.
        """
        data = shape.data(self._nodes) * layout.context
        if data == 1:
            return 0.0
        mine = self._work.parameters / (layout.tensor * layout.pipeline)
        sent = (4 + 2) * mine * (data - 1) / data
        link = self._link(layout.tensor * data)
        seconds = sent / (_OF_LINKS * link)
        return max(0.0, seconds - micro_batch) if self._work.overlaps_data else seconds

    def _link(self, group: int) -> float:
        """The slowest link of groups of so many neighbouring GPUs."""
        return self._wires.network if self._work.devices % group else self._wires.node
