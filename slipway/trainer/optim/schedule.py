"""NeMo's schedules of the learning rate, as pure functions of the step.

The formulas are those of NeMo 2.4, ``nemo/core/optim/lr_scheduler.py``, operation by operation, so that the
values are the same to the last bit. A step is the number of optimizer steps completed before it: 0 for the
first, with which torch's schedulers too are at the first ``optimizer.step()``. The launcher asks
``python -m slipway.trainer.optim.schedule`` for `rate_change`, with its arguments as JSON from stdin.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from slipway.trainer.config.load import flatten
from slipway.trainer.config.optimization import Optimization, read_optimization
from slipway.trainer.config.values import Values

# The learning rate of the optimizer step after so many completed ones.
Schedule = Callable[[int], float]


def make_schedule(settings: Optimization, lr_scale: float = 1.0) -> Schedule:
    """Return the schedule that the settings name, all of it multiplied by `lr_scale`."""
    rate = warmup_annealing if settings.schedule == "WarmupAnnealing" else cosine_annealing
    return lambda step: lr_scale * rate(settings, step)


def freeze(schedule: Schedule, after: int, steps: int) -> Schedule:
    """Return a schedule whose rate is 0 in the next `steps` steps after so many completed ones."""
    return lambda step: 0.0 if after <= step < after + steps else schedule(step)


def rate_change(flat: Mapping[str, Any], max_steps: object, step: int) -> tuple[int, float, float] | None:
    """Return the first step after `step` completed ones whose rate other ``trainer.max_steps`` move.

    The step comes with its rate under `max_steps` and under the dotted keys of a configuration. None if no
    step has another rate, and for a `max_steps` that is no number: it is not known.
    """
    now = flat.get("trainer.max_steps")
    if type(max_steps) is not int or type(now) is not int or max_steps < 1 or max_steps == now:
        return None
    settings = [read_optimization(Values(flat), steps) for steps in (max_steps, now)]
    if settings[0] == settings[1]:
        return None
    before, after = map(make_schedule, settings)
    differing = (at for at in range(step, now) if before(at) != after(at))
    return next(((at + 1, before(at), after(at)) for at in differing), None)


def remark(settings: Optimization) -> str | None:
    """Return a note if warm-up and constant end leave no step in which the learning rate falls."""
    warmup, constant, total = settings.warmup_steps, settings.constant_steps, settings.schedule_steps
    if warmup + constant < total:
        return None
    return (
        f"warm-up ({warmup}) and constant steps ({constant}) fill the {total} steps of the schedule: "
        "the learning rate does not fall in between"
    )


def cosine_annealing(settings: Optimization, step: int) -> float:
    """Return the rate after `step` completed steps: linear warm-up, a cosine to `min_lr`, then `min_lr`.

    NeMo's ``CosineAnnealing`` over ``WarmupAnnealHoldPolicy`` and, with constant steps,
    ``_linear_warmup_with_cosine_annealing``. It has two warm-ups: with constant steps Megatron-LM's
    ``lr * step / warmup`` (whose first step has learning rate 0), without them
    ``lr * (step + 1) / (warmup + 1)``.
    """
    warmup, constant = settings.warmup_steps, settings.constant_steps
    if warmup > 0 and step <= warmup:
        return settings.lr * step / warmup if constant > 0 else settings.lr * ((step + 1) / (warmup + 1))
    decay = settings.schedule_steps - warmup - constant
    # At the end of the decay the cosine is there. NeMo divides by zero if there is no warm-up nor decay.
    if step >= warmup + decay:
        return settings.min_lr
    past, span = step - warmup, settings.lr - settings.min_lr
    if constant > 0:
        return settings.min_lr + 0.5 * (math.cos(math.pi * (past / decay)) + 1.0) * span
    return span * (0.5 * (1 + math.cos(math.pi * past / decay))) + settings.min_lr


def warmup_annealing(settings: Optimization, step: int) -> float:
    """Return the rate after `step` completed steps: linear warm-up, a straight line to `min_lr`, then that.

    NeMo's ``WarmupAnnealing`` over ``WarmupPolicy``.
    """
    warmup, total = settings.warmup_steps, settings.schedule_steps
    if warmup > 0 and step <= warmup:
        return settings.lr * ((step + 1) / (warmup + 1))
    if step > total:
        return settings.min_lr
    share = (step - warmup) / (total - warmup)
    return settings.min_lr + (1 - share) * (settings.lr - settings.min_lr)


if __name__ == "__main__":
    question = json.load(sys.stdin)
    print(json.dumps(rate_change(flatten(question["config"]), question["max_steps"], question["step"])))
