"""The layouts that arithmetic allows a model on a number of nodes, and how far each is from the user's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from launcher.preflight import shape as keys
from launcher.preflight.batches import rampup_problems
from launcher.preflight.estimates.speed import Layout, Recompute
from launcher.preflight.findings import Finding, full
from launcher.preflight.layout import fits
from launcher.preflight.model import (
    context_problems,
    layers_fit,
    sequence_parallel_problems,
    split_rank_problems,
    tensor_sizes,
    virtual_problems,
)
from launcher.preflight.shape import Shape, is_encoder_decoder, stacks_of
from launcher.preflight.values import Values, divisors

SEQUENCE = "model.sequence_parallel"
# The embedding and the loss take the place of a layer each.
COUNTED_ENDS = tuple(f"model.account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
_OWN_ENDS = tuple(f"model.num_layers_in_{place}_pipeline_stage" for place in ("first", "last"))
_RECOMPUTE = "activations_checkpoint"
_SIZES = frozenset(
    map(
        full,
        (
            keys.TENSOR,
            keys.PIPELINE,
            keys.VIRTUAL,
            keys.CONTEXT,
            keys.MICRO,
            keys.SPLIT_RANK,
            SEQUENCE,
            *COUNTED_ENDS,
        ),
    )
)

# Tensor parallel groups of more GPUs than this are nobody's wish, nor micro batches of more sequences.
_MOST_TENSOR = 64
_MOST_MICRO = 64
# Sequences from this length on may be worth cutting into as many parts as there are, up to so many; shorter
# ones into parts that are no shorter than these.
_LONG = 16384
_MOST_CONTEXT = 16
_SHORTEST_PART = 4096
# More GPUs than there are in one place, and many times the layouts that a model of today has on them: a slip
# of some digits must not take minutes.
_MOST_GPUS = 2**20
_MOST_TRIED = 4_000

NOTHING = Recompute()
SELECTIVE = Recompute("selective")
EVERYTHING = Recompute("full", "uniform", 1)


def layout_of(values: Values, shape: Shape) -> Layout:
    """The user's own."""
    return Layout(
        tensor=shape.tensor,
        pipeline=shape.pipeline,
        virtual=shape.virtual,
        context=shape.context,
        micro=shape.micro,
        sequence_parallel=values.flag(SEQUENCE),
        recompute=_own_recompute(values),
    )


def shape_with(values: Values, shape: Shape, layout: Layout) -> Shape:
    """The shape with a layout in place of its own."""
    given = values.whole(keys.EXPERT_TENSOR)
    return shape._replace(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual=layout.virtual,
        context=layout.context,
        micro=layout.micro,
        expert_tensor=layout.tensor if given is None else given,
        group=values.whole(keys.GROUP, layout.pipeline) or layout.pipeline,
    )


def changes_to(values: Values, layout: Layout) -> dict[str, Any]:
    """The keys of the job's configuration that differ with a layout, and their values there."""
    wanted: dict[str, Any] = {
        keys.TENSOR: layout.tensor,
        keys.PIPELINE: layout.pipeline,
        keys.VIRTUAL: layout.virtual,
        keys.CONTEXT: layout.context,
        keys.MICRO: layout.micro,
        SEQUENCE: layout.sequence_parallel,
    }
    if is_encoder_decoder(values) and layout.pipeline != values.whole(keys.PIPELINE, 1):
        wanted[keys.SPLIT_RANK] = layout.pipeline // 2
    if layout.counts_ends:
        wanted.update(dict.fromkeys(COUNTED_ENDS, True))
    if layout.recompute != _own_recompute(values):
        for stack in stacks_of(values):
            start = f"{stack.node}.{_RECOMPUTE}"
            wanted[f"{start}_granularity"] = layout.recompute.granularity
            wanted[f"{start}_method"] = layout.recompute.method
            wanted[f"{start}_num_layers"] = layout.recompute.layers
    absent = {keys.TENSOR: 1, keys.PIPELINE: 1, keys.CONTEXT: 1, SEQUENCE: False}
    return {
        key: value
        for key, value in wanted.items()
        if value != (absent.get(key) if values.raw(key) is None else values.raw(key))
        and not (key == keys.VIRTUAL and value is None and values.raw(key) == 1)
    }


