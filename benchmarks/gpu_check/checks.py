"""The checks: each trains, compares and yields rows, passed, failed or skipped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from benchmarks.gpu_check.machine import Machine, Trained
from benchmarks.measuring import STEADY_STEP, speed
from slipway.common.errors import UserError
from slipway.trainer import requirements

# After the last one that counts is a save, and two more tell the peak memory after it.
_THROUGHPUT_STEPS = 40
# Rounding in another order: 32 bits on another device, over one step and over four of Adam.
_FIRST, _LATER = 1e-5, 2e-4
_LAYOUT_FIRST, _LAYOUT_LATER = 2e-6, 2e-5
# bf16 keeps 8 bits of each number, and the loss is a mean over many.
_BF16 = 1e-2
# Of independent draws, in standard deviations.
_DRAWS = 5.0

State = Literal["passed", "failed", "skipped"]

_BF16_KEYS = {"trainer.precision": "bf16", "model.megatron_amp_O2": True}
_TENSOR, _PIPELINE = "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
_VIRTUAL, _CONTEXT = "model.virtual_pipeline_model_parallel_size", "model.context_parallel_size"
_SEQUENCE = {"model.sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2": (2, {}),
    "tensor 2, sequence": (2, {_TENSOR: 2, **_SEQUENCE}),
    "pipeline 2": (2, {_PIPELINE: 2}),
    "pipeline 2, virtual 2": (2, {_PIPELINE: 2, _VIRTUAL: 2}),
    "context 2": (2, {_CONTEXT: 2}),
    "tensor 2, pipeline 2, virtual 2": (4, {_TENSOR: 2, _PIPELINE: 2, _VIRTUAL: 2}),
    "tensor 2, context 2, sequence": (4, {_TENSOR: 2, _CONTEXT: 2, **_SEQUENCE}),
    "pipeline 4": (4, {_PIPELINE: 4}),
    "tensor 2, pipeline 2, data 2": (8, {_TENSOR: 2, _PIPELINE: 2}),
}


@dataclass(frozen=True)
class Row:
    """The result of one check; `fix` says what to mend where it failed."""

    check: str
    state: State
    detail: str
    fix: str | None = None
    numbers: dict[str, Any] = field(default_factory=dict)


def check_versions(machine: Machine) -> Iterator[Row]:
    """Tell the versions; Transformer Engine is imported, as its libraries may not load."""
    described = machine.described
    libraries = ("megatron-core", "transformer_engine", "apex")
    names = ("python", "torch", "cuda", "cudnn", "nccl", "driver", *libraries)
    detail = ", ".join(f"{name} {described[name]}" for name in names if described.get(name))
    try:
        requirements.check_versions()
    except UserError as error:
        yield Row("versions", "failed", detail, str(error))
        return
    yield Row("versions", "passed", "; ".join([detail, *requirements.list_untested()]))
    problem = described["transformer_engine_problem"]
    if problem is None:
        yield Row("transformer_engine", "passed", f"{described['transformer_engine']} can be imported")
    elif described["transformer_engine"]:
        fix = "install one that is built for this torch, CUDA and Python, or model.transformer_engine=False"
        yield Row("transformer_engine", "failed", problem, fix)
    else:
        detail = "not installed: optimizer states are whole on every rank, and layers are megatron-core's own"
        yield Row("transformer_engine", "skipped", detail)


def check_devices(machine: Machine) -> Iterator[Row]:
    """Tell the GPUs, or in the driver's words why there is none."""
    if not machine.gpus:
        no_driver = machine.described["driver"] is None
        fix = "nothing, if this machine has no GPU" if no_driver else "see the reason, then docs/gpu.md"
        detail = f"no GPU: {machine.described['no_cuda']}; the rest runs on the CPU"
        yield Row("devices", "skipped" if no_driver else "failed", detail, fix)
        return
    names = {f"{gpu['name']} ({gpu['memory'] / 2**30:.1f} GiB, {gpu['capability']})" for gpu in machine.gpus}
    yield Row("devices", "passed", f"{len(machine.gpus)} x {', '.join(sorted(names))}")


