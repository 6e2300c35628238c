"""The settings of a training: the part of the configuration that the trainer implements, as typed values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from slipway.trainer.config.architecture import Architecture, read_architecture
from slipway.trainer.config.data import Data, read_data
from slipway.trainer.config.fp8 import Fp8, read_fp8
from slipway.trainer.config.optimization import Optimization, read_optimization
from slipway.trainer.config.parallel import (
    Overlap,
    Parallel,
    Timeouts,
    read_overlap,
    read_parallel,
    read_timeouts,
)
from slipway.trainer.config.profiling import Profiling, read_profiling
from slipway.trainer.config.rampup import Rampup, read_rampup
from slipway.trainer.config.resume import Resume, read_resume
from slipway.trainer.config.saving import Saving, read_saving
from slipway.trainer.config.t5 import Denoising, is_t5, read_denoising, read_stacks
from slipway.trainer.config.values import Values

# Without a CUDA device "auto" takes the CPU, and "gpu" and "cuda" are refused.
ACCELERATORS = ("gpu", "cuda", "cpu", "auto")
PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "32": "fp32", "32-true": "fp32"}
_DURATION = re.compile(":".join([r"(\d{1,9})"] * 4), re.ASCII)


@dataclass(frozen=True)
class Output:
    """The directory of a training's logs, and whether the training continues an earlier launch."""

    log_dir: Path
    resume: bool
    resume_or_start: bool
    tensorboard: bool
    log_every: int


