"""Layouts that fit: those that pass the checks and the GPUs' memory, the fastest or the nearest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

from arithmetic.layout import ParallelConfig
from launcher.attained import attained
from launcher.checks.candidates import is_of_layout, layouts
from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity
from launcher.checks.registry import CHECKS
from launcher.checks.rules.memory import has_gpus
from launcher.estimates import parallelism as keys
from launcher.estimates.gpus import gpu_of
from launcher.estimates.layout import (
    Layout,
    changes_to,
    distance,
    effort,
    layout_of,
    parallel_config_with,
    with_changes,
)
from launcher.estimates.memory import StageMemory, estimate_memory
from launcher.estimates.model import model_size, precision_of
from launcher.estimates.parallelism import read_parallel_config
from launcher.estimates.speed import Speed, running_of, work_of
from launcher.estimates.training import uncounted
from launcher.estimates.values import Values, count, full
from launcher.plan import Plan

# Layouts whose steps differ by less than this part are equals.
_EQUAL = 0.01
# One that fills more than so much of what it may take comes after others that are less than so much slower:
# what a longer sequence, another NCCL or a fragment takes more would end it.
_FULL = 0.92
_WORTH_ROOM = 0.03
# NeMo sends and adds up gradients in this type; 32 bits unless it is named.
GRADIENTS = "model.optim.grad_sync_dtype"
# The checks that a layout has a part in.
_ASKED = ("layout.", "batch.", "elastic.", "model.recompute")
# Where a layout that recomputes all does not fit by so much, no other one of its sizes is tried.
_HOPELESS = 1.1
# When to give up looking at more nodes, in layouts; one whose memory is estimated is as much work as so many
# that are only listed. It is as much as the largest shipped size takes from one node on.
_MOST_WORK = 60_000
_ESTIMATE = 30


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A layout on a number of nodes.

    `changes` are the keys to override, as a job's configuration names them. `fullest` is the pipeline stage
    with the most memory, ``None`` where memory cannot be told. `seconds` of a step compare layouts with each
    other, and with nothing else; `seconds` is ``None`` where the model's sizes are not known.
    """

    nodes: int
    layout: Layout
    changes: Mapping[str, Any]
    data: int
    micro_batches: int
    fullest: StageMemory | None
    seconds: float | None


