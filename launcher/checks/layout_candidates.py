"""The layouts that arithmetic and the checks allow a model on a number of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from launcher.checks.findings import Finding
from launcher.checks.rules import layout as rules
from launcher.checks.rules.training import rampup_problems_at
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import (
    Layout,
    Recompute,
    apply_changes,
    apply_layout,
    effort,
    is_encoder_decoder,
    layout_of,
    read_recompute,
    stacks_of,
)
from launcher.estimates.values import Values, divisors, full
from slipway.arithmetic.layout import ParallelConfig, fits

_OF_LAYOUT = (
    *(keys.TENSOR, keys.PIPELINE, keys.VIRTUAL, keys.CONTEXT, keys.MICRO, keys.SPLIT_RANK, keys.SEQUENCE),
    *keys.COUNTED_ENDS,
)
_SIZES = frozenset(map(full, _OF_LAYOUT))

# The largest useful tensor parallel groups, in GPUs, and micro batches, in sequences.
_MOST_TENSOR = 64
_MOST_MICRO = 64
# Sequences from this length on are cut into up to so many parts; shorter ones into parts of at least so many
# tokens.
_LONG = 16384
_MOST_CONTEXT = 16
_SHORTEST_PART = 4096
# More GPUs than any cluster has, and many times the layouts of a model on them: a slip of some digits must
# not take minutes.
_MOST_GPUS = 2**20
_MOST_TRIED = 4_000


def layouts(values: Values, parallel: ParallelConfig, counts: Sequence[int], engine: str) -> Iterator[Layout]:
    """Yield each layout that passes the checks of layout and batch on each of these numbers of nodes."""
    own, world = layout_of(values, parallel), counts[0] * parallel.devices
    if world > _MOST_GPUS:
        return
    tried = 0
    splits = _Splits(values, engine)
    for tensor in rules.tensor_sizes(values):
        if world % tensor or not (tensor == own.tensor or _is_near(tensor, parallel.devices)):
            continue
        for context in _contexts(values, own.context, world // tensor):
            flags = splits.sequence_parallel(tensor, context)
            for pipeline in divisors(world // tensor // context) if flags else ():
                data = world // (tensor * context * pipeline)
                for (virtual, ends), micro in product(
                    splits.virtual(pipeline), _micro_batches(parallel, data)
                ):
                    tried += 1
                    if tried > _MOST_TRIED:
                        return
                    bare = Layout(tensor, pipeline, virtual, context, micro, flags[0], keys.NOTHING, ends)
                    changed = apply_layout(values, parallel, bare)
                    if not all(_runs(values, changed, nodes) for nodes in counts):
                        continue
                    for flag, recompute in product(flags, splits.recomputes(pipeline, virtual, ends)):
                        yield bare._replace(sequence_parallel=flag, recompute=recompute)


def _runs(values: Values, parallel: ParallelConfig, nodes: int) -> bool:
    return fits(parallel, nodes) and not any(map(is_of_layout, rampup_problems_at(values, parallel, nodes)))


def is_of_layout(finding: Finding) -> bool:
    """Return True if a finding has a key of the layout."""
    named = {finding.key, *finding.also}
    return bool(named & _SIZES) or any(keys.RECOMPUTE in key for key in named if key)


def _is_near(tensor: int, devices: int) -> bool:
    """Return True if groups of tensor parallel GPUs share a node, or have whole nodes."""
    return tensor <= _MOST_TENSOR and (devices % tensor == 0 or tensor % devices == 0)


class _Splits:
    """Ways to split a model, by the checks themselves; each is computed once."""

    def __init__(self, values: Values, engine: str) -> None:
        self._values, self._engine = values, engine
        self.virtual = cache(self._virtual)
        self.sequence_parallel = cache(self._sequence_parallel)
        self.recomputes = cache(self._recomputes)

    def _apply(self, changes: Mapping[str, Any]) -> Values:
        return Values(apply_changes(self._values.config, changes))

    def _virtual(self, pipeline: int) -> list[tuple[int | None, bool]]:
        """Return the virtual sizes of a pipeline size, each with True where its ends count as layers.

        None is among the sizes; the list is empty for an invalid pipeline. The ends count if the layers are
        not divisible otherwise: 126 layers have no useful pipeline, 126 + 2 have. Only NeMo supports that,
        and only without keys for the first and last stage.
        """
        ends = not rules.layers_fit(self._apply(self._pipeline(pipeline, ends=False)))
        of_ends = (*keys.COUNTED_ENDS, *keys.OWN_ENDS)
        if ends and (self._engine != "nemo" or any(self._values.raw(key) for key in of_ends)):
            return []
        plain = self._pipeline(pipeline, ends)
        values = self._apply(plain)
        if not rules.layers_fit(values) or _has_any(rules.split_rank_problems(values, self._engine)):
            return []
        sizes: list[int | None] = [None]
        stacks = stacks_of(values)
        if pipeline > 1 and len(stacks) == 1:
            for size in divisors(max(stacks[0].layers, 1) + 2 * ends):
                tried = self._apply({**plain, keys.VIRTUAL: size})
                if size == 1 or not rules.layers_fit(tried):
                    continue
                if not _has_any(rules.virtual_problems(tried, self._engine)):
                    sizes.append(size)
        return [(size, ends) for size in sizes]

    def _sequence_parallel(self, tensor: int, context: int) -> list[bool]:
        """Return the valid values for a tensor and a context size: on, the user's own, or an empty list.

        Models other than GPTs keep their value, where it is valid.
        """
        own = self._values.flag(keys.SEQUENCE)
        flags = [own] if own or is_encoder_decoder(self._values) else [True, own]
        can = [flag for flag in flags if (tensor > 1 or not flag) and self._can(tensor, context, flag)]
        return can or [False] * self._can(tensor, context, False)

    def _recomputes(self, pipeline: int, virtual: int | None, ends: bool) -> list[Recompute]:
        """Return the user's recomputing, none, attention's core, half of a chunk's layers, and all layers."""
        stack = stacks_of(self._apply(self._pipeline(pipeline, ends)))[0]
        chunk = (max(stack.layers, 1) + 2 * ends) // (max(stack.stages, 1) * (virtual or 1))
        own = read_recompute(self._values)
        half = [Recompute("full", "block", chunk // 2)] if chunk > 1 else []
        others = (keys.NOTHING, keys.SELECTIVE, *half, keys.EVERYTHING)
        return [own, *(option for option in others if effort(option) != effort(own))]

    def _pipeline(self, size: int, ends: bool) -> dict[str, Any]:
        """Return the changes for a pipeline size without virtual stages."""
        changes: dict[str, Any] = {keys.PIPELINE: size, keys.VIRTUAL: None}
        if ends:
            changes.update(dict.fromkeys(keys.COUNTED_ENDS, True))
        if is_encoder_decoder(self._values):
            changes[keys.SPLIT_RANK] = size // 2
        return changes

    def _can(self, tensor: int, context: int, flag: bool) -> bool:
        tried = self._apply({keys.TENSOR: tensor, keys.CONTEXT: context, keys.SEQUENCE: flag})
        tests = (rules.sequence_parallel_problems, rules.context_problems)
        return not any(_has_any(test(tried, self._engine)) for test in tests)


def _has_any(problems: Iterable[Finding]) -> bool:
    return next(iter(problems), None) is not None


def _contexts(values: Values, own: int, world: int) -> list[int]:
    """Return the context sizes: the user's own, 1, and others where sequences are long."""
    length = 0 if is_encoder_decoder(values) else values.whole("model.encoder_seq_length", 0) or 0
    most = _MOST_CONTEXT if length >= _LONG else length // _SHORTEST_PART
    sizes = {1, own, *(size for size in divisors(world) if size <= most)}
    return [size for size in sorted(sizes) if world % size == 0]


def _micro_batches(parallel: ParallelConfig, data: int) -> list[int]:
    if parallel.batch % data:
        return []
    each = parallel.batch // data
    sizes = {*range(1, _MOST_MICRO + 1), parallel.micro}
    return [size for size in sorted(sizes) if each % size == 0]