@dataclass(frozen=True)
class Settings:
    """Everything a training needs to know.

    `architecture` is a GPT's, or the decoder of a T5; a T5 has an `encoder` and a `denoising` besides.
    `restore_from` is the checkpoint whose weights a new training starts from.
    `nodes` is ``None`` where there are as many as were started. With `cpu_weights` the initial weights are
    drawn on the CPU, the same for every layout and device. With `accumulation_fusion` products of
    matrices add to the gradients of weights. `configuration` has the dotted keys of all this.
    """

    architecture: Architecture
    encoder: Architecture | None
    denoising: Denoising | None
    optimization: Optimization
    data: Data
    output: Output
    saving: Saving
    resume: Resume
    restore_from: Path | None
    precision: Literal["bf16", "fp32"]
    fp8: Fp8 | None
    seed: int
    parallel: Parallel
    overlap: Overlap
    micro_batch: int
    global_batch: int
    rampup: Rampup | None
    max_steps: int
    max_seconds: float | None
    val_interval: int
    val_batches: int
    gc_interval: int
    cpu_weights: bool
    accumulation_fusion: bool
    deterministic: bool
    timeouts: Timeouts
    profiling: Profiling
    accelerator: str
    nodes: int | None
    devices: int | None
    configuration: dict[str, Any]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch, at the end of its ramp."""
        return self.global_batch * self.seq_length

    @property
    def operands(self) -> Literal["bf16", "fp32", "fp8"]:
        """The type in which the matrices of the layers are multiplied, on a GPU."""
        return "fp8" if self.fp8 else self.precision

    @property
    def seq_length(self) -> int:
        """Tokens of a sample: those that a GPT, or the encoder of a T5, reads."""
        return (self.encoder or self.architecture).seq_length

    def with_split_rule(self, rule: str) -> Settings:
        """Return the settings with the data divided by a rule."""
        return replace(self, data=replace(self.data, split_rule=rule))

    def batch_after(self, consumed_samples: int) -> int:
        """Return the global batch of the step before which so many samples were consumed."""
        return self.rampup(consumed_samples) if self.rampup else self.global_batch


def read_settings(flat: Mapping[str, Any]) -> Settings:
    """Turn dotted keys into settings.

    Raises
    ------
    UserError
        Naming the key, its value and what is valid.
    """
    values = Values(flat)
    max_steps = values.integer("trainer.max_steps", minimum=1)
    global_batch = values.integer("model.global_batch_size", minimum=1)
    output, val_interval = _output(values), _val_interval(values)
    t5, precision = is_t5(flat), _precision(values)
    nodes, devices = _nodes(values), _devices(values)
    ranks = nodes * devices if nodes and devices else None
    encoder, architecture = read_stacks(values) if t5 else (None, read_architecture(values))
    return Settings(
        architecture=architecture,
        encoder=encoder,
        denoising=read_denoising(values) if t5 else None,
        optimization=read_optimization(values, max_steps),
        data=read_data(values, t5),
        output=output,
        saving=read_saving(values, output.log_dir, val_interval),
        resume=read_resume(values),
        restore_from=_restore_from(values),
        precision=precision,
        fp8=read_fp8(values, precision),
        seed=values.integer("model.seed", 1234, minimum=0),
        parallel=read_parallel(values),
        overlap=read_overlap(values),
        micro_batch=values.integer("model.micro_batch_size", minimum=1),
        global_batch=global_batch,
        rampup=read_rampup(values, global_batch),
        max_steps=max_steps,
        max_seconds=_max_seconds(values),
        val_interval=val_interval,
        val_batches=_val_batches(values),
        gc_interval=values.integer("model.gc_interval", 0, minimum=0),
        accumulation_fusion=values.flag("model.gradient_accumulation_fusion", False),
        cpu_weights=values.flag("model.use_cpu_initialization", False),
        deterministic=values.flag("model.deterministic_mode", False),
        timeouts=read_timeouts(values),
        profiling=read_profiling(values, max_steps, ranks),
        accelerator=values.choice("trainer.accelerator", ACCELERATORS, "auto"),
        nodes=nodes,
        devices=devices,
        configuration=dict(flat),
    )


def _output(values: Values) -> Output:
    node = "exp_manager"
    return Output(
        log_dir=Path(values.text(f"{node}.explicit_log_dir")),
        resume=values.flag(f"{node}.resume_if_exists", False),
        resume_or_start=values.flag(f"{node}.resume_ignore_no_checkpoint", True),
        tensorboard=values.flag(f"{node}.create_tensorboard_logger", True),
        log_every=values.integer("trainer.log_every_n_steps", 10, minimum=1),
    )


def _restore_from(values: Values) -> Path | None:
    key = "restore_from_path"
    if not values.is_set(key):
        return None
    path = Path(values.text(key))
    if not path.is_absolute():
        values.fail(key, "the absolute path of a checkpoint, or of a directory of checkpoints")
    if path.suffix == ".nemo":
        values.fail(key, "a checkpoint of this trainer: a .nemo archive needs NeMo (engine=nemo)")
    return path


def _precision(values: Values) -> Literal["bf16", "fp32"]:
    key = "trainer.precision"
    if str(values.raw(key)).removeprefix("fp").removeprefix("float").startswith("16"):
        values.fail(
            key,
            "bf16, or 32 where the GPU has no bf16, such as a V100 or T4: fp16 and its loss scaling are not "
            "in this version; engine=nemo and engine=megatron_lm have them",
        )
    precision = values.choice(key, tuple(PRECISIONS), "32")
    if PRECISIONS[precision] == "fp32":
        return "fp32"
    if not values.flag("model.megatron_amp_O2", False):
        values.fail(
            "model.megatron_amp_O2", "True with trainer.precision=bf16: weights in bf16, masters in fp32"
        )
    return "bf16"


def _max_seconds(values: Values) -> float | None:
    limits = [_duration(values, key) for key in ("trainer.max_time", "exp_manager.max_time_per_run")]
    set_limits = [limit for limit in limits if limit is not None]
    return min(set_limits) if set_limits else None


def _duration(values: Values, key: str) -> float | None:
    """Read Lightning's ``DD:HH:MM:SS`` as seconds."""
    if not values.is_set(key):
        return None
    raw = values.raw(key)
    match = _DURATION.fullmatch(raw) if isinstance(raw, str) else None
    if not match:
        values.fail(key, "a quoted duration days:hours:minutes:seconds, such as '00:23:30:00'")
    days, hours, minutes, seconds = map(int, match.groups())
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


def _nodes(values: Values) -> int | None:
    key = "trainer.num_nodes"
    return values.integer(key, minimum=1) if values.is_set(key) else None


def _devices(values: Values) -> int | None:
    if values.raw("trainer.devices") in (None, "auto", -1):
        return None
    return values.integer("trainer.devices", minimum=1)