class Suggester:
    """The layouts for a plan, on its number of nodes."""

    def __init__(self, plan: Plan, facts: Facts) -> None:
        self.plan, self.facts = plan, facts
        self.nodes = plan.job.resources.nodes
        self.counted = gpu_of(plan.job.resources, facts.gpu_types)
        self.limit = int(self.counted.gpu.memory * (1 - plan.assumptions.memory_margin))
        self._config: Mapping[str, Any] = plan.job.config or {}
        self._values = Values(self._config)
        self.shape = read_parallel_config(self._values)
        self._own = layout_of(self._values, self.shape) if self.shape is not None else None
        # The least micro batch that was too much for a layout: more of it is too.
        self._too_much: dict[Layout, int] = {}
        self._times: dict[Layout, float] = {}
        self._hopes: dict[tuple[int, ...], bool] = {}
        self._stages: dict[Layout, tuple[StageMemory, ...] | None] = {}
        self._speed = self._speed_of(plan) if self.shape is not None else None

    def _speed_of(self, plan: Plan) -> Speed | None:
        assert self.shape is not None
        engine, work = plan.job.engine, work_of(self._values, self.shape.devices, plan.job.engine)
        if work is None:
            return None
        running = running_of(self._values, engine, work.vocabulary)
        constants = attained(plan.assumptions.attained)
        return Speed(work, running, self.counted.gpu, self.nodes, constants)

    @cached_property
    def own(self) -> Suggestion | None:
        """The user's own layout, whether or not it fits into memory; ``None`` if it breaks a rule."""
        if self._own is None or _errors(self._asked(self._config)):
            return None
        return self._made(self._own)

    def fits(self, suggestion: Suggestion) -> bool:
        return suggestion.fullest is None or suggestion.fullest.total <= self.limit

    def has_room(self, changes: Mapping[str, Any]) -> bool | None:
        """Whether the plan fits into memory with changes; ``None`` where that cannot be told."""
        stages = self._estimate(changes)
        return max(stage.total for stage in stages) <= self.limit if stages else None

    def best(self) -> Iterator[Suggestion]:
        """Yield those that fit, the fastest first, of equals the nearest.

        One of each tensor × pipeline × context: the others differ from it in little. Those that leave little
        of the memory come later than they are fast.
        """
        seen: set[tuple[int, ...]] = set()
        full: list[tuple[float, int, Suggestion]] = []
        for number, layout in enumerate(self._ranked(self._by_speed)):
            seconds = self._seconds(layout) or 0.0
            while full and full[0][0] < seconds:
                yield from self._unseen(heappop(full)[2], seen)
            if _sizes(layout) in seen or (found := self._fitting(layout)) is None:
                continue
            if found.fullest is not None and found.fullest.total > _FULL * self.limit:
                heappush(full, (seconds * (1 + _WORTH_ROOM), number, found))
            else:
                yield from self._unseen(found, seen)
        while full:
            yield from self._unseen(heappop(full)[2], seen)

    @staticmethod
    def _unseen(found: Suggestion, seen: set[tuple[int, ...]]) -> Iterator[Suggestion]:
        if _sizes(found.layout) not in seen:
            seen.add(_sizes(found.layout))
            yield found

    @property
    def work(self) -> int:
        """What looking for layouts has taken so far, by and large, in layouts."""
        return sum(map(len, self._groups.values())) + _ESTIMATE * len(self._stages)

    def nearest(self) -> Suggestion | None:
        """The one that fits with the least to change."""
        found = map(self._fitting, self._ranked(self._by_distance))
        return next((one for one in found if one is not None), None)

    @cached_property
    def _always(self) -> set[tuple[str, str]]:
        """Warnings that the user has anyway."""
        found = self._asked(self._config)
        return {_told(finding) for finding in found if finding.severity is not Severity.ERROR}

    def _asked(self, config: Mapping[str, Any]) -> list[Finding]:
        plan = replace(self.plan, job=replace(self.plan.job, config=config))
        asked = [check for check in CHECKS if check.id.startswith(_ASKED)]
        return [finding for check in asked for finding in check.find(plan, self.facts)]

    @cached_property
    def smallest(self) -> Suggestion | None:
        """The one that takes the least memory, of those with the least micro batch that recompute all."""
        made = [self._made(self._least(group)) for group in self._groups.values()]
        return min(made, key=lambda one: one.fullest.total if one.fullest else 0, default=None)

    @cached_property
    def _layouts(self) -> list[Layout]:
        """All that the arithmetic allows, less those whose parameters are too much already."""
        groups = self._groups.items()
        return [layout for sizes, group in groups if not self._is_too_large(sizes) for layout in group]

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], list[Layout]]:
        """All that the arithmetic allows, by the sizes that a model is divided by."""
        if self.shape is None:
            return {}
        groups: dict[tuple[int, ...], list[Layout]] = {}
        job = self.plan.job
        for layout in layouts(self._values, self.shape, job.resources.node_counts, job.engine):
            groups.setdefault(_sizes(layout), []).append(layout)
        return groups

    def _is_too_large(self, sizes: tuple[int, ...]) -> bool:
        """Whether what a GPU keeps of parameters is too much already, before anything is estimated."""
        if self._speed is None or not has_gpus(self.plan):
            return False
        tensor, pipeline, _ = sizes
        return self._speed.bytes_at_least(tensor * pipeline) > self.limit

    def _has_hope(self, layout: Layout) -> bool:
        """Whether any layout with these sizes may fit: the one of them that takes the least does, nearly."""
        sizes = _sizes(layout)
        if sizes not in self._hopes:
            least = self._fullest(self._least(self._groups[sizes]))
            self._hopes[sizes] = least is None or least.total <= _HOPELESS * self.limit
        return self._hopes[sizes]

    @staticmethod
    def _least(group: list[Layout]) -> Layout:
        def takes(one: Layout) -> tuple[float, ...]:
            return one.micro, one.virtual or 1, -effort(one.recompute), -one.sequence_parallel

        return min(group, key=takes)

    def _ranked(self, key: Callable[[Layout], tuple[float, float]]) -> list[Layout]:
        return sorted(self._layouts, key=key)

    def _by_speed(self, layout: Layout) -> tuple[float, float]:
        seconds = self._seconds(layout)
        return math.log(seconds) // _EQUAL if seconds else 0.0, self._far(layout)

    def _by_distance(self, layout: Layout) -> tuple[float, float]:
        return self._far(layout), self._seconds(layout) or 0.0

    def _far(self, layout: Layout) -> float:
        assert self._own is not None
        return distance(layout, self._own)

    def _fitting(self, layout: Layout) -> Suggestion | None:
        alike = layout._replace(micro=0)
        if layout.micro >= self._too_much.get(alike, layout.micro + 1):
            return None
        if not self._has_hope(layout):
            return None
        fullest = self._fullest(layout)
        if fullest is not None and fullest.total > self.limit:
            self._too_much[alike] = layout.micro
            return None
        made = self._made(layout)
        found = filter(is_of_layout, self._asked(with_changes(self._config, made.changes)))
        return made if not any(_told(finding) not in self._always for finding in found) else None

    def _made(self, layout: Layout) -> Suggestion:
        shape = self._with(layout)
        return Suggestion(
            nodes=self.nodes,
            layout=layout,
            changes=changes_to(self._values, layout),
            data=shape.data(self.nodes),
            micro_batches=shape.micro_batches(self.nodes),
            fullest=self._fullest(layout),
            seconds=self._seconds(layout),
        )

    def _with(self, layout: Layout) -> ParallelConfig:
        assert self.shape is not None
        return parallel_config_with(self._values, self.shape, layout)

    def _estimate(self, changes: Mapping[str, Any]) -> tuple[StageMemory, ...] | None:
        if not has_gpus(self.plan):
            return None
        return estimate_memory(with_changes(self._config, changes), self.nodes, self.plan.job.engine)

    def _seconds(self, layout: Layout) -> float | None:
        if self._speed is None or self.shape is None:
            return None
        if layout not in self._times:
            shape = self.shape._replace(
                tensor=layout.tensor,
                pipeline=layout.pipeline,
                virtual=layout.virtual,
                context=layout.context,
                micro=layout.micro,
            )
            self._times[layout] = self._speed.step(layout, shape)
        return self._times[layout]

    def _fullest(self, layout: Layout) -> StageMemory | None:
        if layout not in self._stages:
            self._stages[layout] = self._estimate(changes_to(self._values, layout))
        stages = self._stages[layout]
        return max(stages, key=lambda stage: stage.total) if stages else None


