"""The time and the cost of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from arithmetic.layout import ParallelConfig, fits, is_rampup
from launcher.attained import assumed, attained
from launcher.estimates.checkpoints import bytes_of_save, checkpoints_of
from launcher.estimates.gpus import gpu_of
from launcher.estimates.layout import layout_of
from launcher.estimates.model import ModelSize, model_size
from launcher.estimates.parallelism import RAMPUP, read_parallel_config
from launcher.estimates.speed import Running, Speed, running_of, work_of
from launcher.estimates.values import Values
from launcher.plan import Plan
from launcher.slurm.times import training_seconds

# A batch that grows in more steps than these counts as grown from the start.
_MOST_BATCHES = 10_000
# The engines whose published step times ours are taken from.
_WORLDS = {"nemo": "NeMo", "megatron_lm": "Megatron-LM", "megatron": "Megatron-LM"}


@dataclass(frozen=True, slots=True)
class TrainingAmount:
    """The work of all steps of a training, however long it takes.

    `tokens` are all that it reads; `flops` the model's own, without recomputing; `flops_per_token` those of
    one of the tokens. `checkpoint_bytes` are those of one checkpoint; `kept_checkpoints` lie on the disk at
    most, None where all of them are kept; both are 0 where none is written. `save_bytes` are those that the
    save of a checkpoint takes of a node's memory, None if unknown.
    """

    parameters: int
    steps: int
    tokens: int
    flops_per_token: float
    flops: float
    gpus: int
    checkpoint_bytes: int
    kept_checkpoints: int | None
    save_bytes: int | None


@dataclass(frozen=True, slots=True)
class Cost(TrainingAmount):
    """The time and the price of all steps of a training.

    `mfu` is the share of `peak` (FLOP/s of one GPU, in 16 bits) that it reaches, and `mfu_source` the source
    of that. `seconds` are those of computing alone, without queueing and saving; `seconds_per_step` those of
    a step with the whole batch. `links` counts the jobs that the time limit makes of it, None without a
    limit.
    """

    peak: float
    mfu: float
    mfu_source: str
    seconds_per_step: float
    seconds: float
    gpu_hours: float
    price: float | None
    links: int | None


class _SizedTraining(NamedTuple):
    """A training with all its sizes known."""

    values: Values
    model: ModelSize
    parallel: ParallelConfig
    samples: int
    amount: TrainingAmount


def amount_of(plan: Plan) -> TrainingAmount | None:
    """Return the work of a plan's training on GPUs, also for models whose steps are not timed."""
    training = _sized_training(plan)
    if training is None or training.values.raw("trainer.accelerator") == "cpu":
        return None
    return training.amount


def _sized_training(plan: Plan) -> _SizedTraining | None:
    job, values = plan.job, Values(plan.job.config or {})
    parallel, model, steps = (
        read_parallel_config(values),
        model_size(values),
        values.whole("trainer.max_steps"),
    )
    if parallel is None or model is None or steps is None or not fits(parallel, job.resources.nodes):
        return None
    samples, saved = samples_in(values, parallel.batch, steps), checkpoints_of(values, model, job.engine)
    amount = TrainingAmount(
        parameters=model.parameters,
        steps=steps,
        tokens=samples * model.tokens,
        flops_per_token=model.flops / model.tokens,
        flops=float(samples * model.flops),
        gpus=job.resources.nodes * parallel.devices,
        checkpoint_bytes=saved.size if saved is not None else 0,
        kept_checkpoints=saved.kept if saved is not None else 0,
        save_bytes=bytes_of_save(job.config or {}, job.resources.nodes, job.engine) if saved else None,
    )
    return _SizedTraining(values, model, parallel, samples, amount)


