"""Read the parallel layout of a job: its sizes, its GPUs, and the keys that fit a model on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launcher.estimates.values import Values
from launcher.plan import Resources
from slipway.arithmetic.gpus import ASSUMED, GPUS, Gpu, find_gpus
from slipway.arithmetic.layout import ParallelConfig, fits

# The most nodes that suggestions are for.
MOST_NODES = 1024

TENSOR = "model.tensor_model_parallel_size"
PIPELINE = "model.pipeline_model_parallel_size"
VIRTUAL = "model.virtual_pipeline_model_parallel_size"
CONTEXT = "model.context_parallel_size"
EXPERT = "model.expert_model_parallel_size"
EXPERT_TENSOR = "model.expert_tensor_parallel_size"
SPLIT_RANK = "model.pipeline_model_parallel_split_rank"
GROUP = "model.microbatch_group_size_per_vp_stage"
MICRO = "model.micro_batch_size"
GLOBAL = "model.global_batch_size"
RAMPUP = "model.rampup_batch_size"
NODES = "trainer.num_nodes"
DEVICES = "trainer.devices"


class Stack(NamedTuple):
    """A stack of transformer layers: that of a GPT or BERT, or one of the two of a T5.

    `node` is the node of its keys; `stages` counts its pipeline stages. Sizes are 0 where they are unknown;
    `groups`, `ffn` and `kv_channels` also where they follow from the others. `attends_to` are the lengths of
    the sequences that its attentions look at, its own first; empty if unknown.
    """

    node: str
    stages: int
    activation: str
    attends_to: tuple[int, ...]
    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    kv_channels: int

    @property
    def head(self) -> int:
        """The width of one attention head."""
        return self.kv_channels or max(self.hidden // self.heads, 1)

    @property
    def width(self) -> int:
        """The width of all queries."""
        return self.heads * self.head

    @property
    def kv_width(self) -> int:
        """The width of all keys, and of all values."""
        return (self.groups or self.heads) * self.head

    @property
    def is_gated(self) -> bool:
        """True if two matrices lead into the MLP."""
        return self.activation.endswith("glu")

    @property
    def length(self) -> int:
        """The tokens of its sequence."""
        return self.attends_to[0]


# The keys of a stack's sizes, in the order of its fields.
_SIZES = (
    *("num_layers", "hidden_size", "num_attention_heads"),
    *("num_query_groups", "ffn_hidden_size", "kv_channels"),
)


# The sizes of every layout: field, key, and default.
_LAYOUT = (
    *(("tensor", TENSOR, 1), ("pipeline", PIPELINE, 1), ("context", CONTEXT, 1), ("expert", EXPERT, 1)),
    *(("micro", MICRO, None), ("batch", GLOBAL, None), ("devices", DEVICES, None)),
)


def read_parallel_config(values: Values) -> ParallelConfig | None:
    """Return the sizes of a layout; None if one is invalid."""
    sizes: dict[str, Any] = {name: values.whole(key, default) for name, key, default in _LAYOUT}
    if None in sizes.values():
        return None
    virtual, tensor, pipeline = values.whole(VIRTUAL), sizes["tensor"], sizes["pipeline"]
    return ParallelConfig(
        **sizes,
        virtual=virtual if virtual != 1 else None,  # NeMo reads 1 as null
        expert_tensor=values.whole(EXPERT_TENSOR, tensor) or tensor,
        group=values.whole(GROUP, pipeline) or pipeline,
    )


def stacks_of(values: Values) -> list[Stack]:
    """Return the stacks of the model: one, or an encoder and a decoder."""
    pipeline = values.whole(PIPELINE, 1)
    if not is_encoder_decoder(values):
        length = values.whole("model.encoder_seq_length")
        return [_stack(values, "model", pipeline, length)] if values.node("model") is not None else []
    first = second = pipeline
    if pipeline is not None and pipeline > 1:
        # NeMo: the encoder has the stages before the split rank, the decoder those from it on.
        first = values.whole(SPLIT_RANK)
        second = pipeline - first if first is not None and first < pipeline else None
    source = values.whole("model.seq_length")
    target = values.whole("model.data.seq_length_dec", source) or source
    # Both look at themselves, and the decoder at the encoder too.
    return [
        _stack(values, "model.encoder", first, source),
        _stack(values, "model.decoder", second, target, source),
    ]


def is_encoder_decoder(values: Values) -> bool:
    """Return True for a T5."""
    return values.node("model.encoder") is not None and values.node("model.decoder") is not None


def _stack(values: Values, node: str, stages: int | None, *lengths: int | None) -> Stack:
    sizes = (values.whole(f"{node}.{name}", 0) or 0 for name in _SIZES)
    activation = str(values.raw(f"{node}.activation") or "gelu")
    return Stack(node, stages or 0, activation, tuple(filter(None, lengths)), *sizes)


def node_counts(parallel: ParallelConfig) -> list[int]:
    """Return the numbers of nodes, up to `MOST_NODES`, that a layout fits on."""
    step = parallel.model // math.gcd(parallel.model, parallel.devices)  # others leave a part of a model over
    return [nodes for nodes in range(step, MOST_NODES + 1, step) if fits(parallel, nodes)]


# --- the GPU that estimates count with

_NOBODY = "assumed: cluster.gpu is null"


class CountedGpu(NamedTuple):
    """A GPU, and the `source` that names it; `is_assumed` without a clear source."""

    gpu: Gpu
    source: str
    is_assumed: bool = False

    @property
    def is_unclear(self) -> bool:
        """True if the named type fits no known GPU, or several."""
        return self.is_assumed and self.source != _NOBODY


def gpu_of(resources: Resources, cluster_types: Sequence[str] = ()) -> CountedGpu:
    """Return `cluster.gpu`, else the GPU of `cluster.gres` or of the cluster, else an assumption.

    `cluster_types` are the types of GPU that the cluster has, as far as known.
    """
    table = {**GPUS, **resources.gpu_types}
    if resources.gpu is not None:
        return CountedGpu(table[resources.gpu], "cluster.gpu")
    if resources.gpu_type is not None:
        name, source = resources.gpu_type, f"cluster.gres=gpu:{resources.gpu_type}"
    elif len(cluster_types) == 1:
        name, source = cluster_types[0], f"the cluster's {cluster_types[0]}"
    else:
        return CountedGpu(table[ASSUMED.name], _NOBODY, is_assumed=True)
    matches = find_gpus(name, table)
    if len(matches) == 1:
        return CountedGpu(matches[0], source)
    why = " or ".join(gpu.name for gpu in matches) if matches else "no GPU that is known here"
    # The larger one of an A100 or a V100 of two sizes, as for a cluster without a type.
    gpu = max(matches, key=lambda match: match.memory) if matches else table[ASSUMED.name]
    return CountedGpu(gpu, f"assumed: {source} is {why}", is_assumed=True)


# --- layouts, and the keys that say them

SEQUENCE = "model.sequence_parallel"
RECOMPUTE = "activations_checkpoint"
_RECOMPUTE = tuple(f"{RECOMPUTE}_{name}" for name in ("granularity", "method", "num_layers"))
# The layers of the first and the last stage, where these are configured.
OWN_ENDS = tuple(f"model.num_layers_in_{place}_pipeline_stage" for place in ("first", "last"))
# The embedding and the loss take the place of a layer each.
COUNTED_ENDS = tuple(f"model.account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))


class Recompute(NamedTuple):
    """Recomputing in the backward pass: NeMo's three keys ``activations_checkpoint_*``."""

    granularity: str | None = None
    method: str | None = None
    layers: int | None = None

    def part(self, layers: int) -> float:
        """Return the share of a model chunk's layers that are recomputed as a whole."""
        if self.granularity != "full":
            return 0.0
        return min((self.layers or 0) / max(layers, 1), 1.0) if self.method == "block" else 1.0


