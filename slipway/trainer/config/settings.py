"""The settings of a training: the part of the configuration that the trainer implements, as typed values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from slipway.trainer.config.architecture import Architecture, read_architecture
from slipway.trainer.config.data import Data, read_data
from slipway.trainer.config.distillation import Distillation, read_distillation
from slipway.trainer.config.fp8 import Fp8, read_fp8
from slipway.trainer.config.optimization import Optimization, read_optimization
from slipway.trainer.config.parallel import Overlap, Parallel, Timeouts, read_overlap, read_parallel
from slipway.trainer.config.profiling import Profiling, read_profiling
from slipway.trainer.config.rampup import Rampup, read_rampup
from slipway.trainer.config.resume import Resume, check_data_weights, read_resume
from slipway.trainer.config.rows import COUNT, OFF, ON, SIZE, Reader, Row, optional, path, read_rows, rows_of
from slipway.trainer.config.saving import Saving, read_saving
from slipway.trainer.config.t5 import Denoising, is_t5, read_denoising, read_stacks
from slipway.trainer.config.values import Values

# Without a CUDA device "auto" takes the CPU, and "gpu" and "cuda" are refused.
ACCELERATORS = ("gpu", "cuda", "cpu", "auto")
COMPILE = "model.compile_layers"
PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "32": "fp32", "32-true": "fp32"}
_COMPILE: Reader = partial(Values.choice, valid=("auto", "True", "False"), default="auto")
_DURATION = re.compile(":".join([r"(\d{1,9})"] * 4), re.ASCII)


def _restore_from(values: Values, key: str) -> Path:
    start = path(values, key)
    if not start.is_absolute():
        values.fail(key, "the absolute path of a checkpoint, or of a directory of checkpoints")
    if start.suffix == ".nemo":
        values.fail(key, "a checkpoint of this trainer: a .nemo archive needs NeMo (engine=nemo)")
    return start


def _precision(values: Values, key: str) -> Literal["bf16", "fp32"]:
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


def _max_seconds(values: Values, key: str) -> float | None:
    limits = [_duration(values, limit) for limit in (key, "exp_manager.max_time_per_run")]
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


def _val_interval(values: Values, key: str) -> int:
    if isinstance(values.raw(key), float):
        values.fail(key, "a whole number of steps; a fraction of an epoch has no meaning here")
    return values.integer(key, 1000, minimum=1)


def _val_batches(values: Values, key: str) -> int:
    raw = values.raw(key)
    if isinstance(raw, float) and raw != 0.0:
        values.fail(key, "a whole number of global batches, or 0 for no validation")
    return values.integer(key, 50, minimum=0)


def _devices(values: Values, key: str) -> int | None:
    return None if values.raw(key) in (None, "auto", -1) else values.integer(key, minimum=1)


@dataclass(frozen=True)
class Output:
    """The directory of a training's logs, and whether the training continues an earlier launch."""

    log_dir: Annotated[Path, Row("exp_manager.explicit_log_dir", path)]
    resume: Annotated[bool, Row("exp_manager.resume_if_exists", OFF)]
    resume_or_start: Annotated[bool, Row("exp_manager.resume_ignore_no_checkpoint", ON)]
    tensorboard: Annotated[bool, Row("exp_manager.create_tensorboard_logger", ON)]
    log_every: Annotated[int, Row("trainer.log_every_n_steps", partial(SIZE, default=10))]