def with_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with dotted keys set; the parts without a change are shared."""
    made = dict(config)
    for key, value in changes.items():
        *parents, name = key.split(".")
        node = made
        for parent in parents:
            below = node.get(parent)
            node[parent] = dict(below) if isinstance(below, Mapping) else {}
            node = node[parent]
        node[name] = value
    return made


def distance(layout: Layout, own: Layout) -> float:
    """How far a layout is from another: doublings of its sizes, and steps of recomputing more or less."""
    sizes = zip(
        (layout.tensor, layout.pipeline, layout.context, layout.micro),
        (own.tensor, own.pipeline, own.context, own.micro),
        strict=True,
    )
    far = sum(abs(math.log2(size / before)) for size, before in sizes)
    # These two hardly change what a step does, and follow from other sizes as often as not.
    far += abs(math.log2((layout.virtual or 1) / (own.virtual or 1))) / 2
    far += (layout.sequence_parallel != own.sequence_parallel) / 2
    far += (layout.counts_ends != own.counts_ends) / 2
    return far + abs(effort(layout.recompute) - effort(own.recompute))


def layouts(values: Values, shape: Shape, counts: Sequence[int], engine: str) -> Iterator[Layout]:
    """Every layout that passes the checks of the layout and the batch on each of these numbers of nodes."""
    own, world = layout_of(values, shape), counts[0] * shape.devices
    if world > _MOST_GPUS:
        return
    tried = 0
    splits = _Splits(values, engine)
    for tensor in tensor_sizes(values):
        if world % tensor or not (tensor == own.tensor or _is_near(tensor, shape.devices)):
            continue
        for context in _contexts(values, own.context, world // tensor):
            flags = splits.sequence_parallel(tensor, context)
            for pipeline in divisors(world // tensor // context) if flags else ():
                data = world // (tensor * context * pipeline)
                for (virtual, ends), micro in product(splits.virtual(pipeline), _micro_batches(shape, data)):
                    tried += 1
                    if tried > _MOST_TRIED:
                        return
                    bare = Layout(tensor, pipeline, virtual, context, micro, flags[0], NOTHING, ends)
                    moved = shape_with(values, shape, bare)
                    if not all(_runs(values, moved, nodes) for nodes in counts):
                        continue
                    for flag, recompute in product(flags, splits.recomputes(pipeline, virtual, ends)):
                        yield bare._replace(sequence_parallel=flag, recompute=recompute)


def _runs(values: Values, shape: Shape, nodes: int) -> bool:
    return fits(shape, nodes) and not any(map(is_of_layout, rampup_problems(values, shape, nodes)))


def is_of_layout(finding: Finding) -> bool:
    """Whether another layout may mend it: of what it names, one key at least is a layout's."""
    named = {finding.key, *finding.also}
    return bool(named & _SIZES) or any(_RECOMPUTE in key for key in named if key)


def _is_near(tensor: int, devices: int) -> bool:
    """Whether groups of tensor parallel GPUs share a node, or have whole ones."""
    return tensor <= _MOST_TENSOR and (devices % tensor == 0 or tensor % devices == 0)


