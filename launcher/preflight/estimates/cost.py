"""How long a training takes, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan import Plan
from launcher.preflight.batches import RAMPUP, is_rampup
from launcher.preflight.estimates.checkpoints import checkpoints_of
from launcher.preflight.estimates.gpu import gpu_of
from launcher.preflight.estimates.mfu import Utilization, default_mfu
from launcher.preflight.estimates.sizes import Sized, sized
from launcher.preflight.facts import Facts
from launcher.preflight.layout import fits
from launcher.preflight.shape import shape_of
from launcher.preflight.values import Values
from launcher.times import training_seconds

# Of a batch that grows in more steps than these the end alone is looked at.
_MOST_BATCHES = 10_000


@dataclass(frozen=True, slots=True)
class Cost:
    """An estimate for all steps of a training.

    `tokens` are all that it reads; `flops` the model's own, whatever is recomputed; `flops_per_token` of one
    of them. `mfu` is the part of `peak` (FLOP/s of one GPU) that it counts with, and `mfu_source` says where
    that is from. `seconds` is computing alone: neither queueing nor saving; `seconds_per_step` is of a step
    with the whole batch. `links` are the jobs that the time limit makes of it, ``None`` without a limit.
    `checkpoint_bytes` is one checkpoint, `kept_checkpoints` how many of them lie on the disk at most,
    ``None`` where all of them are kept; both are 0 where none is written.
    """

    parameters: int
    steps: int
    tokens: int
    flops_per_token: float
    flops: float
    gpus: int
    peak: float
    mfu: float
    mfu_source: str
    seconds_per_step: float
    seconds: float
    gpu_hours: float
    price: float | None
    links: int | None
    checkpoint_bytes: int
    kept_checkpoints: int | None


def estimate_cost(plan: Plan, facts: Facts) -> Cost | None:
    """What a plan's training takes, at the least number of nodes that it may get.

    ``None`` where it cannot be told: it has no GPUs, its layout does not fit its nodes, a value is missing or
    wrong, or the vocabulary is not known.
    """
    job, values = plan.job, Values(plan.job.config or {})
    shape, model, steps = shape_of(values), sized(values), values.whole("trainer.max_steps")
    if shape is None or model is None or steps is None or not fits(shape, job.resources.nodes):
        return None
    used = _utilization(plan, facts, values, model)
    if used is None:
        return None
    samples = samples_in(values, shape.batch, steps)
    gpus = job.resources.nodes * shape.devices
    rate = gpus * used.peak * used.mfu
    seconds = samples * model.flops / rate
    hours, price = gpus * seconds / 3600, plan.assumptions.gpu_hour_price
    saved = checkpoints_of(values, model, job.engine)
    return Cost(
        parameters=model.parameters,
        steps=steps,
        tokens=samples * model.tokens,
        flops_per_token=model.flops / model.tokens,
        flops=float(samples * model.flops),
        gpus=gpus,
        peak=used.peak,
        mfu=used.mfu,
        mfu_source=used.source,
        seconds_per_step=shape.batch * model.flops / rate,
        seconds=seconds,
        gpu_hours=hours,
        price=hours * price if price is not None else None,
        links=_links(seconds, job.resources.time_limit),
        checkpoint_bytes=saved.size if saved is not None else 0,
        kept_checkpoints=saved.kept if saved is not None else 0,
    )


def samples_in(values: Values, batch: int, steps: int) -> int:
    """The samples of so many steps, the first of which may have smaller batches.

    megatron/core/num_microbatches_calculator.py: the batch grows by an increment at a time, after equal
    shares of the samples of the ramp-up.
    """
    rampup = values.raw(RAMPUP)
    if not is_rampup(rampup):
        return steps * batch
    start, increment, samples = rampup
    batches = range(start, batch, increment)
    if len(batches) > _MOST_BATCHES:
        return steps * batch
    consumed = 0
    for number, size in enumerate(batches, start=1):
        left = samples * number / len(batches) - consumed
        taken = min(steps, max(0, -int(-left // size)))
        consumed, steps = consumed + taken * size, steps - taken
    return consumed + steps * batch


def _utilization(plan: Plan, facts: Facts, values: Values, model: Sized) -> Utilization | None:
    if values.raw("trainer.accelerator") == "cpu":
        return None
    gpu = gpu_of(plan.job.resources, facts).gpu
    if plan.assumptions.mfu is not None:
        return Utilization(plan.assumptions.mfu, gpu.peak, "estimates.mfu")
    if str(values.raw("trainer.precision")).startswith("32"):
        return None  # no tensor cores, and nobody publishes how fast that is
    return default_mfu(model, gpu, is_fp8=bool(values.raw("model.fp8")))


def _links(seconds: float, limit: str | None) -> int | None:
    """The jobs that it takes, each of which leaves a part of its limit for the last checkpoint."""
    try:
        each = training_seconds(limit)
    except ValueError:
        return None  # time.limit tells
    return max(1, -int(-seconds // each)) if each else None