def estimate_cost(plan: Plan, gpu_types: Sequence[str] = ()) -> Cost | None:
    """Return the cost of a plan's training, on the least number of nodes that it may get.

    None where it is unknown: the training has no GPUs, its layout does not fit its nodes, a value is missing
    or wrong, or the vocabulary is unknown.
    """
    training = _sized_training(plan)
    if training is None:
        return None
    values, model, parallel, samples, amount = training
    pace = _pace(plan, gpu_types, values, model, parallel)
    if pace is None:
        return None
    seconds = samples * pace.seconds / parallel.batch
    hours, price = amount.gpus * seconds / 3600, plan.assumptions.gpu_hour_price
    return Cost(
        **asdict(amount),
        peak=pace.peak,
        mfu=pace.mfu,
        mfu_source=pace.source,
        seconds_per_step=pace.seconds,
        seconds=seconds,
        gpu_hours=hours,
        price=hours * price if price is not None else None,
        links=_links(seconds, plan.job.resources.time_limit),
    )


def samples_in(values: Values, batch: int, steps: int) -> int:
    """Return the samples of so many steps, the first of which may have smaller batches.

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
        passed = min(steps, max(0, -int(-left // size)))
        consumed, steps = consumed + passed * size, steps - passed
    return consumed + steps * batch


class _Pace(NamedTuple):
    """The seconds of a step with the whole batch, the MFU that they are of `peak`, and the source of that."""

    seconds: float
    mfu: float
    peak: float
    source: str


def _pace(
    plan: Plan, gpu_types: Sequence[str], values: Values, model: ModelSize, parallel: ParallelConfig
) -> _Pace | None:
    """Return the time of a step: from the MFU that the user states, else from the layout's speed model."""
    if values.raw("trainer.accelerator") == "cpu":
        return None
    job, stated = plan.job, plan.assumptions.mfu
    gpu = gpu_of(job.resources, gpu_types).gpu
    at_peak = parallel.batch * model.flops / (job.resources.nodes * parallel.devices * gpu.peak)
    if stated is not None:
        return _Pace(at_peak / stated, stated, gpu.peak, "estimates.mfu")
    work = work_of(values, parallel.devices, job.engine)
    if work is None or str(values.raw("trainer.precision")).startswith("32"):
        return None  # no tensor cores, and no published step times
    running = running_of(values, job.engine, work.vocabulary)
    speed = Speed(work, running, gpu, job.resources.nodes, attained(plan.assumptions.attained))
    seconds = speed.step(layout_of(values, parallel), parallel)
    source = _source(job.engine, gpu.generation, running, speed, plan.assumptions.attained)
    return _Pace(seconds, at_peak / seconds, gpu.peak, source)


def _source(engine: str, generation: str, running: Running, speed: Speed, changes: Mapping[str, Any]) -> str:
    """Return the trainings that a step's time is derived from, with assumptions and the site's changes."""
    measured, is_alike = speed.products.measured, speed.products.is_alike
    whose, guesses = assumed(engine, measured, is_fp8=speed.counts_fp8)
    if not is_alike:
        guesses.insert(0, f"nobody publishes trainings on {generation}")
    # On other GPUs an engine's factor is that of the H100, and the rest NeMo's.
    world = _WORLDS[engine] if measured == "h100" else "NeMo"
    parts = ["this layout's" if whose is None else f"this layout's, by {world} on {whose}"]
    parts += [f"assumed: {', '.join(guesses)}"] if guesses else []
    if generation in changes.get("like", {}):
        parts.append(f"{generation} taken for {measured} by estimates.attained")
    elif changes:
        parts.append("changed by estimates.attained")
    parts += ["FP8 not counted"] if running.fp8 and not speed.counts_fp8 else []
    return "; ".join(parts)


def _links(seconds: float, limit: str | None) -> int | None:
    """Count the jobs of a training, each of which leaves a part of its limit for the last checkpoint."""
    try:
        each = training_seconds(limit)
    except ValueError:
        return None  # the check time.limit reports it
    return max(1, -int(-seconds // each)) if each else None
