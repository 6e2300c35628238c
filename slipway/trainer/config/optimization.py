"""NeMo's ``model.optim``: the optimizer, and the schedule of its learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from slipway.common.errors import UserError
from slipway.trainer.config.rows import NUMBER, OFF, Reader, Row, read_rows
from slipway.trainer.config.values import Values

# NeMo's names for the same optimizer: AdamW over fp32 master weights.
OPTIMIZERS = (
    "mcore_distributed_optim",
    "distributed_fused_adam",
    "megatron_fused_adam",
    "fused_adam",
    "adamw",
)
SCHEDULES = ("CosineAnnealing", "WarmupAnnealing")
_NODE = "model.optim"
_SCHED = f"{_NODE}.sched"
_FROM_0: Reader = partial(Values.number, default=0.0, minimum=0.0)


def _betas(values: Values, key: str) -> tuple[float, float]:
    raw = values.raw(key)
    if raw is None:
        return 0.9, 0.999
    if not isinstance(raw, list) or len(raw) != 2:
        values.fail(key, "two numbers in [0, 1)")
    pair = Values({f"{key}[0]": raw[0], f"{key}[1]": raw[1]})
    return (
        pair.number(f"{key}[0]", minimum=0.0, below=1.0),
        pair.number(f"{key}[1]", minimum=0.0, below=1.0),
    )


@dataclass(frozen=True)
class Optimization:
    """AdamW and its learning rate; steps are optimizer steps.

    Attributes
    ----------
    name
        NeMo's name for the optimizer.
    lr, min_lr
        Highest and lowest learning rate.
    decay_all
        Whether biases and norms are decayed too.
    gradient_clip
        The largest global L2 norm of the gradient; 0 clips nothing.
    schedule
        NeMo's name for the schedule.
    warmup_steps, constant_steps, schedule_steps
        Steps of the warm-up, of the constant end, and of the whole schedule.
    """

    name: Annotated[
        str, Row(f"{_NODE}.name", partial(Values.choice, valid=OPTIMIZERS, default=OPTIMIZERS[0]))
    ]
    lr: Annotated[float, Row(f"{_NODE}.lr", NUMBER)]
    min_lr: Annotated[float, Row(f"{_SCHED}.min_lr", _FROM_0)]
    betas: Annotated[tuple[float, float], Row(f"{_NODE}.betas", _betas)]
    eps: Annotated[float, Row(f"{_NODE}.eps", partial(NUMBER, default=1e-8))]
    weight_decay: Annotated[float, Row(f"{_NODE}.weight_decay", _FROM_0)]
    decay_all: Annotated[bool, Row("model.do_layer_norm_weight_decay", OFF)]
    gradient_clip: Annotated[float, Row("trainer.gradient_clip_val", _FROM_0)]
    schedule: Annotated[
        str, Row(f"{_SCHED}.name", partial(Values.choice, valid=SCHEDULES, default=SCHEDULES[0]))
    ]
    warmup_steps: int
    constant_steps: int
    schedule_steps: int


def read_optimization(values: Values, max_steps: int) -> Optimization:
    """Read the optimizer and the schedule of a training of `max_steps` steps.

    Raises
    ------
    UserError
        Naming the key, its value and the valid ones.
    """
    total = values.integer(f"{_SCHED}.max_steps", max_steps, minimum=1)
    optimization = read_rows(
        Optimization,
        values,
        warmup_steps=_steps(values, "warmup", total),
        constant_steps=_steps(values, "constant", total),
        schedule_steps=total,
    )
    name, lr, min_lr = optimization.name, optimization.lr, optimization.min_lr
    if min_lr > lr:
        raise UserError(f"{_SCHED}.min_lr={min_lr:g}: expected at most {_NODE}.lr={lr:g}")
    if optimization.constant_steps and optimization.schedule != "CosineAnnealing":
        key = next(key for key in _name_keys("constant") if values.is_set(key))
        values.fail(key, f"null or 0: {optimization.schedule} falls until its last step")
    if optimization.decay_all and name == "mcore_distributed_optim":
        # NeMo asks for the key, and then lets megatron-core make the groups.
        values.fail(
            "model.do_layer_norm_weight_decay",
            f"False: with {_NODE}.name={name}, in NeMo too, biases and norms are never decayed; "
            "distributed_fused_adam decays them",
        )
    return optimization


def _name_keys(part: str) -> tuple[str, str]:
    return f"{_SCHED}.{part}_steps", f"{_SCHED}.{part}_ratio"


def _steps(values: Values, part: str, total: int) -> int:
    """Return the steps of a part of the schedule, given as such or as a share of `total`, rounded down.

    As in NeMo, both at once are a mistake; neither means 0 steps.
    """
    steps, ratio = _name_keys(part)
    if values.is_set(steps) and values.is_set(ratio):
        values.fail(ratio, f"null with {steps}={values.raw(steps)!r}: only one of the two may be set")
    share = values.number(ratio, 0.0, minimum=0.0)
    if share > 1:
        values.fail(ratio, "a share of the schedule's steps, at most 1")
    return values.integer(steps, int(share * total), minimum=0)