class _Splits:
    """Ways to split a model, by the checks themselves; each is asked once."""

    def __init__(self, values: Values, engine: str) -> None:
        self._values, self._engine = values, engine
        self.virtual = cache(self._virtual)
        self.sequence_parallel = cache(self._sequence_parallel)
        self.recomputes = cache(self._recomputes)

    def _with(self, changes: Mapping[str, Any]) -> Values:
        return Values(with_changes(self._values.config, changes))

    def _virtual(self, pipeline: int) -> list[tuple[int | None, bool]]:
        """Return the virtual sizes that a pipeline size can have, and whether its ends count as layers.

        None is among the sizes; there are none if the pipeline cannot be. The ends count where the layers
        cannot be shared out else: 126 layers have no useful pipeline, and 126 + 2 have.
        """
        ends = not layers_fit(self._with(self._pipeline(pipeline, ends=False)))
        if ends and not self._can_count_ends:
            return []
        plain = self._pipeline(pipeline, ends)
        values = self._with(plain)
        if not layers_fit(values) or _found(split_rank_problems(values, self._engine)):
            return []
        sizes: list[int | None] = [None]
        stacks = stacks_of(values)
        if pipeline > 1 and len(stacks) == 1:
            for size in divisors((stacks[0].layers or 1) + 2 * ends):
                tried = self._with({**plain, keys.VIRTUAL: size})
                if size > 1 and layers_fit(tried) and not _found(virtual_problems(tried, self._engine)):
                    sizes.append(size)
        return [(size, ends) for size in sizes]

    @property
    def _can_count_ends(self) -> bool:
        """Whether the engine has it (NeMo), and the user says nothing else of the first and last stage."""
        told = (*COUNTED_ENDS, *_OWN_ENDS)
        return self._engine == "nemo" and not any(self._values.raw(key) for key in told)

    def _sequence_parallel(self, tensor: int, context: int) -> list[bool]:
        """Its values with a tensor and a context size: on where there is something to share; the user's own.

        Models other than GPTs keep what they have, where they can. It may be that none will do.
        """
        own = self._values.flag(SEQUENCE)
        flags = [own] if own or is_encoder_decoder(self._values) else [True, own]
        can = [flag for flag in flags if (tensor > 1 or not flag) and self._can(tensor, context, flag)]
        return can or [False] * self._can(tensor, context, False)

    def _recomputes(self, pipeline: int, virtual: int | None, ends: bool) -> list[Recompute]:
        """Return the user's own; nothing, attention's core, half of a model chunk's layers, all of them."""
        stack = stacks_of(self._with(self._pipeline(pipeline, ends)))[0]
        chunk = ((stack.layers or 1) + 2 * ends) // ((stack.stages or 1) * (virtual or 1))
        own = _own_recompute(self._values)
        half = [Recompute("full", "block", chunk // 2)] if chunk > 1 else []
        others = (NOTHING, SELECTIVE, *half, EVERYTHING)
        return [own, *(option for option in others if effort(option) != effort(own))]

    def _pipeline(self, size: int, ends: bool) -> dict[str, Any]:
        """Return the changes for a pipeline size without virtual stages."""
        changes: dict[str, Any] = {keys.PIPELINE: size, keys.VIRTUAL: None}
        if ends:
            changes.update(dict.fromkeys(COUNTED_ENDS, True))
        if is_encoder_decoder(self._values):
            changes[keys.SPLIT_RANK] = size // 2
        return changes

    def _can(self, tensor: int, context: int, flag: bool) -> bool:
        tried = self._with({keys.TENSOR: tensor, keys.CONTEXT: context, SEQUENCE: flag})
        found = (*sequence_parallel_problems(tried, self._engine), *context_problems(tried, self._engine))
        return not _found(found)


def _found(problems: Iterable[Finding]) -> bool:
    return next(iter(problems), None) is not None


def _contexts(values: Values, own: int, world: int) -> list[int]:
    """Return the user's own, none, and others where sequences are long."""
    length = 0 if is_encoder_decoder(values) else values.whole("model.encoder_seq_length", 0) or 0
    most = _MOST_CONTEXT if length >= _LONG else length // _SHORTEST_PART
    sizes = {1, own, *(size for size in divisors(world) if size <= most)}
    return [size for size in sorted(sizes) if world % size == 0]


def _micro_batches(shape: Shape, data: int) -> list[int]:
    if shape.batch % data:
        return []
    each = shape.batch // data
    sizes = {*range(1, _MOST_MICRO + 1), shape.micro}
    return [size for size in sorted(sizes) if each % size == 0]


def _own_recompute(values: Values) -> Recompute:
    stack = next(iter(stacks_of(values)), None)
    if stack is None or values.raw(f"{stack.node}.{_RECOMPUTE}_granularity") is None:
        return NOTHING
    start = f"{stack.node}.{_RECOMPUTE}"
    return Recompute(
        str(values.raw(f"{start}_granularity")),
        values.raw(f"{start}_method"),
        values.whole(f"{start}_num_layers", least=0),
    )


def effort(recompute: Recompute) -> float:
    """Steps from recomputing nothing."""
    if recompute.granularity == "full":
        if recompute.method != "block":
            return 2.0
        return 1.5 if recompute.layers else 0.0
    return 1.0 if recompute.granularity == "selective" else 0.0
