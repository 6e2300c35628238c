"""Search for layouts that pass the checks and fit into the GPUs' memory, the fastest or the nearest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import heappop, heappush
from typing import Any

from launcher.attained import attained
from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity
from launcher.checks.layout_candidates import is_of_layout, layouts
from launcher.checks.rules import layout as rules
from launcher.checks.rules import model, resources, training
from launcher.checks.rules.model import has_gpus
from launcher.estimates.memory import StageMemory, estimate_memory
from launcher.estimates.parallelism import (
    MOST_NODES,
    NODES,
    Layout,
    apply_changes,
    apply_layout,
    changes_to,
    distance,
    effort,
    gpu_of,
    layout_of,
    read_parallel_config,
)
from launcher.estimates.speed import Speed, work_of
from launcher.estimates.training import model_size, precision_of
from launcher.estimates.values import Values, full
from launcher.plan import Plan

# Layouts whose steps differ by less than this share are equally fast.
EQUAL_STEPS = 0.01
# A layout that fills more than the first share of its limit comes after others that are slower by less than
# the second: a longer sequence, another NCCL or a fragment would end it.
_FULL = 0.92
_WORTH_ROOM = 0.03
# The type in which NeMo sends and adds up gradients; by default 32 bits.
GRADIENTS = "model.optim.grad_sync_dtype"
# The checks that a layout has a part in.
_CHECKS = tuple(
    check
    for check in (*rules.CHECKS, *resources.CHECKS, *training.BATCHES, *model.CHECKS)
    if check.id.startswith(("layout.", "batch.", "elastic.", "model.recompute"))
)
# Sizes are not tried if even full recomputing exceeds the limit by this factor.
_HOPELESS = 1.1
# The limit of a search over numbers of nodes, in layouts: enough for the largest shipped size from one node
# on. A layout with an estimate of its memory counts as many that are only listed.
_MOST_WORK = 60_000
_ESTIMATE = 30


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A layout on a number of nodes.

    `changes` are the keys to override, as a job's configuration names them. `fullest` is the pipeline stage
    with the most memory, None if unknown. `seconds` of a step only compare layouts with each other; None if
    the model's sizes are unknown.
    """

    nodes: int
    layout: Layout
    changes: Mapping[str, Any]
    data: int
    micro_batches: int
    fullest: StageMemory | None
    seconds: float | None


