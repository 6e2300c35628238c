"""A global batch that grows: ``model.rampup_batch_size``."""

from __future__ import annotations

from dataclasses import dataclass

from slipway.arithmetic.layout import is_rampup
from slipway.common.errors import UserError
from slipway.trainer.config.values import Values

_KEY = "model.rampup_batch_size"


@dataclass(frozen=True)
class Rampup:
    """The global batch as a function of the samples consumed before it.

    The rule is megatron-core's, ``num_microbatches_calculator.py``,
    ``RampupBatchsizeNumMicroBatchesCalculator``: the batch grows from `start` to `end` by `increment` at a
    time, after equal shares of `samples`.

    Attributes
    ----------
    start, increment, end
        First batch, its growth at a time, and the last batch, in samples.
    samples
        Samples until the last batch.
    """

    start: int
    increment: int
    samples: int
    end: int

    def __call__(self, consumed_samples: int) -> int:
        """Return the global batch of the step before which so many samples were consumed."""
        if consumed_samples > self.samples:
            return self.end
        # In floating point, as there: a rounded quotient decides at which step the batch grows.
        per_increment = self.samples / ((self.end - self.start) // self.increment)
        return self.start + int(consumed_samples / per_increment) * self.increment

    def check(self, multiple: int, unit: str) -> None:
        """Check that every batch is a multiple of the samples of one pass over the ranks.

        Raises
        ------
        UserError
            If a batch is not.
        """
        # All are, if the first and the increment are.
        for name, value in (("first batch", self.start), ("increment", self.increment)):
            if value % multiple:
                raise UserError(
                    f"{_KEY}={[self.start, self.increment, self.samples]}: the {name}, {value}, is not a "
                    f"multiple of {unit} = {multiple}"
                )


def read_rampup(values: Values, global_batch: int) -> Rampup | None:
    """Read the ramp up to `global_batch`; None if the batch is constant.

    Raises
    ------
    UserError
        If it is not of the form ``[start, increment, samples]``, or does not lead to `global_batch`.
    """
    raw = values.raw(_KEY)
    if raw is None:
        return None
    if not is_rampup(raw):
        values.fail(
            _KEY,
            "three whole numbers of at least 1: the first batch, its increment, and the samples that it "
            "grows over, such as [32, 32, 500000]",
        )
    start, increment, samples = raw
    if start >= global_batch:
        values.fail(_KEY, f"a first batch below model.global_batch_size={global_batch}")
    if (global_batch - start) % increment:
        values.fail(
            _KEY,
            f"increments of {increment} that lead from {start} to model.global_batch_size={global_batch}",
        )
    return Rampup(start, increment, samples, global_batch)
