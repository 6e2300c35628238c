"""Train until the last step or a request to stop; validate, save, and say why it ended."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterator
from functools import partial

import torch

from slipway.trainer.checkpoint.lock import Lock
from slipway.trainer.data.order import rank_share
from slipway.trainer.data.prefetch import DEPTH_ON_CPU, DEPTH_ON_CUDA, Prefetcher
from slipway.trainer.distributed import shorten_timeouts
from slipway.trainer.errors import DivergedError
from slipway.trainer.logs import LOGGER
from slipway.trainer.loop.batch_building import MicroBatch
from slipway.trainer.loop.profiling import Profiler
from slipway.trainer.loop.saving import Saver
from slipway.trainer.loop.session import Session, report_heldout
from slipway.trainer.loop.step import StepReduction, gather, train_losses
from slipway.trainer.loop.stopping import REASONS, Stopping
from slipway.trainer.loop.validation import evaluate
from slipway.trainer.model.model import Model
from slipway.trainer.report.memory import memory_usage
from slipway.trainer.report.phases import (
    DATA,
    FORWARD_BACKWARD,
    OPTIMIZER,
    REDUCTION,
    SAVE,
    VALIDATION,
    PhaseTimer,
)
from slipway.trainer.report.progress import StepClock
from slipway.trainer.report.reporter import Step


def train(session: Session, stopping: Stopping, stop_after: int | None, lock: Lock | None) -> str:
    """Run the training of a session; return why it ended.

    Parameters
    ----------
    session
        What :func:`slipway.trainer.loop.session.open_session` returned.
    stopping
        The requests to stop; answered after a step, and by ending a validation.
    stop_after
        Stop once this many steps are completed, as if interrupted; None to go on to the last.
    lock
        That of the directory of checkpoints, on the rank that holds it.

    Returns
    -------
    str
        ``max_steps``, ``already_complete``, ``stop_after``, or one of
        :data:`slipway.trainer.loop.stopping.REASONS`, after which there is more to be done.

    Raises
    ------
    DivergedError
        If a loss or a gradient is not finite.
    """
    progress, reporter = session.progress, session.reporter
    reporter.start(progress, session.parameters, session.resumed_from, session.attention)
    if progress.step >= session.settings.max_steps:
        reporter.end(progress.step, "already_complete")
        return "already_complete"
    report_heldout(session)
    if session.settings.gc_interval:
        gc.disable()
    loop = Loop(session, stopping, Saver(session, lock))
    _time_reductions(session.model, loop.phases)
    stopping.begin()
    reason = loop.run(stop_after)
    loop.phases.end()
    steps, seconds = loop.phases.take()
    reporter.report_ranks(
        progress.step, steps, gather([*seconds, *memory_usage(session.rank_context.device)])
    )
    reporter.end(progress.step, reason, is_stopped=reason in REASONS)
    return reason


def _time_reductions(model: Model, phases: PhaseTimer) -> None:
    """Time what reduces gradients at the end of a backward pass, and gathers weights in the optimizer."""
    model.config.finalize_model_grads_func = phases.measure(REDUCTION, model.config.finalize_model_grads_func)
    if not model.gathers_late:
        for chunk in model.chunks:
            chunk.start_param_sync = phases.measure(REDUCTION, chunk.start_param_sync)


class Loop:
    """The steps of a training, and the validations and saves between them.

    All ranks validate, save and stop after the same step. The events of one rank (a signal reached it, its
    time is over, its part of a checkpoint is written) are its flags. A step reduces them over all ranks
    together with the loss, before the optimizer: they cost no collective, and come a step late. So
    `Stopping.agree` takes over the flags of the step just taken, and `Stopping.known` returns the result
    without waiting. Validations and saves wait for all ranks anyway: after one, `Stopping.agree_now` asks the
    ranks anew, so that a signal that came meanwhile is answered at once, and the save just made is the last.
    """

    def __init__(self, session: Session, stopping: Stopping, saver: Saver) -> None:
        self.phases = PhaseTimer(session.rank_context.device, session.progress.step)
        self.session, self._settings, self._progress = session, session.settings, session.progress
        self._stopping, self._saver = stopping, saver
        self._profiler = Profiler(session.settings, session.rank_context, self.phases)
        device = session.rank_context.device
        is_cuda = device.type == "cuda"
        self._clock = StepClock(partial(torch.cuda.synchronize, device) if is_cuda else None)
        self.feed = Prefetcher(_batches(session), DEPTH_ON_CUDA if is_cuda else DEPTH_ON_CPU, device)
        # The training loss of the newest step, and the validation loss after it if that was computed.
        self.loss = math.nan
        self._validated: float | None = None

    def run(self, stop_after: int | None) -> str:
        """Take all steps, validate and save at the end; return why the training ended, as `train` does."""
        try:
            with contextlib.closing(self.feed):
                with self.session.model.use_ungathered():
                    flags = self.step()
                shorten_timeouts(self._settings.timeouts)
                while not (reason := self._finish_step(flags, stop_after)):
                    flags = self.step()
            # Not after a failure: a profiler that stops waits for the device, perhaps for a failed rank.
            self._profiler.close()
            heldout = self.session.heldout
            if self._validated is None and heldout is not None and self._stopping.agree_now() is None:
                self._validate()
        except DivergedError:
            # All ranks diverge at once: the checkpoint of an earlier step that is being written is completed.
            self._saver.settle()
            raise
        with self.phases.phase(SAVE):
            self._saver.end(self.loss, self._validated)
        return reason

    def step(self) -> list[bool]:
        """Take a step; return for each flag whether any rank had it set before the optimizer.

        The flags are whether a checkpoint is being written, and :meth:`Stopping.flags`.

        Raises
        ------
        DivergedError
            If the loss or the norm of the gradient is not finite.
        """
        session, progress, phases = self.session, self._progress, self.phases
        self._profiler.begin_step(progress.step)
        waited = self.feed.waited
        samples = self._settings.samples_after(progress.consumed_samples)
        epoch, batch = session.order.epoch(samples[0]), len(samples)
        micro_batches = batch // (self._settings.micro_batch * session.rank_context.layout.data)
        batches = phases.items(DATA, self.feed.step())
        with phases.phase(FORWARD_BACKWARD):
            local_loss = train_losses(self._settings, session.model, batches, micro_batches)
        timed, phase_seconds = (
            phases.take() if session.reporter.is_logged(progress.step + 1) else (range(0), [])
        )
        values = [*phase_seconds, *memory_usage(session.rank_context.device)] if timed else []
        with phases.phase(REDUCTION):
            flags = [self._saver.is_writing(), *self._stopping.flags()]
            reduction = StepReduction(local_loss, flags, values)
        lr = session.schedule(progress.step)
        with phases.phase(OPTIMIZER):
            grad_norm = session.optimizer.step(lr)
        # Read behind the optimizer, which waits for the device in any case. The weights are spoiled by now if
        # one of the two is not finite, and nothing is saved of them.
        self.loss, agreed = reduction.read()
        _check_finite("training loss", self.loss, progress.step)
        _check_finite("gradient norm", grad_norm, progress.step)
        session.optimizer.zero_grad()
        phases.end_step()
        progress.step += 1
        progress.consumed_samples = samples[-1] + 1
        seconds = self._clock.lap()
        waiting = (self.feed.waited - waited) / seconds
        session.reporter.report_step(progress, Step(self.loss, lr, grad_norm, seconds, waiting, epoch, batch))
        if timed:
            session.reporter.report_ranks(progress.step, timed, reduction.read_values())
        return agreed

    def _finish_step(self, flags: list[bool], stop_after: int | None) -> str | None:
        """Validate and save as due after a step that returned `flags`; return why training ends, or None."""
        settings, step = self._settings, self._progress.step
        if self._profiler.is_last(step - 1):
            with self._clock.exclude():
                self._profiler.end_step(step - 1)
        self._validated = None
        is_validated = self.session.heldout is not None and step % settings.val_interval == 0
        if is_validated:
            with self._clock.exclude():
                self._validate()
        if settings.gc_interval and step % settings.gc_interval == 0:
            gc.collect()
        if step >= settings.max_steps:
            return "max_steps"
        if stop_after is not None and step >= stop_after:
            return "stop_after"
        is_writing, *asked = flags
        self._stopping.agree(asked)
        is_saving = self._saver.is_due() or (self._saver.is_pending and not is_writing)
        if is_saving:
            with self._clock.exclude(), self.phases.phase(SAVE):
                self._saver.step(self.loss, self._validated)
        return self._stopping.agree_now() if is_saving or is_validated else self._stopping.known

    def _validate(self) -> None:
        """Compute the loss on the held-out batches, unless a request to stop comes on the way."""
        session, began, step = self.session, time.perf_counter(), self._progress.step
        assert session.heldout is not None

        def is_stopped() -> bool:
            if reason := self._stopping.agree_now():
                LOGGER.warning("step %d | validation is abandoned: %s", step, reason)
            return bool(reason)

        with self.phases.phase(VALIDATION), session.model.gather_early():
            result = evaluate(
                self._settings, session.rank_context, session.model, session.heldout, is_stopped
            )
            if result is None:
                return
            if not math.isfinite(result.mean):
                raise DivergedError(f"the validation loss after step {step} is {result.mean}: stopping")
            session.reporter.report_validation(step, result.mean, time.perf_counter() - began)
            self._validated = result.mean


def _check_finite(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise DivergedError(
            f"the {name} of step {step + 1} is {value}: stopping without a checkpoint; "
            "a lower model.optim.lr or a longer model.optim.sched.warmup_steps may help"
        )


def _batches(session: Session) -> Iterator[Iterator[MicroBatch]]:
    """Yield this rank's micro batches of each step that is left."""
    settings, rank_context, consumed = (
        session.settings,
        session.rank_context,
        session.progress.consumed_samples,
    )
    for _ in range(session.progress.step, settings.max_steps):
        samples = settings.samples_after(consumed)
        own = rank_share(0, len(samples), rank_context.data_rank, rank_context.layout.data)
        share = samples[own.start : own.stop]
        yield session.batch_builder.batches(
            session.training, [session.order.window(sample) for sample in share], share
        )
        consumed = samples[-1] + 1