class LayoutSearch:
    """A search for layouts of a plan, on its number of nodes."""

    def __init__(self, plan: Plan, facts: Facts) -> None:
        self.plan, self.facts = plan, facts
        self.nodes = plan.job.resources.nodes
        self.counted = gpu_of(plan.job.resources, facts.gpu_types)
        self.limit = int(self.counted.gpu.memory * (1 - plan.assumptions.memory_margin))
        self._config: Mapping[str, Any] = plan.job.config or {}
        self._values = Values(self._config)
        self.parallel = read_parallel_config(self._values)
        self._own = layout_of(self._values, self.parallel) if self.parallel is not None else None
        self._seconds = cache(self._seconds_of)
        self._fullest = cache(self._fullest_of)
        self._has_hope = cache(self._may_fit)
        self._speed, parallel = None, self.parallel
        work = work_of(self._values, parallel.devices, plan.job.engine) if parallel is not None else None
        if work is not None:
            self._speed = Speed(work, self.counted.gpu, self.nodes, attained(plan.assumptions.attained))

    @cached_property
    def own(self) -> Suggestion | None:
        """The user's own layout, even if it exceeds the memory; None if it breaks a rule."""
        findings = self._findings(self._config)
        if self._own is None or any(finding.severity is Severity.ERROR for finding in findings):
            return None
        return self._suggestion(self._own)

    def fits(self, suggestion: Suggestion) -> bool:
        """Return True if a suggestion fits into memory, as far as that is known."""
        return suggestion.fullest is None or suggestion.fullest.total <= self.limit

    def has_room(self, changes: Mapping[str, Any]) -> bool | None:
        """Return True if the plan fits into memory with changes; None if that is unknown."""
        stages = self._estimate(changes)
        return max(stage.total for stage in stages) <= self.limit if stages else None

    def best(self) -> Iterator[Suggestion]:
        """Yield the layouts that fit, the fastest first, of equally fast ones the nearest.

        There is one of each tensor × pipeline × context, from which the others differ in little. Layouts that
        leave little of the memory come later than their speed says.
        """
        seen: set[tuple[int, int, int]] = set()

        def unseen(suggestion: Suggestion) -> Iterator[Suggestion]:
            if _sizes(suggestion.layout) not in seen:
                seen.add(_sizes(suggestion.layout))
                yield suggestion

        full: list[tuple[float, int, Suggestion]] = []
        for number, layout in enumerate(sorted(self._layouts, key=self._rank_by_speed)):
            seconds = self._seconds(layout) or 0.0
            while full and full[0][0] < seconds:
                yield from unseen(heappop(full)[2])
            if _sizes(layout) in seen or (suggestion := self._find_fitting(layout)) is None:
                continue
            if suggestion.fullest is not None and suggestion.fullest.total > _FULL * self.limit:
                heappush(full, (seconds * (1 + _WORTH_ROOM), number, suggestion))
            else:
                yield from unseen(suggestion)
        while full:
            yield from unseen(heappop(full)[2])

    @property
    def work(self) -> int:
        """The approximate work of the search so far, in layouts."""
        return sum(map(len, self._groups.values())) + _ESTIMATE * self._fullest.cache_info().currsize

    def nearest(self) -> Suggestion | None:
        """Return the layout that fits with the fewest changes."""
        suggestions = map(self._find_fitting, sorted(self._layouts, key=self._rank_by_distance))
        return next((suggestion for suggestion in suggestions if suggestion is not None), None)

    @cached_property
    def _own_warnings(self) -> set[tuple[str, str]]:
        """The warnings of the user's own layout."""
        findings = self._findings(self._config)
        return {_identity(finding) for finding in findings if finding.severity is not Severity.ERROR}

    def _findings(self, config: Mapping[str, Any]) -> list[Finding]:
        plan = replace(self.plan, job=replace(self.plan.job, config=config))
        return [finding for check in _CHECKS for finding in check.find(plan, self.facts)]

    @cached_property
    def smallest(self) -> Suggestion | None:
        """The layout that takes the least memory: with full recomputing and the least micro batch."""
        least = [self._suggestion(self._least(group)) for group in self._groups.values()]
        return min(least, key=lambda small: small.fullest.total if small.fullest else 0, default=None)

    @cached_property
    def _layouts(self) -> list[Layout]:
        """All layouts that arithmetic allows."""
        return [layout for group in self._groups.values() for layout in group]

    @cached_property
    def _groups(self) -> dict[tuple[int, int, int], list[Layout]]:
        """All layouts that arithmetic allows, by the sizes that divide a model."""
        if self.parallel is None:
            return {}
        groups: dict[tuple[int, int, int], list[Layout]] = {}
        job = self.plan.job
        for layout in layouts(self._values, self.parallel, job.resources.node_counts, job.engine):
            groups.setdefault(_sizes(layout), []).append(layout)
        return groups

    def _may_fit(self, sizes: tuple[int, int, int]) -> bool:
        """Return True if a layout with these sizes may fit: the smallest one nearly does."""
        least = self._fullest(self._least(self._groups[sizes]))
        return least is None or least.total <= _HOPELESS * self.limit

    @staticmethod
    def _least(group: list[Layout]) -> Layout:
        def memory(layout: Layout) -> tuple[float, ...]:
            return layout.micro, layout.virtual or 1, -effort(layout.recompute), -layout.sequence_parallel

        return min(group, key=memory)

    def _rank_by_speed(self, layout: Layout) -> tuple[float, float]:
        seconds = self._seconds(layout)
        return math.log(seconds) // EQUAL_STEPS if seconds else 0.0, self._distance(layout)

    def _rank_by_distance(self, layout: Layout) -> tuple[float, float]:
        return self._distance(layout), self._seconds(layout) or 0.0

    def _distance(self, layout: Layout) -> float:
        assert self._own is not None
        return distance(layout, self._own)

    def _find_fitting(self, layout: Layout) -> Suggestion | None:
        if not self._has_hope(_sizes(layout)):
            return None
        fullest = self._fullest(layout)
        if fullest is not None and fullest.total > self.limit:
            return None
        suggestion = self._suggestion(layout)
        findings = filter(is_of_layout, self._findings(apply_changes(self._config, suggestion.changes)))
        is_clean = all(_identity(finding) in self._own_warnings for finding in findings)
        return suggestion if is_clean else None

    def _suggestion(self, layout: Layout) -> Suggestion:
        assert self.parallel is not None
        parallel = apply_layout(self._values, self.parallel, layout)
        return Suggestion(
            nodes=self.nodes,
            layout=layout,
            changes=changes_to(self._values, layout),
            data=parallel.data(self.nodes),
            micro_batches=parallel.micro_batches(self.nodes),
            fullest=self._fullest(layout),
            seconds=self._seconds(layout),
        )

    def _estimate(self, changes: Mapping[str, Any]) -> tuple[StageMemory, ...] | None:
        if not has_gpus(self.plan):
            return None
        return estimate_memory(apply_changes(self._config, changes), self.nodes, self.plan.job.engine)

    def _seconds_of(self, layout: Layout) -> float | None:
        if self._speed is None or self.parallel is None:
            return None
        return self._speed.step(layout, layout.of(self.parallel))

    def _fullest_of(self, layout: Layout) -> StageMemory | None:
        stages = self._estimate(changes_to(self._values, layout))
        return max(stages or (), key=lambda stage: stage.total, default=None)


