"""Steps: the learning rate's schedule, validations, and how long training lasts."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checks.findings import Finding, error, warning
from launcher.estimates.values import Values, full, is_whole

_MAX_STEPS = "trainer.max_steps"
_SCHED = "model.optim.sched"
_WARMUP = f"{_SCHED}.warmup_steps"
_CONSTANT = f"{_SCHED}.constant_steps"
_RATIOS = {_WARMUP: f"{_SCHED}.warmup_ratio", _CONSTANT: f"{_SCHED}.constant_ratio"}
_INTERVAL = "trainer.val_check_interval"
_CALLBACK = "exp_manager.checkpoint_callback_params"


def warmup_problems(values: Values) -> Iterator[Finding]:
    """Warm-up and constant steps leave something to decay in.

    NeMo (core/optim/lr_scheduler.py, WarmupAnnealHoldPolicy): decay = max - (warm-up + constant). From the
    end of the warm-up on the rate is `min_lr` where that is not positive.
    """
    warmup, constant = values.whole(_WARMUP, 0, least=0), values.whole(_CONSTANT, 0, least=0)
    steps = values.whole(_MAX_STEPS)
    for key, ratio in _RATIOS.items():
        if values.raw(key) is not None and values.raw(ratio) is not None:
            told = f"NeMo takes this or {ratio.rpartition('.')[2]}, and not both"
            yield error(
                "schedule.warmup", key, values.raw(key), told, f"~{full(ratio)}, or ~{full(key)}", (ratio,)
            )
    if values.raw(f"{_SCHED}.name") == "WarmupAnnealing":
        for key in (_CONSTANT, _RATIOS[_CONSTANT]):
            if values.raw(key):
                told = "WarmupAnnealing falls until its last step: NeMo's class knows no constant end"
                yield error("schedule.warmup", key, values.raw(key), told, f"null, or ~{full(key)}")
    if warmup is None or constant is None or steps is None or warmup + constant <= steps:
        return
    least = warmup + constant
    if warmup >= steps:
        told = f"the training has no more steps than the warm-up: {full(_MAX_STEPS)}={steps}"
    else:
        told = (
            f"warm-up {warmup} + constant {constant} steps are more than {full(_MAX_STEPS)}={steps}:"
            " after the warm-up the learning rate is min_lr at once"
        )
    fix = (
        f"fewer of them, or {full(_MAX_STEPS)} of more than warm-up {warmup} + constant {constant} = {least}"
    )
    yield warning("schedule.warmup", _WARMUP, warmup, told, fix, also=(_CONSTANT, _MAX_STEPS))


def rate_problems(values: Values, engine: str) -> Iterator[Finding]:
    """The learning rate falls to `min_lr`, not up to it.

    NeMo: lr_scheduler.py, CosineAnnealing; our trainer wants that of every schedule.
    """
    rate, least = values.number("model.optim.lr"), values.number(f"{_SCHED}.min_lr")
    constant = values.whole(_CONSTANT, 0, least=0)
    is_cosine = values.raw(f"{_SCHED}.name") == "CosineAnnealing"
    if rate is None or least is None or not (is_cosine or engine == "megatron"):
        return
    if least > rate or (is_cosine and least == rate and constant):
        told = f"not below the learning rate {rate:g} that it falls from"
        yield error("schedule.min_lr", f"{_SCHED}.min_lr", least, told, also=("model.optim.lr",))


def validation_problems(values: Values) -> Iterator[Finding]:
    """A checkpoint is written after each validation, unless `every_n_train_steps` says otherwise."""
    steps, interval = values.whole(_MAX_STEPS), values.raw(_INTERVAL)
    if steps is None or not is_whole(interval) or interval <= steps:
        return
    if values.raw("trainer.limit_val_batches") == 0:  # none is wanted
        return
    told = f"longer than the training, {full(_MAX_STEPS)}={steps}: there is no validation"
    if values.raw(f"{_CALLBACK}.every_n_train_steps") is None:
        told += ", and so no checkpoint before the end"
    fix = f"{steps} or less; {full(_CALLBACK)}.every_n_train_steps writes checkpoints between validations"
    yield warning("schedule.validation", _INTERVAL, interval, told, fix, also=(_MAX_STEPS,))