class Layout(NamedTuple):
    """Sizes and switches that a user may change to fit a model on its GPUs and to be faster there.

    With `counts_ends` the embedding and the loss take the place of a layer each, in the first and the last
    stage.
    """

    tensor: int
    pipeline: int
    virtual: int | None
    context: int
    micro: int
    sequence_parallel: bool
    recompute: Recompute
    counts_ends: bool = False

    def of(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return parallel sizes with those of the layout, which are its first fields."""
        sizes: dict[str, Any] = dict(zip(self._fields[:5], self[:5], strict=True))
        return parallel._replace(**sizes)


NOTHING = Recompute()
SELECTIVE = Recompute("selective")
EVERYTHING = Recompute("full", "uniform", 1)


def layout_of(values: Values, parallel: ParallelConfig) -> Layout:
    """Return the layout of a job's configuration."""
    sizes = parallel.tensor, parallel.pipeline, parallel.virtual, parallel.context, parallel.micro
    return Layout(*sizes, values.flag(SEQUENCE), read_recompute(values))


def apply_layout(values: Values, parallel: ParallelConfig, layout: Layout) -> ParallelConfig:
    expert_tensor = values.whole(EXPERT_TENSOR)
    return layout.of(parallel)._replace(
        expert_tensor=layout.tensor if expert_tensor is None else expert_tensor,
        group=values.whole(GROUP, layout.pipeline) or layout.pipeline,
    )


def changes_to(values: Values, layout: Layout) -> dict[str, Any]:
    """Return the keys of a job's configuration that a layout changes, with their new values."""
    layout_values: dict[str, Any] = {
        TENSOR: layout.tensor,
        PIPELINE: layout.pipeline,
        VIRTUAL: layout.virtual,
        CONTEXT: layout.context,
        MICRO: layout.micro,
        SEQUENCE: layout.sequence_parallel,
    }
    if is_encoder_decoder(values) and layout.pipeline != values.whole(PIPELINE, 1):
        layout_values[SPLIT_RANK] = layout.pipeline // 2
    if layout.counts_ends:
        layout_values.update(dict.fromkeys(COUNTED_ENDS, True))
    if layout.recompute != read_recompute(values):
        for stack in stacks_of(values):
            for name, value in zip(_RECOMPUTE, layout.recompute, strict=True):
                layout_values[f"{stack.node}.{name}"] = value
    absent = {TENSOR: 1, PIPELINE: 1, CONTEXT: 1, SEQUENCE: False}
    return {
        key: value
        for key, value in layout_values.items()
        if value != (absent.get(key) if values.raw(key) is None else values.raw(key))
        and not (key == VIRTUAL and value is None and values.raw(key) == 1)
    }


def apply_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with dotted keys set; the parts without a change are shared."""
    changed = dict(config)
    for key, value in changes.items():
        *parents, name = key.split(".")
        node = changed
        for parent in parents:
            below = node.get(parent)
            node[parent] = dict(below) if isinstance(below, Mapping) else {}
            node = node[parent]
        node[name] = value
    return changed


def distance(layout: Layout, own: Layout) -> float:
    """Return the distance of two layouts: doublings of sizes, and steps of recomputing more or less."""
    sizes = [(each.tensor, each.pipeline, each.context, each.micro) for each in (layout, own)]
    steps = sum(abs(math.log2(size / before)) for size, before in zip(*sizes, strict=True))
    # These two hardly change a step, and often follow from other sizes.
    steps += abs(math.log2((layout.virtual or 1) / (own.virtual or 1))) / 2
    steps += (layout.sequence_parallel != own.sequence_parallel) / 2
    steps += (layout.counts_ends != own.counts_ends) / 2
    return steps + abs(effort(layout.recompute) - effort(own.recompute))


def read_recompute(values: Values) -> Recompute:
    """Return the recomputing of a job's configuration."""
    stacks = stacks_of(values)
    return recompute_of(values, stacks[0].node) if stacks else NOTHING


def recompute_of(values: Values, node: str) -> Recompute:
    """Return the recomputing of the stack with keys below a node."""
    granularity, method, layers = (f"{node}.{name}" for name in _RECOMPUTE)
    if values.raw(granularity) is None:
        return NOTHING
    return Recompute(str(values.raw(granularity)), values.raw(method), values.whole(layers, least=0))


def effort(recompute: Recompute) -> float:
    """Return the steps of recomputing above none at all."""
    if recompute.granularity != "full":
        return float(recompute.granularity == "selective")
    if recompute.method != "block":
        return 2.0
    return 1.5 if recompute.layers else 0.0
