"""Rules by which parallel sizes divide GPUs, sequences and batches.

The words are Megatron's: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (arXiv:2104.04473), section 3: p pipeline, t tensor, d data parallel size, v model
chunks per pipeline stage, B global batch, b micro batch, m = B / (d b) micro batches. Each rule names the
file of megatron-core that has it.
"""

from __future__ import annotations

from typing import NamedTuple


class ParallelConfig(NamedTuple):
    """Sizes by which processes share a model and a batch, on any number of nodes.

    `devices` are the GPUs of a node, or of the world if only that is known. `virtual` is None where
    a stage holds one chunk of layers. `group` is how many micro batches virtual stages take at a time.
    """

    devices: int
    tensor: int
    pipeline: int
    virtual: int | None
    context: int
    expert: int
    expert_tensor: int
    group: int
    micro: int
    batch: int

    @property
    def model(self) -> int:
        """The GPUs that one copy of the model takes."""
        return self.tensor * self.pipeline * self.context

    @property
    def experts(self) -> int:
        """The GPUs that one copy of the routed experts takes."""
        return self.expert_tensor * self.expert * self.pipeline

    @property
    def is_interleaved(self) -> bool:
        """True where stages hold several chunks of layers, and take turns with them."""
        return self.virtual is not None and self.pipeline > 1

    def data(self, nodes: int) -> int:
        """Return the data parallel size, where the world can be divided."""
        return nodes * self.devices // self.model

    def micro_batches(self, nodes: int) -> int:
        """Return the micro batches of each copy of the model in a step, where the batch can be divided."""
        return self.batch // (self.micro * self.data(nodes))

    def rampup_multiple(self, nodes: int) -> int:
        """Return the number that divides each batch of a ramp-up.

        megatron/core/num_microbatches_calculator.py, RampupBatchsizeNumMicroBatchesCalculator: one pass over
        the ranks takes this many samples. With virtual stages a batch's micro batches come in groups.
        """
        return self.micro * self.data(nodes) * (self.group if self.is_interleaved else 1)


def fits(sizes: ParallelConfig, nodes: int) -> bool:
    """Return True if a number of nodes can hold a layout: every rule that the node count has a part in."""
    rules = (divides_world, experts_divide_world, divides_batch, interleaves)
    return all(rule(sizes, nodes) for rule in rules)


def divides_world(sizes: ParallelConfig, nodes: int) -> bool:
    """Return True if tensor × pipeline × context divides the world (megatron/core/parallel_state.py)."""
    return nodes * sizes.devices % sizes.model == 0


def experts_divide_world(sizes: ParallelConfig, nodes: int) -> bool:
    """Return True if expert tensor × expert × pipeline divides it too (megatron/core/parallel_state.py)."""
    is_dense = sizes.expert == 1 and sizes.expert_tensor == sizes.tensor
    return is_dense or nodes * sizes.devices % sizes.experts == 0


def divides_batch(sizes: ParallelConfig, nodes: int) -> bool:
    """Return True if micro batch × data parallel divides the global batch.

    megatron/core/num_microbatches_calculator.py.
    """
    return sizes.batch % (sizes.micro * sizes.data(nodes)) == 0


def interleaves(sizes: ParallelConfig, nodes: int) -> bool:
    """Return True if the interleaved schedule can take the micro batches.

    megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving: they come in
    groups of the pipeline size by default: one at least, and no rest smaller than the pipeline.
    """
    if not sizes.is_interleaved:
        return True
    micro_batches = sizes.micro_batches(nodes)
    rest = micro_batches % sizes.group
    return sizes.pipeline <= sizes.group <= micro_batches and not 0 < rest < sizes.pipeline


def shares_sequence(length: int, tensor: int, context: int) -> bool:
    """Return True if sequence parallel can share out a sequence (Korthikanti et al. 2022, arXiv:2205.05198).

    megatron/core/tensor_parallel/mappings.py, _split_along_first_dim.
    """
    return length % (tensor * context) == 0


def cuts_sequence(length: int, context: int) -> bool:
    """Return True if each context rank can have two chunks of a sequence, one from either end.

    NeMo: megatron_gpt_model.py, get_batch_on_this_context_parallel_rank; so does megatron/core/utils.py.
    """
    return context == 1 or length % (2 * context) == 0


def is_rampup(value: object) -> bool:
    """Return True for a first batch, an increment and the samples that the batch grows over."""
    return isinstance(value, list) and len(value) == 3 and all(map(_is_count, value))


def _is_count(value: object) -> bool:
    # No job's has more than 63 bits.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1 and value.bit_length() < 64
