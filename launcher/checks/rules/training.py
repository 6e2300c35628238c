"""Check the training: its batches on all numbers of nodes, its schedule, the names of its data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from launcher.checks.findings import Finding, check, error, warning
from launcher.checks.rules.layout import node_count_check, problems_at
from launcher.checks.rules.resources import ELASTIC_NODES, PER_TASK
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import NODES, RAMPUP, read_parallel_config
from launcher.estimates.values import Values, count, full, is_number, is_whole, listed
from launcher.plan import Plan
from slipway.arithmetic.layout import ParallelConfig, is_rampup

# The largest multiple of the given batch to suggest.
_MOST_TIMES = 16
_MAX_STEPS = "trainer.max_steps"
_SCHED = "model.optim.sched"
_WARMUP = f"{_SCHED}.warmup_steps"
_CONSTANT = f"{_SCHED}.constant_steps"
_RATIOS = {_WARMUP: f"{_SCHED}.warmup_ratio", _CONSTANT: f"{_SCHED}.constant_ratio"}
_INTERVAL = "trainer.val_check_interval"
_CALLBACK = "exp_manager.checkpoint_callback_params"
_PREFIX, _DATA_IMPL = "model.data.data_prefix", "model.data.data_impl"
_FORMS = (
    "[prefix], [prefix, prefix, ...] or [weight, prefix, weight, prefix, ...], the weights above 0; "
    "data_impl=mock generates data"
)
_SPLITS = ("train", "validation", "test")


@check("batch.rampup", "a growing batch can be divided all the way")
def rampup_problems(values: Values, plan: Plan) -> Iterator[Finding]:
    """Find a growing batch that cannot be divided; `elastic.counts` checks a range."""
    parallel = read_parallel_config(values)
    if parallel is not None and not plan.job.resources.is_elastic:
        yield from rampup_problems_at(values, parallel, plan.job.resources.nodes)


def rampup_problems_at(values: Values, shape: ParallelConfig, nodes: int) -> Iterator[Finding]:
    """Find a start or an increment of a growing batch that Megatron cannot divide.

    megatron/core/num_microbatches_calculator.py: the way from the start to the global batch is a whole number
    of increments, at least one, and every batch on it a multiple of micro batch × data parallel. With virtual
    stages the micro batches come in groups (`interleaving_problem`), those of every batch too.
    """
    rampup = values.raw(RAMPUP)
    if rampup is None:
        return
    if not is_rampup(rampup):
        expected = "three whole numbers: the first batch, its increment, and the samples that it grows over"
        yield error(RAMPUP, rampup, f"expected {expected}", "such as [32, 32, 500000]")
        return
    start, increment, _ = rampup
    way, step = shape.batch - start, shape.rampup_multiple(nodes)
    odd = [batch for batch in (start, increment) if step and batch % step]
    if way <= 0:
        more = "is more than" if way < 0 else "is already"
        text = f"the first batch, {start}, {more} the global batch, {shape.batch}: it would not grow"
        yield error(RAMPUP, rampup, text, _rampup_fix(shape.batch, step), (keys.GLOBAL,))
    elif way % increment:
        text = f"the way from {start} to global batch {shape.batch} is {way}, not a multiple of {increment}"
        fix = "null, or a first batch and an increment that lead there"
        yield error(RAMPUP, rampup, text, fix, (keys.GLOBAL,))
    elif odd:
        groups = f" × groups of {shape.group} for virtual stages" if shape.is_interleaved else ""
        factors = f"micro batch {shape.micro} × data parallel {shape.data(nodes)}{groups}"
        text = f"{odd[0]} is not a multiple of {factors} = {step}"
        yield error(RAMPUP, rampup, text, _rampup_fix(shape.batch, step), (keys.MICRO, keys.NODES))


def _rampup_fix(batch: int, step: int) -> str:
    """Suggest multiples of the step, if one is below the global batch."""
    if step == 0 or batch % step or batch <= step:
        return "null, or fewer nodes or a smaller micro batch"
    return f"null, or a first batch and an increment that are multiples of {step}, such as {step}"


@check("elastic.counts", "every number of nodes of a range fits the layout and the batch")
def count_problems(plan: Plan) -> Iterator[Finding]:
    """Find the first number of nodes of a range that does not fit, and name those that do."""
    values, counts = Values(plan.job.config or {}), plan.job.resources.node_counts
    shape = read_parallel_config(values)
    if shape is None or not plan.job.resources.is_elastic:
        return
    wrong = {nodes: finding for nodes in counts if (finding := _problem(values, shape, nodes)) is not None}
    if not wrong:
        return
    nodes, first = next(iter(wrong.items()))
    message = f"with {count(nodes, 'node')}, which Slurm may give it, {first.message}"
    ways = _ways_out(values, shape, counts, [nodes for nodes in counts if nodes not in wrong])
    also = [key for key in (first.key, *first.also) if key and key != full(keys.NODES)]
    yield error(ELASTIC_NODES, {"min": counts[0], "max": counts[-1]}, message, "\n".join(ways), also)


@check("elastic.gpus", "GPUs are not requested by task if the number of tasks is not fixed")
def request_problems(plan: Plan) -> Iterator[Finding]:
    """Find GPUs by task without a number of tasks, which Slurm 22.05 refuses."""
    resources = plan.job.resources
    if resources.is_elastic and resources.gpus_per_task is not None:
        message = (
            f"sbatch takes it for a fixed number of tasks only, and with {ELASTIC_NODES} it is not fixed"
        )
        tasks = resources.gpus_per_task * resources.tasks_per_node
        fix = f"{PER_TASK}=null cluster.gpus_per_node={tasks}"
        yield error(PER_TASK, resources.gpus_per_task, message, fix, (ELASTIC_NODES,))


def _problem(values: Values, shape: ParallelConfig, nodes: int) -> Finding | None:
    return next(chain(problems_at(shape, nodes), rampup_problems_at(values, shape, nodes)), None)


def _ways_out(values: Values, shape: ParallelConfig, counts: range, good: list[int]) -> Iterator[str]:
    yield f"counts of {counts[0]}-{counts[-1]} that fit: {listed(good) if good else 'none'}"
    longest = _find_longest(good)
    if len(longest) > 1:
        # Quoted: a shell would take such braces apart.
        yield f"'{ELASTIC_NODES}={{min: {longest[0]}, max: {longest[-1]}}}'"
    elif good:
        yield f"{ELASTIC_NODES}=null {full(keys.NODES)}={good[-1]}"
    # The least global batch, from the given one on, that can be divided at every count.
    if any(nodes * shape.devices % shape.model for nodes in counts):
        return
    step = math.lcm(*(shape.rampup_multiple(nodes) for nodes in counts))
    batch = -(-shape.batch // step) * step
    is_near = batch <= _MOST_TIMES * shape.batch
    if is_near and not any(_problem(values, shape._replace(batch=batch), nodes) for nodes in counts):
        yield f"{full(keys.GLOBAL)}={batch}, which fits every count"


def _find_longest(good: list[int]) -> range:
    """Return the longest range without a gap, of several the one with more nodes."""
    best, start = range(0), 0
    for index, nodes in enumerate(good):
        if index and nodes != good[index - 1] + 1:
            start = index
        if index - start + 1 >= len(best):
            best = range(good[start], nodes + 1)
    return best


@check("batch.accumulation", "gradients are accumulated once")
def accumulation_problems(values: Values) -> Iterator[Finding]:
    """Find accumulated batches: NeMo accumulates itself (megatron_gpt_model.py, _validate_trainer)."""
    key = "trainer.accumulate_grad_batches"
    value = values.raw(key)
    if is_whole(value) and value > 1:
        text = "the micro batches of a global batch are accumulated already"
        yield error(key, value, text, f"1, and a larger {full(keys.GLOBAL)}")


# --- the schedule, the data and the profile


@check("schedule.warmup", "the learning rate has steps to decay in")
def warmup_problems(values: Values) -> Iterator[Finding]:
    """Find warm-up and constant steps that leave no steps to decay in.

    NeMo (core/optim/lr_scheduler.py, WarmupAnnealHoldPolicy): decay = max - (warm-up + constant). If that is
    not positive, the rate is `min_lr` from the end of the warm-up on.
    """
    for key, ratio in _RATIOS.items():
        if values.raw(key) is not None and values.raw(ratio) is not None:
            text = f"NeMo takes this or {ratio.rpartition('.')[2]}, and not both"
            yield error(key, values.raw(key), text, f"~{full(ratio)}, or ~{full(key)}", (ratio,))
    if values.raw(f"{_SCHED}.name") == "WarmupAnnealing":
        for key in (_CONSTANT, _RATIOS[_CONSTANT]):
            if values.raw(key):
                text = "WarmupAnnealing falls until its last step: NeMo's class knows no constant end"
                yield error(key, values.raw(key), text, f"null, or ~{full(key)}")
    warmup, constant = values.whole(_WARMUP, 0, least=0), values.whole(_CONSTANT, 0, least=0)
    steps = values.whole(_MAX_STEPS)
    if warmup is None or constant is None or steps is None or warmup + constant <= steps:
        return
    limit, parts = f"{full(_MAX_STEPS)}={steps}", f"{warmup} warm-up and {constant} constant steps"
    text = f"{parts} exceed {limit}: the learning rate drops straight to min_lr after the warm-up"
    if warmup >= steps:
        text = f"the training has no more steps than the warm-up: {limit}"
    fix = f"fewer warm-up or constant steps, or {full(_MAX_STEPS)} above {warmup + constant}"
    yield warning(_WARMUP, warmup, text, fix, also=(_CONSTANT, _MAX_STEPS))


@check("schedule.min_lr", "the learning rate falls, and does not rise")
def rate_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find a learning rate that would rise to `min_lr`.

    NeMo: lr_scheduler.py, CosineAnnealing; our trainer wants that of every schedule.
    """
    rate, least = values.number("model.optim.lr"), values.number(f"{_SCHED}.min_lr")
    constant = values.whole(_CONSTANT, 0, least=0)
    is_cosine = values.raw(f"{_SCHED}.name") == "CosineAnnealing"
    if rate is None or least is None or not (is_cosine or engine == "megatron"):
        return
    if least > rate or (is_cosine and least == rate and constant):
        text = f"not below the learning rate {rate:g} that it falls from"
        yield error(f"{_SCHED}.min_lr", least, text, also=("model.optim.lr",))