def check_parity(machine: Machine) -> Iterator[Row]:
    """Train the same weights on the same batches in fp32 on a GPU and on the CPU."""
    if not machine.gpus:
        yield Row("parity", "skipped", "no GPU to compare with the CPU")
        return
    on_cpu = machine.train("one_cpu", {"trainer.accelerator": "cpu"})
    fix = "another torch or driver: fp32 matrices must be multiplied in fp32, without TF32"
    yield compared("parity", "fp32, GPU from CPU", machine.train("one", {}), on_cpu, (_FIRST, _LATER), fix)


def check_precision(machine: Machine) -> Iterator[Row]:
    """Train in bf16 and in fp32."""
    plain, half = machine.train("one", {}), machine.train("bf16", _BF16_KEYS)
    fix = "do not train in bf16 here before the reason is known"
    yield compared("precision", "bf16 from fp32", half, plain, (_BF16, _BF16), fix, with_norms=False)


def check_layouts(machine: Machine) -> Iterator[Row]:
    """Train in each layout that there are GPUs for; the numbers are those of one rank."""
    available = len(machine.gpus) or 2
    left = [name for name, (ranks, _) in LAYOUTS.items() if ranks > available]
    for name, (ranks, changes) in LAYOUTS.items():
        if ranks > available:
            continue
        label = f"layout {name}"
        trained = machine.train(label.replace(", ", "_").replace(" ", "_"), changes, ranks)
        fix = f"do not train with {name} here; NCCL_DEBUG=INFO shows the transport between the GPUs"
        limits = (_LAYOUT_FIRST, _LAYOUT_LATER)
        yield compared(label, f"{ranks} ranks from one", trained, machine.train("one", {}), limits, fix)
    if left:
        where = f"{available} GPU{'s' * (available > 1)}" if machine.gpus else "two CPU ranks"
        yield Row("layouts", "skipped", f"{len(left)} need more than {where}: {'; '.join(left)}")


def check_resume(machine: Machine) -> Iterator[Row]:
    """Kill a deterministic training with SIGKILL and continue it: bitwise what a whole one computes."""
    steps, every = 8, 3
    changes: dict[str, Any] = {
        "model.deterministic_mode": True,
        "model.hidden_dropout": 0.1,
        "trainer.max_steps": steps,
        "exp_manager.create_checkpoint_callback": True,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": every,
        # Complete at the next step, so that there is one to resume from whenever the signal comes.
        "exp_manager.checkpoint_callback_params.async_save": False,
        **(_BF16_KEYS if machine.gpus else {}),
    }
    whole = machine.train("whole", changes)
    was_running = machine.kill_after("killed", every + 1, machine.start("killed", changes))
    again = machine.finish("killed", machine.start("killed", changes))
    yield resumed(whole, again, was_running, is_gpu=bool(machine.gpus))


def check_dropout(machine: Machine) -> Iterator[Row]:
    """Look at the masks of the compiled functions, and train with and without recomputation."""
    yield drawn(machine.compute("benchmarks.gpu_check.dropout"))
    changes = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
    node = "model.activations_checkpoint"
    recompute = {f"{node}_granularity": "full", f"{node}_method": "uniform", f"{node}_num_layers": 1}
    plain = machine.train("dropout", changes)
    again = machine.train("dropout_recomputed", {**changes, **recompute})
    fix = "do not train with dropout and recomputation here before the reason is known"
    yield compared("dropout recompute", "with recomputation", again, plain, (_FIRST, _LATER), fix)


