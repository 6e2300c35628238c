"""The estimates of a plan: the time and the cost of its training, and the disk space of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from launcher.attained import assumed, attained
from launcher.estimates.memory import StageMemory, bytes_per_parameter, estimate_memory
from launcher.estimates.parallelism import RAMPUP, CountedGpu, gpu_of, layout_of, read_parallel_config
from launcher.estimates.speed import ModelWork, Speed, work_of
from launcher.estimates.training import ModelSize, model_size, parameters_of, stages_of, training_of
from launcher.estimates.values import Values, is_whole
from launcher.plan import Plan
from launcher.slurm.notations import training_seconds
from slipway.arithmetic.layout import fits, is_rampup

# A batch that grows in more steps than these counts as grown from the start.
_MOST_BATCHES = 10_000
# The engines of the published step times.
_WORLDS = {"nemo": "NeMo", "megatron_lm": "Megatron-LM", "megatron": "Megatron-LM"}


@dataclass(frozen=True, slots=True)
class TrainingAmount:
    """The work of all steps of a training, however long it takes.

    `tokens` are all that it reads; `flops` the model's own, without recomputing; `flops_per_token` those of
    one token. `checkpoint_bytes` are those of one checkpoint; `kept_checkpoints` is the most on disk, None
    if all are kept; both are 0 if it does not save. `save_bytes` are the part of a node's memory that a save
    takes, None if unknown.
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
    a step with the whole batch. `links` counts its jobs of the time limit, None without a limit.
    """

    peak: float
    mfu: float
    mfu_source: str
    seconds_per_step: float
    seconds: float
    gpu_hours: float
    price: float | None
    links: int | None


def amount_of(plan: Plan) -> TrainingAmount | None:
    """Return the work of a plan's training on GPUs, also for models without timed steps."""
    job, values = plan.job, Values(plan.job.config or {})
    parallel, model = read_parallel_config(values), model_size(values)
    steps, nodes = values.whole("trainer.max_steps"), job.resources.nodes
    if parallel is None or model is None or steps is None or not fits(parallel, nodes):
        return None
    if values.raw("trainer.accelerator") == "cpu":
        return None
    samples, saved = count_samples(values, parallel.batch, steps), checkpoints_of(values, model, job.engine)
    return TrainingAmount(
        parameters=model.parameters,
        steps=steps,
        tokens=samples * model.tokens,
        flops_per_token=model.flops / model.tokens,
        flops=float(samples * model.flops),
        gpus=nodes * parallel.devices,
        checkpoint_bytes=saved.size if saved is not None else 0,
        kept_checkpoints=saved.kept if saved is not None else 0,
        save_bytes=bytes_of_save(values.config, nodes, job.engine) if saved else None,
    )


def estimate_cost(plan: Plan, gpu_types: Sequence[str] = ()) -> Cost | None:
    """Return the cost of a plan's training, on the least number of nodes that it may get.

    None where it is unknown: the training has no GPUs, its layout does not fit its nodes, a value is missing
    or wrong, or the vocabulary is unknown.
    """
    job, assumptions, amount = plan.job, plan.assumptions, amount_of(plan)
    if amount is None:
        return None
    values = Values(job.config or {})
    parallel, model = read_parallel_config(values), model_size(values)
    assert parallel is not None and model is not None
    gpu = gpu_of(job.resources, gpu_types).gpu
    at_peak = parallel.batch * model.flops / (amount.gpus * gpu.peak)
    if assumptions.mfu is not None:
        step, mfu, source = at_peak / assumptions.mfu, assumptions.mfu, "estimates.mfu"
    else:
        work = work_of(values, parallel.devices, job.engine)
        if work is None or str(values.raw("trainer.precision")).startswith("32"):
            return None  # no tensor cores, and no published step times
        speed = Speed(work, gpu, job.resources.nodes, attained(assumptions.attained))
        layout = layout_of(values, parallel)
        step = speed.step(layout, parallel)
        # NeMo's own speed is not multiplied by an engine's factor.
        world = "NeMo" if speed.compiles(layout) else _WORLDS[job.engine]
        mfu, source = at_peak / step, _source(work, gpu.generation, speed, world, assumptions.attained)
    seconds = amount.tokens // model.tokens * step / parallel.batch
    gpus = amount.gpus + job.resources.spares * parallel.devices  # spares are paid for too
    hours, price = gpus * seconds / 3600, assumptions.gpu_hour_price
    return Cost(
        **asdict(amount),
        peak=gpu.peak,
        mfu=mfu,
        mfu_source=source,
        seconds_per_step=step,
        seconds=seconds,
        gpu_hours=hours,
        price=hours * price if price is not None else None,
        links=_links(seconds, job.resources.time_limit),
    )


