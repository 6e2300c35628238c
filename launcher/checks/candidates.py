"""The layouts that arithmetic allows a model on a number of nodes, and how far each is from the user's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from arithmetic.layout import ParallelConfig, fits
from launcher.checks.findings import Finding
from launcher.checks.rules.layout import (
    context_problems,
    layers_fit,
    sequence_parallel_problems,
    split_rank_problems,
    tensor_sizes,
    virtual_problems,
)
from launcher.checks.rules.training import rampup_problems_at
from launcher.estimates import parallelism as keys
from launcher.estimates.layout import (
    COUNTED_ENDS,
    EVERYTHING,
    NOTHING,
    RECOMPUTE,
    SELECTIVE,
    SEQUENCE,
    Layout,
    Recompute,
    effort,
    layout_of,
    own_recompute,
    parallel_config_with,
    with_changes,
)
from launcher.estimates.parallelism import is_encoder_decoder, stacks_of
from launcher.estimates.values import Values, divisors, full

_OWN_ENDS = tuple(f"model.num_layers_in_{place}_pipeline_stage" for place in ("first", "last"))
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


def layouts(values: Values, shape: ParallelConfig, counts: Sequence[int], engine: str) -> Iterator[Layout]:
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
                    moved = parallel_config_with(values, shape, bare)
                    if not all(_runs(values, moved, nodes) for nodes in counts):
                        continue
                    for flag, recompute in product(flags, splits.recomputes(pipeline, virtual, ends)):
                        yield bare._replace(sequence_parallel=flag, recompute=recompute)


def _runs(values: Values, shape: ParallelConfig, nodes: int) -> bool:
    return fits(shape, nodes) and not any(map(is_of_layout, rampup_problems_at(values, shape, nodes)))


def is_of_layout(finding: Finding) -> bool:
    """Whether another layout may mend it: of what it names, one key at least is a layout's."""
    named = {finding.key, *finding.also}
    return bool(named & _SIZES) or any(RECOMPUTE in key for key in named if key)


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
        own = own_recompute(self._values)
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


def _micro_batches(shape: ParallelConfig, data: int) -> list[int]:
    if shape.batch % data:
        return []
    each = shape.batch // data
    sizes = {*range(1, _MOST_MICRO + 1), shape.micro}
    return [size for size in sorted(sizes) if each % size == 0]