def _sizes(layout: Layout) -> tuple[int, ...]:
    """Return the sizes that a model is divided by."""
    return layout.tensor, layout.pipeline, layout.context


def _told(finding: Finding) -> tuple[str, str]:
    return finding.id, finding.message


def _errors(findings: list[Finding]) -> bool:
    return any(finding.severity is Severity.ERROR for finding in findings)


def with_nodes(plan: Plan, nodes: int) -> Plan:
    """A plan on another number of nodes."""
    resources = replace(plan.job.resources, nodes=nodes, max_nodes=None)
    config = with_changes(plan.job.config or {}, {keys.NODES: nodes})
    return replace(plan, job=replace(plan.job, config=config, resources=resources))


def with_half_gradients(plan: Plan) -> Plan | None:
    """Return a plan with gradients in bf16; None where its engine has none, or it has them already."""
    values = Values(plan.job.config or {})
    if plan.job.engine != "nemo" or precision_of(values) != "bf16" or values.raw(GRADIENTS) is not None:
        return None
    return replace(plan, job=replace(plan.job, config=with_changes(values.config, {GRADIENTS: "bf16"})))


def own_with_half_gradients(suggester: Suggester) -> Suggestion | None:
    """Return the user's own layout with gradients in bf16, where these alone make it fit."""
    own, changes = suggester.own, {GRADIENTS: "bf16"}
    if own is None or suggester.fits(own) or with_half_gradients(suggester.plan) is None:
        return None
    return replace(own, changes=changes) if suggester.has_room(changes) else None


def best_with_half_gradients(plan: Plan, facts: Facts) -> Iterator[Suggestion]:
    """Yield the layouts that fit with gradients in bf16, the fastest first."""
    halved = with_half_gradients(plan)
    for found in Suggester(halved, facts).best() if halved is not None else ():
        yield replace(found, changes={GRADIENTS: "bf16", **found.changes})


