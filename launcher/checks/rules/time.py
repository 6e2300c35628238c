"""Trainings that take longer than their jobs, or than anyone waits."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity, warning
from launcher.estimates.cost import Cost, estimate_cost
from launcher.estimates.model import model_size
from launcher.estimates.values import Values, count, full
from launcher.plan import Plan

_DAY = 24 * 3600
_LONGEST = 365 * _DAY
_LINKS = "resilience.links"
_STEPS = "trainer.max_steps"


def training_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """The jobs of a chain are enough for the training, which ends within a year.

    Without a chain nothing is said of the limit: many a run goes on with its user's next launch.
    """
    cost = estimate_cost(plan, facts.gpu_types)
    if cost is None:
        yield from _not_told(plan)
        return
    limit_key, links = f"{plan.job.stage}.run.time_limit", plan.job.chain.links
    if cost.links is not None and 1 < links < cost.links:
        yield warning(
            "time.training",
            _LINKS,
            links,
            f"{count(links, 'job')} of {plan.job.resources.time_limit} end before the training does:"
            f" {_length(cost)}, which is {count(cost.links, 'job')}",
            f"{_LINKS}={cost.links}, a longer {limit_key}, or more nodes",
            also=(limit_key, _STEPS),
        )
    if cost.seconds > _LONGEST:
        yield warning(
            "time.training",
            _STEPS,
            cost.steps,
            f"more than a year: {_length(cost)} for {cost.tokens:,} tokens",
            "fewer steps, or more nodes; estimates.mfu=... where it is known better",
            also=("trainer.num_nodes",),
        )


def _not_told(plan: Plan) -> Iterator[Finding]:
    """Say that nothing is modelled of how fast experts are, where the rest of the estimate is there."""
    values = Values(plan.job.config or {})
    model = model_size(values)
    if model is None or not model.has_experts or not values.whole(_STEPS) or plan.assumptions.mfu is not None:
        return
    key = "model.num_moe_experts"
    why = f"{full(key)}={values.raw(key)}: how long experts take is not modelled: estimates.mfu=... says it"
    told = f"not looked at: how long the training takes ({why})"
    yield Finding("time.training", Severity.SKIPPED, None, told, why=why)


def _length(cost: Cost) -> str:
    return f"about {told_days(cost.seconds)} on {count(cost.gpus, 'GPU')} at MFU {cost.mfu:.2f}"


def told_days(seconds: float) -> str:
    """A duration as people tell it: in days, in hours where it is less than two days, or in minutes."""
    if seconds < 5400:
        return f"{seconds / 60:.1f} minutes"
    if seconds < 2 * _DAY:
        return f"{seconds / 3600:.1f} hours"
    days = seconds / _DAY
    return f"{days:,.0f} days" if days >= 100 else f"{days:.1f} days"
