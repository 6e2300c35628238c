"""Time, computing and space of a training, in lines."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checks.rules.files import told_bytes
from launcher.checks.rules.time import told_days
from launcher.estimates.cost import Cost, TrainingAmount
from launcher.plan import Plan
from launcher.ui.formatting import count


def cost_lines(plan: Plan, cost: Cost) -> Iterator[tuple[str, str]]:
    """What each line is about, and the line."""
    yield "time", _time(plan, cost)
    yield "compute", _compute(plan, cost)
    yield "space", _space(cost)


def amount_lines(amount: TrainingAmount) -> Iterator[tuple[str, str]]:
    """Return the same lines without a time, for a training whose step time is not modelled."""
    yield "compute", _amount(amount)
    yield "space", _space(amount)


def _time(plan: Plan, cost: Cost) -> str:
    told = f"{told_days(cost.seconds)}: {cost.steps:,} steps of {cost.seconds_per_step:.3g} s"
    limit = plan.job.resources.time_limit
    if cost.links is None or limit is None:
        return told
    jobs = "one job" if cost.links == 1 else f"{cost.links:,} jobs"
    return f"{told}; {jobs} of {limit}"


def _compute(plan: Plan, cost: Cost) -> str:
    mfu = f"MFU {cost.mfu:.0%} of {cost.peak / 1e12:,.0f} TFLOP/s ({cost.mfu_source})"
    told = f"{_amount(cost)} at {mfu}: {_hours(cost.gpu_hours)} GPU-hours"
    price = plan.assumptions.gpu_hour_price
    return told if cost.price is None or price is None else f"{told}, {cost.price:,.0f} at {price:g} each"


def _amount(amount: TrainingAmount) -> str:
    return (
        f"{count(amount.parameters)} parameters, {count(amount.tokens)} tokens, {amount.flops:.3g} FLOPs"
        f" on {amount.gpus:,} GPUs"
    )


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def _space(cost: TrainingAmount) -> str:
    one = f"a checkpoint {told_bytes(cost.checkpoint_bytes)}"
    kept = cost.kept_checkpoints
    if cost.checkpoint_bytes == 0:
        return "no checkpoint is written"
    if kept is None:
        return f"{one}, and all of them are kept"
    return f"{one}, {kept} kept: {told_bytes(kept * cost.checkpoint_bytes)}" if kept > 1 else one