def check_throughput(machine: Machine, config: dict[str, Any] | None) -> Iterator[Row]:
    """Train the configuration's model on one node with mock data, and save once at the end.

    Where Transformer Engine cannot be imported, the layers are megatron-core's own.
    """
    ranks = config["trainer"].get("devices", 1) if config else 0
    reasons = {
        "no GPU to measure": not machine.gpus,
        "no configuration: it needs the libraries of `slipway`": config is None,
        f"trainer.devices={ranks} and {len(machine.gpus)} visible": ranks > len(machine.gpus),
    }
    why = [reason for reason, holds in reasons.items() if holds]
    if why or config is None:
        yield Row("throughput", "skipped", why[0])
        return
    has_engine = machine.described["transformer_engine_problem"] is None
    left_out = not has_engine and bool(config["model"].get("transformer_engine"))
    changes: dict[str, Any] = {
        "trainer.num_nodes": 1,
        "trainer.max_steps": _THROUGHPUT_STEPS + 2,
        "trainer.limit_val_batches": 0,
        "trainer.max_time": None,
        "exp_manager.max_time_per_run": None,
        "exp_manager.create_tensorboard_logger": False,
        "exp_manager.create_checkpoint_callback": True,
        "exp_manager.checkpoint_callback_params.dirpath": None,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": _THROUGHPUT_STEPS,
        "exp_manager.checkpoint_callback_params.save_top_k": 1,
        "model.data.data_impl": "mock",
        "model.data.data_prefix": [],
        **({"model.transformer_engine": False} if left_out else {}),
    }
    processes = machine.start("throughput", changes, ranks, config)
    row = measured(machine.finish("throughput", processes))
    yield replace(row, detail=f"without Transformer Engine: {row.detail}") if left_out else row


def compared(
    check: str,
    label: str,
    trained: Trained,
    reference: Trained,
    limits: tuple[float, float],
    fix: str,
    with_norms: bool = True,
) -> Row:
    """Return the row for two trainings that should tell the same numbers.

    Parameters
    ----------
    limits
        The largest relative difference of the first step, and of all.
    with_norms
        Whether the norms of the gradients are compared as well as the losses.
    """
    if (broken := _broken(check, trained, reference)) is not None:
        return broken
    names = ("loss", "grad_norm") if with_norms else ("loss",)
    differences = [
        max(abs(mine[name] / other[name] - 1) for name in names)
        for mine, other in zip(trained.steps, reference.steps, strict=True)
    ]
    # Of a number that is none, max() may return the other one.
    worst = max(differences) if all(map(math.isfinite, differences)) else math.nan
    first = differences[0]
    good = first <= limits[0] and worst <= limits[1]
    detail = f"{label}: first step {first:.1e} (limit {limits[0]:.0e}), {len(differences)} steps {worst:.1e} "
    numbers = {"first": first, "all": worst, "losses": [line["loss"] for line in trained.steps]}
    detail += f"(limit {limits[1]:.0e})"
    return Row(check, "passed" if good else "failed", detail, None if good else fix, numbers)