@dataclass(frozen=True)
class Settings:
    """Everything a training needs to know.

    `architecture` is a GPT's, or the decoder of a T5; a T5 has an `encoder` and a `denoising` besides, and a
    GPT that learns from a teacher a `distillation`.
    `restore_from` is the checkpoint whose weights a new training starts from.
    `nodes` is ``None`` where there are as many as were started. With `cpu_weights` the initial weights are
    drawn on the CPU, the same for every layout and device. With `accumulation_fusion` products of
    matrices add to the gradients of weights. `configuration` has the dotted keys of all this.
    """

    architecture: Architecture
    encoder: Architecture | None
    denoising: Denoising | None
    distillation: Distillation | None
    optimization: Optimization
    data: Data
    output: Output
    saving: Saving
    resume: Resume
    restore_from: Annotated[Path | None, Row("restore_from_path", optional(_restore_from))]
    precision: Annotated[
        Literal["bf16", "fp32"], Row("trainer.precision", _precision, also=("model.megatron_amp_O2",))
    ]
    fp8: Fp8 | None
    seed: Annotated[int, Row("model.seed", partial(COUNT, default=1234))]
    parallel: Parallel
    overlap: Overlap
    micro_batch: Annotated[int, Row("model.micro_batch_size", SIZE)]
    global_batch: Annotated[int, Row("model.global_batch_size", SIZE)]
    rampup: Rampup | None
    max_steps: Annotated[int, Row("trainer.max_steps", SIZE)]
    max_seconds: Annotated[
        float | None, Row("trainer.max_time", _max_seconds, also=("exp_manager.max_time_per_run",))
    ]
    val_interval: Annotated[int, Row("trainer.val_check_interval", _val_interval)]
    val_batches: Annotated[int, Row("trainer.limit_val_batches", _val_batches)]
    gc_interval: Annotated[int, Row("model.gc_interval", COUNT)]
    cpu_weights: Annotated[
        bool, Row("model.use_cpu_initialization", OFF, on_cpu="weights are made where they live")
    ]
    accumulation_fusion: Annotated[
        bool,
        Row("model.gradient_accumulation_fusion", OFF, on_cpu="kernels of Transformer Engine and Apex"),
    ]
    compile_layers: Annotated[Literal["auto", "True", "False"], Row(COMPILE, _COMPILE)]
    deterministic: Annotated[bool, Row("model.deterministic_mode", OFF)]
    timeouts: Timeouts
    profiling: Profiling
    accelerator: Annotated[
        str, Row("trainer.accelerator", partial(Values.choice, valid=ACCELERATORS, default="auto"))
    ]
    nodes: Annotated[int | None, Row("trainer.num_nodes", optional(SIZE))]
    devices: Annotated[int | None, Row("trainer.devices", _devices)]
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

    def set_split_rule(self, rule: str) -> Settings:
        """Return the settings with the data divided by a rule."""
        return replace(self, data=replace(self.data, split_rule=rule))

    def batch_after(self, consumed_samples: int) -> int:
        """Return the global batch of the step before which so many samples were consumed."""
        return self.rampup(consumed_samples) if self.rampup else self.global_batch

    def samples_after(self, consumed_samples: int) -> Sequence[int]:
        """Return the samples of that step, in their order, without those that are passed over."""
        batch, resume = self.batch_after(consumed_samples), self.resume
        first, last = (resume.pass_over(consumed_samples, count) for count in (0, batch - 1))
        if last - first < batch:
            return range(first, last + 1)
        return [resume.pass_over(consumed_samples, count) for count in range(batch)]


def read_settings(flat: Mapping[str, Any]) -> Settings:
    """Turn dotted keys into settings.

    Raises
    ------
    UserError
        Naming the key, its value and the valid ones.
    """
    values = Values(flat)
    own = {name: row.read(values, row.key) for name, row in rows_of(Settings).items() if row.read}
    t5, output = is_t5(flat), read_rows(Output, values)
    ranks = own["nodes"] * own["devices"] if own["nodes"] and own["devices"] else None
    encoder, architecture = read_stacks(values) if t5 else (None, read_architecture(values))
    data, resume = read_data(values, t5), read_resume(values)
    check_data_weights(resume, values, data)
    return Settings(
        architecture=architecture,
        encoder=encoder,
        denoising=read_denoising(values) if t5 else None,
        distillation=read_distillation(values),
        optimization=read_optimization(values, own["max_steps"]),
        data=data,
        output=output,
        saving=read_saving(values, output.log_dir, own["val_interval"]),
        resume=resume,
        fp8=read_fp8(values, own["precision"]),
        parallel=read_parallel(values),
        overlap=read_overlap(values),
        rampup=read_rampup(values, own["global_batch"]),
        timeouts=read_rows(Timeouts, values),
        profiling=read_profiling(values, own["max_steps"], ranks),
        configuration=dict(flat),
        **own,
    )
