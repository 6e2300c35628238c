"""What to train, as typed values: the part of the configuration that the trainer implements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config.architecture import Architecture, read_architecture
from trainer.config.saving import Saving, read_saving
from trainer.config.values import Values
from trainer.errors import UserError

# NeMo's names for the same optimizer: AdamW over fp32 master weights.
OPTIMIZERS = (
    "mcore_distributed_optim",
    "distributed_fused_adam",
    "megatron_fused_adam",
    "fused_adam",
    "adamw",
)
# Without a CUDA device each but "cpu" falls back to the CPU, which the log says.
ACCELERATORS = ("gpu", "cuda", "cpu", "auto")
PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "32": "fp32", "32-true": "fp32"}


@dataclass(frozen=True)
class Optimization:
    """AdamW and NeMo's CosineAnnealing; `schedule_steps` is the length of the schedule in steps."""

    name: str
    lr: float
    min_lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    gradient_clip: float
    warmup_steps: int
    constant_steps: int
    schedule_steps: int


@dataclass(frozen=True)
class Data:
    """Where tokens come from; `splits` are weights of the training, validation and test documents."""

    kind: Literal["mock", "mmap"]
    prefix: Path | None
    splits: tuple[float, float, float]
    eod_mask_loss: bool
    vocab_file: Path | None
    merge_file: Path | None


@dataclass(frozen=True)
class Output:
    """Where a training logs, and whether it continues, and starts with nothing to continue."""

    log_dir: Path
    resume: bool
    resume_or_start: bool
    tensorboard: bool
    log_every: int


@dataclass(frozen=True)
class Settings:
    """Everything a training needs to know."""

    architecture: Architecture
    optimization: Optimization
    data: Data
    output: Output
    saving: Saving
    precision: Literal["bf16", "fp32"]
    seed: int
    tensor_parallel: int
    micro_batch: int
    global_batch: int
    max_steps: int
    max_seconds: float | None
    val_interval: int
    val_batches: int
    gc_interval: int
    accelerator: str
    nodes: int
    devices: int | None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.global_batch * self.architecture.seq_length


def read_settings(flat: Mapping[str, Any]) -> Settings:
    """Turn dotted keys into settings.

    Raises
    ------
    UserError
        Naming the key, its value and what is valid.
    """
    values = Values(flat)
    max_steps = values.integer("trainer.max_steps", minimum=1)
    output, val_interval = _output(values), _val_interval(values)
    return Settings(
        architecture=read_architecture(values),
        optimization=_optimization(values, max_steps),
        data=_data(values),
        output=output,
        saving=read_saving(values, output.log_dir, val_interval),
        precision=_precision(values),
        seed=values.integer("model.seed", 1234, minimum=0),
        tensor_parallel=values.integer("model.tensor_model_parallel_size", 1, minimum=1),
        micro_batch=values.integer("model.micro_batch_size", minimum=1),
        global_batch=values.integer("model.global_batch_size", minimum=1),
        max_steps=max_steps,
        max_seconds=_max_seconds(values),
        val_interval=val_interval,
        val_batches=_val_batches(values),
        gc_interval=values.integer("model.gc_interval", 0, minimum=0),
        accelerator=values.choice("trainer.accelerator", ACCELERATORS, "auto"),
        nodes=values.integer("trainer.num_nodes", 1, minimum=1),
        devices=_devices(values),
    )


def _optimization(values: Values, max_steps: int) -> Optimization:
    node = "model.optim"
    lr = values.number(f"{node}.lr", minimum=0.0)
    min_lr = values.number(f"{node}.sched.min_lr", 0.0, minimum=0.0)
    if min_lr > lr:
        raise UserError(f"{node}.sched.min_lr={min_lr:g}: expected at most {node}.lr={lr:g}")
    values.choice(f"{node}.sched.name", ("CosineAnnealing",), "CosineAnnealing")
    return Optimization(
        name=values.choice(f"{node}.name", OPTIMIZERS, "mcore_distributed_optim"),
        lr=lr,
        min_lr=min_lr,
        betas=_betas(values),
        eps=values.number(f"{node}.eps", 1e-8, minimum=0.0),
        weight_decay=values.number(f"{node}.weight_decay", 0.0, minimum=0.0),
        gradient_clip=values.number("trainer.gradient_clip_val", 0.0, minimum=0.0),
        warmup_steps=values.integer(f"{node}.sched.warmup_steps", 0, minimum=0),
        constant_steps=values.integer(f"{node}.sched.constant_steps", 0, minimum=0),
        schedule_steps=values.integer(f"{node}.sched.max_steps", max_steps, minimum=1),
    )


