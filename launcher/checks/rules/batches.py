"""The batch, as far as the number of nodes has no part in it, and its ramp-up."""

from __future__ import annotations

from collections.abc import Iterator

from arithmetic.layout import ParallelConfig, is_rampup
from launcher.checks.findings import Finding, error
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import RAMPUP
from launcher.estimates.values import Values, full, is_whole

_ACCUMULATE = "trainer.accumulate_grad_batches"


def rampup_problems(values: Values, shape: ParallelConfig, nodes: int) -> Iterator[Finding]:
    """Start, increment and samples of a growing batch, the last of which Megatron divides by.

    megatron/core/num_microbatches_calculator.py: the way from the start to the global batch is a whole number
    of increments, at least one, and every batch on it a multiple of micro batch × data parallel. With virtual
    stages the micro batches come in groups (`interleaving_problem`), those of every batch too.
    """
    rampup = values.raw(RAMPUP)
    if rampup is None:
        return
    if not is_rampup(rampup):
        expected = "three whole numbers: the first batch, its increment, and the samples that it grows over"
        yield error("batch.rampup", RAMPUP, rampup, f"expected {expected}", "such as [32, 32, 500000]")
        return
    start, increment, _ = rampup
    data = shape.data(nodes)
    step = shape.rampup_multiple(nodes)
    way = shape.batch - start
    if way <= 0:
        more = "is more than" if way < 0 else "is already"
        told = f"the first batch, {start}, {more} the global batch, {shape.batch}: nothing would grow"
        yield error("batch.rampup", RAMPUP, rampup, told, _rampup_fix(shape.batch, step), (keys.GLOBAL,))
        return
    if way % increment:
        yield error(
            "batch.rampup",
            RAMPUP,
            rampup,
            f"the way from {start} to global batch {shape.batch} is {way}, not a multiple of {increment}",
            "null, or a first batch and an increment that lead there",
            also=(keys.GLOBAL,),
        )
        return
    odd = [batch for batch in (start, increment) if step and batch % step]
    if odd:
        yield error(
            "batch.rampup",
            RAMPUP,
            rampup,
            f"{odd[0]} is not a multiple of micro batch {shape.micro} × data parallel {data}"
            + (f" × groups of {shape.group} for virtual stages" if shape.is_interleaved else "")
            + f" = {step}",
            _rampup_fix(shape.batch, step),
            also=(keys.MICRO, keys.NODES),
        )


def _rampup_fix(batch: int, step: int) -> str:
    """Both numbers are multiples of the step, and the first is below the global batch: there may be none."""
    if step == 0 or batch % step or batch <= step:
        return "null, or fewer nodes or a smaller micro batch"
    return f"null, or a first batch and an increment that are multiples of {step}, such as {step}"


def accumulation_problems(values: Values) -> Iterator[Finding]:
    """NeMo accumulates over micro batches itself (megatron_gpt_model.py, _validate_trainer)."""
    given = values.raw(_ACCUMULATE)
    if is_whole(given) and given > 1:
        told = "the micro batches of a global batch are accumulated already"
        yield error("batch.accumulation", _ACCUMULATE, given, told, f"1, and a larger {full(keys.GLOBAL)}")
