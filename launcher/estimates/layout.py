"""Parallel layouts: what a user may change to fit a model on its GPUs, and the keys that say it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from arithmetic.layout import ParallelConfig
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import is_encoder_decoder, stacks_of
from launcher.estimates.values import Values

SEQUENCE = "model.sequence_parallel"
RECOMPUTE = "activations_checkpoint"
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


NOTHING = Recompute()
SELECTIVE = Recompute("selective")
EVERYTHING = Recompute("full", "uniform", 1)


def layout_of(values: Values, parallel: ParallelConfig) -> Layout:
    """Return the layout of a job's configuration."""
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        context=parallel.context,
        micro=parallel.micro,
        sequence_parallel=values.flag(SEQUENCE),
        recompute=own_recompute(values),
    )


def parallel_config_with(values: Values, parallel: ParallelConfig, layout: Layout) -> ParallelConfig:
    """Return the parallel sizes with those of a layout."""
    expert_tensor = values.whole(keys.EXPERT_TENSOR)
    return parallel._replace(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual=layout.virtual,
        context=layout.context,
        micro=layout.micro,
        expert_tensor=layout.tensor if expert_tensor is None else expert_tensor,
        group=values.whole(keys.GROUP, layout.pipeline) or layout.pipeline,
    )


def changes_to(values: Values, layout: Layout) -> dict[str, Any]:
    """Return the keys of a job's configuration that a layout changes, with their new values."""
    layout_values: dict[str, Any] = {
        keys.TENSOR: layout.tensor,
        keys.PIPELINE: layout.pipeline,
        keys.VIRTUAL: layout.virtual,
        keys.CONTEXT: layout.context,
        keys.MICRO: layout.micro,
        SEQUENCE: layout.sequence_parallel,
    }
    if is_encoder_decoder(values) and layout.pipeline != values.whole(keys.PIPELINE, 1):
        layout_values[keys.SPLIT_RANK] = layout.pipeline // 2
    if layout.counts_ends:
        layout_values.update(dict.fromkeys(COUNTED_ENDS, True))
    if layout.recompute != own_recompute(values):
        for stack in stacks_of(values):
            start = f"{stack.node}.{RECOMPUTE}"
            layout_values[f"{start}_granularity"] = layout.recompute.granularity
            layout_values[f"{start}_method"] = layout.recompute.method
            layout_values[f"{start}_num_layers"] = layout.recompute.layers
    absent = {keys.TENSOR: 1, keys.PIPELINE: 1, keys.CONTEXT: 1, SEQUENCE: False}
    return {
        key: value
        for key, value in layout_values.items()
        if value != (absent.get(key) if values.raw(key) is None else values.raw(key))
        and not (key == keys.VIRTUAL and value is None and values.raw(key) == 1)
    }


def with_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
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
    sizes = zip(
        (layout.tensor, layout.pipeline, layout.context, layout.micro),
        (own.tensor, own.pipeline, own.context, own.micro),
        strict=True,
    )
    steps = sum(abs(math.log2(size / before)) for size, before in sizes)
    # These two hardly change what a step does, and follow from other sizes as often as not.
    steps += abs(math.log2((layout.virtual or 1) / (own.virtual or 1))) / 2
    steps += (layout.sequence_parallel != own.sequence_parallel) / 2
    steps += (layout.counts_ends != own.counts_ends) / 2
    return steps + abs(effort(layout.recompute) - effort(own.recompute))


def own_recompute(values: Values) -> Recompute:
    """Return what a job's configuration recomputes."""
    stack = next(iter(stacks_of(values)), None)
    if stack is None or values.raw(f"{stack.node}.{RECOMPUTE}_granularity") is None:
        return NOTHING
    start = f"{stack.node}.{RECOMPUTE}"
    return Recompute(
        str(values.raw(f"{start}_granularity")),
        values.raw(f"{start}_method"),
        values.whole(f"{start}_num_layers", least=0),
    )


def effort(recompute: Recompute) -> float:
    """Return the steps from recomputing nothing."""
    if recompute.granularity == "full":
        if recompute.method != "block":
            return 2.0
        return 1.5 if recompute.layers else 0.0
    return 1.0 if recompute.granularity == "selective" else 0.0