def _betas(values: Values) -> tuple[float, float]:
    key = "model.optim.betas"
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


def _data(values: Values) -> Data:
    kind = values.choice("model.data.data_impl", ("mock", "mmap"), "mmap")
    values.choice("model.tokenizer.library", ("megatron",), "megatron")
    values.choice("model.tokenizer.type", ("GPT2BPETokenizer",), "GPT2BPETokenizer")
    return Data(
        kind="mock" if kind == "mock" else "mmap",
        prefix=_prefix(values) if kind == "mmap" else None,
        splits=_splits(values),
        eod_mask_loss=values.flag("model.data.eod_mask_loss", False),
        vocab_file=_path(values, "model.tokenizer.vocab_file"),
        merge_file=_path(values, "model.tokenizer.merge_file"),
    )


def _prefix(values: Values) -> Path:
    key = "model.data.data_prefix"
    raw = values.raw(key)
    items = [raw] if isinstance(raw, str) else raw
    expected = "a prefix of a .bin and an .idx file, as [prefix] or [weight, prefix]"
    if not isinstance(items, list) or not items:
        values.fail(key, expected)
    paths = [item for item in items if isinstance(item, str) and not _is_number(item)]
    if len(paths) > 1:
        values.fail(key, "one prefix: blending comes later")
    if len(paths) != 1 or len(items) > 2:
        values.fail(key, expected)
    return Path(paths[0])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _splits(values: Values) -> tuple[float, float, float]:
    key = "model.data.splits_string"
    expected = "up to three weights for training, validation and test, such as '90,10,0'"
    raw = values.raw(key)
    try:
        weights = [float(part) for part in str("900,50,50" if raw is None else raw).split(",")]
    except ValueError:
        values.fail(key, expected)
    weights = [*weights, 0.0, 0.0][:3] if len(weights) <= 3 else []
    if not weights or min(weights) < 0 or sum(weights) <= 0:
        values.fail(key, expected)
    return weights[0], weights[1], weights[2]


def _output(values: Values) -> Output:
    node = "exp_manager"
    return Output(
        log_dir=Path(values.text(f"{node}.explicit_log_dir")),
        resume=values.flag(f"{node}.resume_if_exists", False),
        resume_or_start=values.flag(f"{node}.resume_ignore_no_checkpoint", True),
        tensorboard=values.flag(f"{node}.create_tensorboard_logger", True),
        log_every=values.integer("trainer.log_every_n_steps", 10, minimum=1),
    )


def _path(values: Values, key: str) -> Path | None:
    return Path(values.text(key)) if values.is_set(key) else None


def _precision(values: Values) -> Literal["bf16", "fp32"]:
    precision = values.choice("trainer.precision", tuple(PRECISIONS), "32")
    if PRECISIONS[precision] == "fp32":
        return "fp32"
    if not values.flag("model.megatron_amp_O2", False):
        values.fail(
            "model.megatron_amp_O2", "True with trainer.precision=bf16: weights in bf16, masters in fp32"
        )
    return "bf16"


def _max_seconds(values: Values) -> float | None:
    limits = [_duration(values, key) for key in ("trainer.max_time", "exp_manager.max_time_per_run")]
    given = [limit for limit in limits if limit is not None]
    return min(given) if given else None


def _duration(values: Values, key: str) -> float | None:
    """Read Lightning's ``DD:HH:MM:SS`` as seconds."""
    if not values.is_set(key):
        return None
    raw = values.raw(key)
    parts = raw.split(":") if isinstance(raw, str) else []
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        values.fail(key, "a quoted duration days:hours:minutes:seconds, such as '00:23:30:00'")
    days, hours, minutes, seconds = (int(part) for part in parts)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _val_interval(values: Values) -> int:
    key = "trainer.val_check_interval"
    if isinstance(values.raw(key), float):
        values.fail(key, "a whole number of steps; a fraction of an epoch has no meaning here")
    return values.integer(key, 1000, minimum=1)


def _val_batches(values: Values) -> int:
    key = "trainer.limit_val_batches"
    raw = values.raw(key)
    if isinstance(raw, float) and raw != 0.0:
        values.fail(key, "a whole number of global batches, or 0 for no validation")
    return values.integer(key, 50, minimum=0)


def _devices(values: Values) -> int | None:
    if values.raw("trainer.devices") in (None, "auto", -1):
        return None
    return values.integer("trainer.devices", minimum=1)
