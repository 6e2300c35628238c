"""NeMo's ``model.optim``: the optimizer, and the schedule of its learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from slipway.common.errors import UserError
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

    name: str
    lr: float
    min_lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decay_all: bool
    gradient_clip: float
    schedule: str
    warmup_steps: int
    constant_steps: int
    schedule_steps: int


def read_optimization(values: Values, max_steps: int) -> Optimization:
    """Read the optimizer and the schedule of a training of `max_steps` steps.

    Raises
    ------
    UserError
        Naming the key, its value and what is valid.
    """
    name = values.choice(f"{_NODE}.name", OPTIMIZERS, "mcore_distributed_optim")
    lr = values.number(f"{_NODE}.lr", minimum=0.0)
    min_lr = values.number(f"{_SCHED}.min_lr", 0.0, minimum=0.0)
    if min_lr > lr:
        raise UserError(f"{_SCHED}.min_lr={min_lr:g}: expected at most {_NODE}.lr={lr:g}")
    schedule = values.choice(f"{_SCHED}.name", SCHEDULES, "CosineAnnealing")
    total = values.integer(f"{_SCHED}.max_steps", max_steps, minimum=1)
    constant = _steps(values, "constant", total)
    if constant and schedule != "CosineAnnealing":
        key = next(key for key in _pair("constant") if values.is_set(key))
        values.fail(key, f"null or 0: {schedule} falls until its last step")
    return Optimization(
        name=name,
        lr=lr,
        min_lr=min_lr,
        betas=_betas(values),
        eps=values.number(f"{_NODE}.eps", 1e-8, minimum=0.0),
        weight_decay=values.number(f"{_NODE}.weight_decay", 0.0, minimum=0.0),
        decay_all=_decay_all(values, name),
        gradient_clip=values.number("trainer.gradient_clip_val", 0.0, minimum=0.0),
        schedule=schedule,
        warmup_steps=_steps(values, "warmup", total),
        constant_steps=constant,
        schedule_steps=total,
    )


def _pair(part: str) -> tuple[str, str]:
    return f"{_SCHED}.{part}_steps", f"{_SCHED}.{part}_ratio"


def _steps(values: Values, part: str, total: int) -> int:
    """Return the steps of a part of the schedule, given as such or as a share of `total`, rounded down.

    As in NeMo, both at once are a mistake; neither is none.
    """
    steps, ratio = _pair(part)
    if values.is_set(steps) and values.is_set(ratio):
        values.fail(ratio, f"null beside {steps}={values.raw(steps)!r}: one of the two says how long")
    share = values.number(ratio, 0.0, minimum=0.0)
    if share > 1:
        values.fail(ratio, "a share of the schedule's steps, at most 1")
    return values.integer(steps, int(share * total), minimum=0)


def _decay_all(values: Values, name: str) -> bool:
    key = "model.do_layer_norm_weight_decay"
    chosen = values.flag(key, False)
    if chosen and name == "mcore_distributed_optim":
        # NeMo asks for the key, and then lets megatron-core make the groups.
        values.fail(
            key,
            f"False: with {_NODE}.name={name}, in NeMo too, biases and norms are never decayed; "
            "distributed_fused_adam decays them",
        )
    return chosen


def _betas(values: Values) -> tuple[float, float]:
    key = f"{_NODE}.betas"
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