@check("schedule.validation", "there is a validation before the end")
def validation_problems(values: Values) -> Iterator[Finding]:
    """Find a training without validation: each writes a checkpoint, unless `every_n_train_steps` does."""
    steps, interval = values.whole(_MAX_STEPS), values.raw(_INTERVAL)
    if steps is None or not is_whole(interval) or interval <= steps:
        return
    if values.raw("trainer.limit_val_batches") == 0:  # validation is off
        return
    text = f"longer than the training, {full(_MAX_STEPS)}={steps}: there is no validation"
    if values.raw(f"{_CALLBACK}.every_n_train_steps") is None:
        text += ", and so no checkpoint before the end"
    fix = f"{steps} or less; {full(_CALLBACK)}.every_n_train_steps writes checkpoints between validations"
    yield warning(_INTERVAL, interval, text, fix, also=(_MAX_STEPS,))


# The words that each engine reads; NeMo's are those of dataset_utils.py, `get_indexed_dataset_`.
_DATA_IMPLS = {"nemo": ("mmap", "mock", "text_mmap", "csv_mmap")}


@check("data.prefix", "data is named, and weights go with prefixes")
def prefix_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find missing data, data of a form that the engine does not read, and weights without prefixes.

    megatron/core/datasets/utils.py, get_blend_from_list: an odd number of names is read as one without
    weights. blended_dataset.py: each weight is above 0. NeMo (megatron_gpt_model.py) takes a mapping of the
    three splits too.
    """
    form, forms = values.raw(_DATA_IMPL), _DATA_IMPLS.get(engine, ("mmap", "mock"))
    if form not in (*forms, None):
        yield error(_DATA_IMPL, form, f"engine={engine} reads no such data", f"valid: {', '.join(forms)}")
    if form != "mmap":
        return
    value = values.raw(_PREFIX)
    named = {_PREFIX: value}
    if isinstance(value, Mapping):
        splits = [split for split in _SPLITS if split == "train" or value.get(split) is not None]
        named = {f"{_PREFIX}.{split}": value.get(split) for split in splits}
        for split in (split for split in value if split not in _SPLITS):
            text = "expected the splits train, validation and test"
            yield error(f"{_PREFIX}.{split}", value[split], text, _FORMS)
    for key, prefixes in named.items():
        wrong = _find_fault(prefixes, may_wait=bool(values.raw("resume.data_weights")))
        if wrong is not None:
            yield error(key, prefixes, wrong, _FORMS)


def _find_fault(value: Any, *, may_wait: bool) -> str | None:
    """Return what is wrong with a blend; with `may_wait` data sets may have the weight 0 at first."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        return "expected a list of prefixes"
    if not names:
        return "no data is named"
    if not all((isinstance(name, str) and name.strip()) or is_number(name) for name in names):
        return "expected prefixes, and numbers for their weights"
    weights = [weight_of(name) for name in names]
    if all(weight is None for weight in weights):
        return None
    if [weight is not None for weight in weights] != [True, False] * (len(names) // 2):
        return "weights and prefixes do not come in pairs"
    numbers = [weight for weight in weights[::2] if weight is not None]
    numbers = [weight for weight in numbers if weight] if may_wait and any(numbers) else numbers
    if not all(is_number(weight) and weight > 0 for weight in numbers):
        return "a weight is not above 0; leave out data that is not wanted"
    return None


def weight_of(item: Any) -> float | None:
    """Return an item of a list of data sets as a weight; None for a prefix."""
    try:
        return float(item)
    except (TypeError, ValueError):
        return None


@check("profile.ranks", "profiled ranks exist")
def rank_problems(plan: Plan) -> Iterator[Finding]:
    ranks, tasks = plan.job.profile.ranks if plan.job.profile is not None else (), plan.job.resources.tasks
    beyond = [rank for rank in ranks if rank >= tasks]
    if beyond:
        message = f"there is no rank {beyond[0]} among {count(tasks, 'task')}"
        yield error("model.nsys_profile.ranks", list(ranks), message, f"ranks 0 to {tasks - 1}", (NODES,))


BATCHES = (
    node_count_check("batch.global", "the global batch is a multiple of micro batch × data parallel"),
    node_count_check("batch.interleaved", "virtual stages have micro batches in groups of the pipeline size"),
    *(rampup_problems, count_problems, request_problems, accumulation_problems),
)
CHECKS = (prefix_problems, rank_problems, warmup_problems, rate_problems, validation_problems)