def on_least_nodes(plan: Plan, facts: Facts) -> Suggestion | None:
    """The fastest layout on the least nodes on which there is one that fits, as far as is looked for it."""
    shape = read_parallel_config(Values(plan.job.config or {}))
    if shape is None or plan.job.resources.is_elastic:
        return None
    limit = Suggester(plan, facts).limit
    least, work = _least_bytes(plan) // (limit * shape.devices), 0
    for nodes in range(max(least, 1), keys.MOST_NODES + 1):
        if nodes != plan.job.resources.nodes:
            suggester = Suggester(with_nodes(plan, nodes), facts)
            found = next(suggester.best(), None)
            if found is not None:
                return replace(found, changes={keys.NODES: nodes, **found.changes})
            work += suggester.work
            if work > _MOST_WORK:
                break
    return None


def _least_bytes(plan: Plan) -> int:
    """What all GPUs together hold at the least: the weights, and Adam's copy of them and its two moments."""
    model = model_size(Values(plan.job.config or {}))
    return (2 + 3 * 4) * model.parameters if model is not None else 0


def would_fit(plan: Plan, facts: Facts) -> str:
    """Lines that name layouts that fit: the nearest, the fastest; or what `why_none` tells.

    Layouts whose memory is not counted are not named.
    """
    config = plan.job.config or {}
    why = uncounted(Values(config)) if has_gpus(plan) else None
    if why is not None:
        return f"no layout is suggested: {why}"
    suggester = Suggester(plan, facts)
    nearest = suggester.nearest()
    if nearest is None:
        halved = next(best_with_half_gradients(plan, facts), None)
        if halved is not None:
            return f"would fit, with gradients in bf16: {_pasted(config, halved)}"
        return why_none(suggester, on_least_nodes(plan, facts), config)
    lines = [f"would fit: {_pasted(config, nearest)}"]
    fastest = next(suggester.best(), None)
    if fastest and fastest.seconds and nearest.seconds:
        saved = 1 - fastest.seconds / nearest.seconds
        if saved > 2 * _EQUAL:
            lines.append(f"so would, with {saved:.0%} less time for a step: {_pasted(config, fastest)}")
    halved = own_with_half_gradients(suggester)
    if halved is not None:
        lines.append(f"so would this layout, with gradients in bf16: {_pasted(config, halved)}")
    return "\n".join(lines)


def why_none(suggester: Suggester, more: Suggestion | None, config: Mapping[str, Any]) -> str:
    """Lines for where nothing fits: by how much the smallest does not, and on how many nodes one would."""
    resources, smallest = suggester.plan.job.resources, suggester.smallest
    if resources.is_elastic:
        counts = resources.node_counts
        return f"no layout fits every number of nodes from {counts[0]} to {counts[-1]}"
    told = f"no layout fits on {count(suggester.nodes, 'node')}"
    if smallest is None:
        told += " with these batch sizes"
    elif suggester.fits(smallest):
        told += ", for other reasons than memory: slipway check tells them"
    elif smallest.fullest is not None:
        layout, memory = smallest.layout, suggester.counted.gpu.memory
        told += (
            f": the smallest, tensor {layout.tensor} × pipeline {layout.pipeline} × context {layout.context},"
            f" takes {gib(smallest.fullest.total)} of {gib(memory)} GiB on stage {smallest.fullest.stage}"
        )
    if more is None:
        return f"{told}\nnor was a number of nodes found on which one would, of those up to {keys.MOST_NODES}"
    return f"{told}\non {count(more.nodes, 'node')} would: {_pasted(config, more)}"


def gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def overrides(config: Mapping[str, Any], suggestion: Suggestion) -> list[str]:
    """What to add to a command line; a key that the tree does not show needs a ``+``."""
    values = Values(config)
    return [f"{_sign(values, key)}{full(key)}={_written(value)}" for key, value in suggestion.changes.items()]


def _pasted(config: Mapping[str, Any], suggestion: Suggestion) -> str:
    return " ".join(overrides(config, suggestion)) or "it, as it is"


def _sign(values: Values, key: str) -> str:
    parent, _, name = key.rpartition(".")
    return "" if name in (values.node(parent) or {}) else "+"


def _written(value: Any) -> str:
    return "null" if value is None else str(value)