def count_samples(values: Values, batch: int, steps: int) -> int:
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


def _source(work: ModelWork, generation: str, speed: Speed, world: str, changes: Mapping[str, Any]) -> str:
    """Return the trainings that a step's time is derived from, with assumptions and the site's changes."""
    measured, is_alike = speed.products.measured, speed.products.is_alike
    whose, guesses = assumed(work.engine, measured, is_fp8=speed.counts_fp8)
    if not is_alike:
        guesses.insert(0, f"no published trainings on {generation}")
    if measured != "h100":
        world = "NeMo"  # an engine's factor is that of the H100, and the rest NeMo's
    parts = ["this layout's" if whose is None else f"this layout's, by {world} on {whose}"]
    parts += [f"assumed: {', '.join(guesses)}"] if guesses else []
    if generation in changes.get("like", {}):
        parts.append(f"{generation} taken for {measured} by estimates.attained")
    elif changes:
        parts.append("changed by estimates.attained")
    parts += ["FP8 not counted"] if work.fp8 and not speed.counts_fp8 else []
    return "; ".join(parts)


def _links(seconds: float, limit: str | None) -> int | None:
    """Count the jobs of a training; each leaves a part of its limit for the last checkpoint."""
    try:
        each = training_seconds(limit)
    except ValueError:
        return None  # the check time.limit reports it
    return max(1, -int(-seconds // each)) if each else None


# --- all estimates of a plan


class MemoryEstimate(NamedTuple):
    """The memory of each pipeline stage, at least one, and of the GPU that has to hold it.

    `margin` is the part of the GPU's memory for parts without an estimate.
    """

    stages: tuple[StageMemory, ...]
    counted: CountedGpu
    margin: float

    @property
    def capacity(self) -> int:
        """The bytes of a GPU."""
        return self.counted.gpu.memory

    @property
    def usable(self) -> int:
        """The bytes that a stage may take without a warning."""
        return int(self.capacity * (1 - self.margin))

    @property
    def fullest(self) -> StageMemory:
        """The stage that takes the most."""
        return max(self.stages, key=lambda stage: stage.total)

    def to_json(self) -> dict[str, Any]:
        """Return the estimate for programs."""
        gpu, source, is_assumed = self.counted
        return {
            "gpu": {"name": gpu.name, "memory": gpu.memory, "source": source, "assumed": is_assumed},
            "margin": self.margin,
            "stages": [{**stage._asdict(), "total": stage.total} for stage in self.stages],
        }


class Overview(NamedTuple):
    """The estimates of a plan, None where unknown: some models have an `amount`, but no `cost`."""

    memory: MemoryEstimate | None
    amount: TrainingAmount | None
    cost: Cost | None


def overview(plan: Plan, gpu_types: Sequence[str] = ()) -> Overview:
    """Estimate a plan, with the least nodes of a range: there a GPU holds the most."""
    job = plan.job
    stages = estimate_memory(job.config, job.resources.nodes, job.engine) if job.config is not None else None
    counted = gpu_of(job.resources, gpu_types)
    memory = MemoryEstimate(stages, counted, plan.assumptions.memory_margin) if stages else None
    return Overview(memory, amount_of(plan), estimate_cost(plan, gpu_types))


# --- checkpoints

_CALLBACK = "exp_manager.checkpoint_callback_params"
KEEP = f"{_CALLBACK}.save_top_k"

# Bytes of a parameter. Adam has two moments in fp32 (Kingma and Ba 2015, arXiv 1412.6980); weights in 16 bits
# have a master copy in fp32 (Micikevicius et al. 2018, arXiv 1710.03740).
_MOMENTS = 4 + 4
_MASTER = 4


class Checkpoints(NamedTuple):
    """Checkpoints of a training.

    `size` is that of one, in bytes. `kept` is the most at a time, None if all are kept; `beside` of them are
    not among the best: the newest, and one that is being written before an older one is removed. `saves`
    counts all from the first step to the last.
    """

    size: int
    kept: int | None
    beside: int
    saves: int

    @property
    def most(self) -> int:
        """The most checkpoints that lie there at a time."""
        return self.saves if self.kept is None else min(self.kept, self.saves)


def checkpoints_of(values: Values, model: ModelSize, engine: str) -> Checkpoints | None:
    """Return the checkpoints of a training; None if it does not save, or if unknown."""
    steps = values.whole("trainer.max_steps")
    saves = _saves(values, steps) if steps is not None else None
    if saves is None:
        return None
    # Our trainer: slipway/trainer/checkpoint/retention.py; NeMo's `save_last`: exp_manager.py,
    # CallbackParams.
    beside = 2 if engine != "nemo" or values.flag(f"{_CALLBACK}.save_last", default=True) else 1
    best = 3 if values.raw(KEEP) is None else values.raw(KEEP)
    # Megatron-LM removes no checkpoint.
    removes = engine != "megatron_lm" and is_whole(best) and best >= 0
    return Checkpoints(_size(values, model, engine), best + beside if removes else None, beside, saves)


def bytes_of_save(config: Mapping[str, Any], nodes: int, engine: str) -> int | None:
    """Return the bytes of a node's memory that a save takes: of our trainer, on the fullest node.

    Each rank copies its share of the state to the host, without more memory of the GPU
    (slipway/trainer/checkpoint/async_save.py, `take_snapshot`). Ranks that hold the same weights and
    optimizer states have equal shares of them (megatron-core's FullyParallelSaveStrategyWrapper,
    exchange_utils.py, `distribute_shards_to_ranks`), those of a sharded optimizer have their own. PyTorch's
    allocator of pinned memory rounds each tensor up to a power of two (CachingHostAllocator.h): that is not
    counted.

    None for other engines, and where the memory of a GPU is unknown.
    """
    training = training_of(config, nodes, engine) if engine == "megatron" else None
    stages = stages_of(training) if training is not None else None
    if training is None or stages is None:
        return None
    each, tensor = bytes_per_parameter(training), training.parallel.tensor
    largest = max(parameters_of(training.parts, stage).on_rank(tensor) for stage in stages)
    copies = training.data * training.parallel.context
    return training.parallel.devices * -(-largest * (each.weight + each.optimizer) // copies)


def _size(values: Values, model: ModelSize, engine: str) -> int:
    """Return the bytes of weights, Adam's moments, and master weights where there are any.

    NeMo without `megatron_amp_O2` computes in 16 bits on weights in 32, which ours and Megatron-LM never do.
    """
    is_full = str(values.raw("trainer.precision")).startswith("32")
    has_master = not is_full and (engine != "nemo" or values.flag("model.megatron_amp_O2"))
    weights = 2 if has_master else 4
    if engine == "nemo" and values.flag(f"{_CALLBACK}.save_weights_only"):
        return model.parameters * weights
    return model.parameters * (weights + _MOMENTS + (_MASTER if has_master else 0))


def _saves(values: Values, steps: int) -> int | None:
    """Count the saves: one after each validation, or by `every_n_train_steps`, and one at the end."""
    if not values.flag("exp_manager.create_checkpoint_callback", default=True):
        return None
    every = values.raw(f"{_CALLBACK}.every_n_train_steps")
    every = values.raw("trainer.val_check_interval") if every is None else every
    if not is_whole(every) or every < 1:
        return 1
    return -(-steps // int(every))