def _sizes(layout: Layout) -> tuple[int, int, int]:
    """Return the sizes that divide a model."""
    return layout.tensor, layout.pipeline, layout.context


def _identity(finding: Finding) -> tuple[str, str]:
    return finding.id, finding.message


def with_nodes(plan: Plan, nodes: int) -> Plan:
    resources = replace(plan.job.resources, nodes=nodes, max_nodes=None)
    config = apply_changes(plan.job.config or {}, {NODES: nodes})
    return replace(plan, job=replace(plan.job, config=config, resources=resources))


def halve_gradients(plan: Plan) -> Plan | None:
    """Return a plan with gradients in bf16; None if its engine does not support them, or it has them."""
    values = Values(plan.job.config or {})
    if plan.job.engine != "nemo" or precision_of(values) != "bf16" or values.raw(GRADIENTS) is not None:
        return None
    return replace(plan, job=replace(plan.job, config=apply_changes(values.config, {GRADIENTS: "bf16"})))


def find_own_with_half_gradients(search: LayoutSearch) -> Suggestion | None:
    """Return the user's own layout with gradients in bf16, where these alone make it fit."""
    own, changes = search.own, {GRADIENTS: "bf16"}
    if own is None or search.fits(own) or halve_gradients(search.plan) is None:
        return None
    return replace(own, changes=changes) if search.has_room(changes) else None


def find_best_with_half_gradients(plan: Plan, facts: Facts) -> Iterator[Suggestion]:
    """Yield the layouts that fit with gradients in bf16, the fastest first."""
    halved = halve_gradients(plan)
    for suggestion in LayoutSearch(halved, facts).best() if halved is not None else ():
        yield replace(suggestion, changes={GRADIENTS: "bf16", **suggestion.changes})


def search_least_nodes(plan: Plan, facts: Facts) -> Suggestion | None:
    """Return the fastest layout on the least nodes on which one fits, within the limit of the search."""
    parallel = read_parallel_config(Values(plan.job.config or {}))
    if parallel is None or plan.job.resources.is_elastic:
        return None
    model = model_size(Values(plan.job.config or {}))
    # The least bytes of all GPUs together: weights, and Adam's copy of them and its two moments.
    least_bytes = (2 + 3 * 4) * model.parameters if model is not None else 0
    least, work = least_bytes // (LayoutSearch(plan, facts).limit * parallel.devices), 0
    for nodes in range(max(least, 1), MOST_NODES + 1):
        if nodes != plan.job.resources.nodes:
            search = LayoutSearch(with_nodes(plan, nodes), facts)
            fastest = next(search.best(), None)
            if fastest is not None:
                return replace(fastest, changes={NODES: nodes, **fastest.changes})
            work += search.work
            if work > _MOST_WORK:
                break
    return None


def overrides(config: Mapping[str, Any], suggestion: Suggestion) -> list[str]:
    """Return the overrides for a command line; a key that the tree does not show needs a ``+``."""
    values, words = Values(config), []
    for key, value in suggestion.changes.items():
        parent, _, name = key.rpartition(".")
        sign = "" if name in (values.node(parent) or {}) else "+"
        words.append(f"{sign}{full(key)}={'null' if value is None else value}")
    return words
