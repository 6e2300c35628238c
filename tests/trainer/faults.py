"""Injected faults of a rank.

``raise:RANK:STEP``, ``norm:RANK:STEP`` for a gradient, ``hold:RANK:STEP`` for a step that lasts until a
signal has been taken, ``tidy:RANK:SECONDS`` for how long it takes to remove checkpoints, ``retain:RANK:STEP``
for a removal that lasts until a step is done, ``slow:RANK:MS`` for milliseconds that each step waits,
``full:RANK:BYTES`` for the largest file that can be written, ``draw:RANK:STEP`` for a step that draws one
random number more than the other ranks'. ``cuda:RANK:0`` takes the exchange between pipeline stages that a
GPU would have, and ``clock:RANK:0`` prints for each completed save if the clock of the steps was paused.
``plans:RANK:0`` tells when a save is validated, and when its plans are gathered. ``shard:RANK:0`` spreads
optimizer states over the ranks, with a stand-in for the fused Adam of GPUs, and tells of each global batch if
forward passes gather weights. Before a step, ``delete:RANK:STEP``, ``move:RANK:STEP`` and
``replace:RANK:STEP`` do so with the run, ``empty:RANK:STEP`` deletes its checkpoints alone, and
``forget:RANK:STEP`` its logs.
"""

from __future__ import annotations

import importlib
import math
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

FAULT = "TRAINER_TEST_FAULT"
HELD = "held in the middle of the step"


def main(arguments: Sequence[str]) -> int:
    """Run another module's ``main``, with a fault injected if the environment names one."""
    sys.argv = [*arguments]
    inject()
    return int(importlib.import_module(arguments[0]).main(arguments[1:]))


def inject() -> None:
    """Inject the fault that the environment names into this process."""
    if not os.environ.get(FAULT):
        return
    from slipway.trainer.loop import run, validation
    from slipway.trainer.optim.build import Optimizer
    from slipway.trainer.signals import StopSignals

    kind, rank, step = os.environ[FAULT].split(":")
    if rank not in ("all", os.environ["RANK"]):
        return
    if kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(step), int(step)))
        return
    remaining = int(step)

    def is_due() -> bool:
        nonlocal remaining
        remaining -= 1
        return remaining == 0

    if kind == "raise":
        compute = run.train_losses

        def fail(settings: Any, model: Any, batches: Any, micro_batches: int) -> float:
            if is_due():
                next(batches)
                raise ValueError("a matrix is missing\nand more")
            return compute(settings, model, batches, micro_batches)

        run.train_losses = fail
        return
    if kind == "slow":
        compute = run.train_losses

        def wait(settings: Any, model: Any, batches: Any, micro_batches: int) -> float:
            time.sleep(int(step) / 1000)
            return compute(settings, model, batches, micro_batches)

        run.train_losses = wait
        return
    if kind == "hold":
        compute, take, signal_taken = run.train_losses, StopSignals._take, threading.Event()

        def hold(settings: Any, model: Any, batches: Any, micro_batches: int) -> float:
            if is_due():
                print(HELD, flush=True)
                signal_taken.wait()
            return compute(settings, model, batches, micro_batches)

        def take_and_release(self: StopSignals, number: signal.Signals) -> None:
            take(self, number)
            signal_taken.set()

        run.train_losses = hold
        StopSignals._take = take_and_release  # type: ignore[method-assign]
        return
    if kind == "cuda":
        import torch

        from slipway.trainer.model import transformer

        options = transformer._parallel_options
        transformer._parallel_options = lambda settings, rank_context: options(
            settings, replace(rank_context, device=torch.device("cuda"))
        )
        return
    if kind == "shard":
        from tests.trainer.fused_adam import stand_in_for_fused_adam

        stand_in_for_fused_adam()

        def report_hooks(name: str, compute: Any) -> Any:
            def compute_and_report(settings: Any, model: Any, batches: Any, micro_batches: int) -> Any:
                hooks = {bool(chunk.remove_forward_pre_hook_handles) for chunk in model.chunks}
                print(f"{name} with hooks {hooks}", flush=True)
                return compute(settings, model, batches, micro_batches)

            return compute_and_report

        run.train_losses = report_hooks("training", run.train_losses)
        validation.evaluate_losses = report_hooks("validation", validation.evaluate_losses)
        return
    if kind in ("delete", "move", "replace", "empty", "forget"):
        compute = run.train_losses

        def lose(settings: Any, model: Any, batches: Any, micro_batches: int) -> float:
            if is_due():
                log_dir, checkpoints = settings.output.log_dir, settings.saving.directory
                if kind in ("move", "replace"):
                    log_dir.rename(log_dir.with_name(f"{log_dir.name}_before"))
                else:
                    shutil.rmtree(checkpoints if kind == "empty" else log_dir)
                if kind == "replace":
                    (checkpoints / "of another training").mkdir(parents=True)
            return compute(settings, model, batches, micro_batches)

        run.train_losses = lose
        return
    if kind == "draw":
        import torch

        compute = run.train_losses

        def draw(settings: Any, model: Any, batches: Any, micro_batches: int) -> float:
            if is_due():
                torch.rand(1)
            return compute(settings, model, batches, micro_batches)

        run.train_losses = draw
        return
    if kind == "clock":
        from slipway.trainer.loop.saving import Saver
        from slipway.trainer.report.progress import StepClock

        pause, settle, pauses = StepClock.exclude, Saver.settle, []

        @contextmanager
        def paused(self: StepClock) -> Iterator[None]:
            with pause(self):
                pauses.append(self)
                yield
                pauses.pop()

        def settle_and_report(self: Saver) -> None:
            if self._pending:
                print(f"settled, paused {bool(pauses)}", flush=True)
            settle(self)

        StepClock.exclude = paused  # type: ignore[method-assign]
        Saver.settle = settle_and_report  # type: ignore[method-assign]
        return
    if kind == "plans":
        from megatron.core.dist_checkpointing import state_dict_utils
        from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

        def report_calls(owner: Any, name: str, word: str) -> None:
            original = getattr(owner, name)

            def report(*arguments: Any, **options: Any) -> Any:
                print(word, flush=True)
                return original(*arguments, **options)

            setattr(owner, name, report)

        report_calls(state_dict_utils, "validate_sharding_integrity", "save validated")
        report_calls(MCoreSavePlanner, "create_global_plan", "plans gathered")
        return
    if kind == "retain":
        from slipway.trainer.checkpoint import retention

        def wait_for_step(saving: Any, _latest: Any) -> None:
            deadline = time.monotonic() + 30
            while f'"step": {step},' not in (saving.directory.parent / "metrics.jsonl").read_text():
                if time.monotonic() > deadline:
                    os._exit(1)
                time.sleep(0.01)

        retention.keep_best = wait_for_step
        return
    if kind == "tidy":
        from slipway.trainer.checkpoint import retention

        retention.keep_best = lambda saving, latest: time.sleep(float(step))
        return
    step_of = Optimizer.step

    def spoil(self: Optimizer, lr: float) -> float:
        norm = step_of(self, lr)
        return math.inf if is_due() else norm

    Optimizer.step = spoil  # type: ignore[method-assign]