def drawn(functions: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return the row for the masks of functions, see `benchmarks.gpu_check.dropout`.

    Of `n` draws with an even chance the kept part has the standard deviation ``1 / (2 sqrt(n))``. The number
    that is kept of four has the variance 1 and the fourth central moment 2.5: over ``n / 4`` groups the
    standard deviation of the variance is ``sqrt(6 / n)``.
    """
    faults = []
    for name, masks in functions.items():
        draws = masks["draws"]
        if abs(masks["kept"] - 0.5) > _DRAWS / (2 * math.sqrt(draws)):
            faults.append(f"{name} keeps {masks['kept']:.4f} in place of half")
        if abs(masks["group_variance"] - 1) > _DRAWS * math.sqrt(6 / draws):
            faults.append(
                f"{name}: four neighbours vary {masks['group_variance']:.2f} times as independent ones"
            )
        if masks["other_backward"]:
            faults.append(f"{name}: the backward pass has another mask")
        if masks["other_recomputed"]:
            faults.append(f"{name}: recomputation has another mask")
    fix = "another torch (pytorch #198333), or no dropout: losses look right, and gradients are not"
    detail = "; ".join(faults) or (
        f"{', '.join(functions)}: half is kept, neighbours are independent, and backward passes and "
        "recomputation have the mask of the forward pass"
    )
    return Row("dropout", "failed" if faults else "passed", detail, fix if faults else None, dict(functions))


def resumed(whole: Trained, again: Trained, was_running: bool, is_gpu: bool) -> Row:
    """Return the row for a training that was killed and continued."""
    if (broken := _broken("resume", whole, again)) is not None:
        return broken
    if not was_running:
        return Row("resume", "failed", "the training ended before it could be killed", "run the check again")
    expected, curve = whole.curve, again.curve
    wrong = [step for step in expected if curve.get(step) != expected[step]]
    resumed_at = again.of("start")[-1]["step"]
    saves = [line["seconds"] for line in whole.of("checkpoint")]
    numbers: dict[str, Any] = {"save_seconds": saves, "resumed_at": resumed_at}
    if is_gpu:
        numbers |= _peaks_around_save(whole)
    if not resumed_at:
        return Row("resume", "failed", "it started anew: no checkpoint was complete", "run it again", numbers)
    if wrong:
        detail = f"resumed at step {resumed_at}; other numbers from step {wrong[0]} on"
        fix = "model.deterministic_mode does not make this model repeatable here: report it with the log"
        return Row("resume", "failed", detail, fix, numbers)
    detail = f"killed with SIGKILL, resumed at step {resumed_at}: losses and gradient norms bitwise the same"
    return Row("resume", "passed", f"{detail}{_peaks(numbers)}", None, numbers)


def measured(trained: Trained) -> Row:
    """Return the row for the throughput of a training: the medians of its steady steps."""
    if (problem := trained.problem()) is not None:
        fix = (
            "see throughput.log in the check's directory; a smaller model.micro_batch_size if memory ran out"
        )
        return Row("throughput", "failed", problem, fix)
    (start,) = trained.of("start")
    steady = [line for line in trained.steps if STEADY_STEP <= line["step"] <= _THROUGHPUT_STEPS]
    first, peaks = steady[0], _peaks_around_save(trained)
    at_peak = (
        (first["mfu"] * first["step_time"], first["mfu_causal"] * first["step_time"])
        if first["mfu"]
        else None
    )
    pace = speed([line["step_time"] for line in steady], start["tokens_per_step"], at_peak)
    phases = [line["phases"] for line in trained.of("phases") if line["last_step"] <= _THROUGHPUT_STEPS]
    numbers = {
        **asdict(pace),
        "tflops_per_gpu": statistics.median(line["tflops_per_gpu"] for line in steady),
        "data_wait": statistics.median(line["data_wait"] for line in steady),
        "phases": {name: phase["max"] for name, phase in phases[-1].items()} if phases else {},
        "peak_bytes": peaks["peak_before_save"],
        **peaks,
        "save_seconds": [line["seconds"] for line in trained.of("checkpoint")],
        "parameters": start["parameters"],
    }
    share = f", MFU {100 * pace.mfu:.1f} %" if pace.mfu is not None else ""
    times = f"{pace.step_seconds:.3f} s a step ({pace.fastest:.3f}-{pace.slowest:.3f})"
    detail = f"{times}, {pace.tokens_per_second:,.0f} tokens/s{share}{_peaks(numbers)}"
    return Row("throughput", "passed", detail, None, numbers)


def _broken(check: str, *trainings: Trained) -> Row | None:
    """Return the row for the first training that failed; None if none did."""
    problem = next((problem for training in trainings if (problem := training.problem())), None)
    return Row(check, "failed", problem, "see its log in the check's directory") if problem else None


def _peaks_around_save(trained: Trained) -> dict[str, Any]:
    memory = {line["step"]: line["memory_bytes"] for line in trained.steps}
    first_save = min(line["step"] for line in trained.of("checkpoint"))
    return {"peak_before_save": memory[first_save], "peak_after_save": memory[max(memory)]}


def _peaks(numbers: Mapping[str, Any]) -> str:
    if "peak_before_save" not in numbers:
        return ""
    before, after = (numbers[f"peak_{when}_save"] / 2**30 for when in ("before", "after"))
    return f"; peak {before:.2f} GiB before a save, {after:.2f} GiB after it"


Check = Callable[[Machine], Iterator[Row]]
CHECKS: dict[str, Check] = {
    "versions": check_versions,
    "devices": check_devices,
    "parity": check_parity,
    "precision": check_precision,
    "dropout": check_dropout,
    "layouts": check_layouts,
    "resume": check_resume,
}
NAMES = (*CHECKS, "throughput")
