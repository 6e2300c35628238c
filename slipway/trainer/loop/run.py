"""Train until the last step or a request to stop; validate, save, and say why it ended."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Last:
    """The reason for the end, the last training loss, and the validation loss if it was just computed."""

    reason: str
    loss: float
    validated: float | None = None


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
    reporter.start(progress, session.parameters, session.resumed_from)
    if progress.step >= session.settings.max_steps:
        reporter.end(progress.step, "already_complete")
        return "already_complete"
    report_heldout(session)
    if session.settings.gc_interval:
        gc.disable()
    saver = Saver(session, lock)
    phases = PhaseTimer(session.rank_context.device, progress.step)
    _time_reductions(session.model, phases)
    stopping.begin()
    with _settled_if_diverged(saver):
        profiler = Profiler(session.settings, session.rank_context, phases)
        with contextlib.closing(_feed(session)) as feed:
            last = _steps(session, phases, profiler, saver, stopping, feed, stop_after)
        # Not after a failure: a profiler that stops waits for the device, which may wait for a failed rank.
        profiler.close()
        validated = last.validated
        if validated is None and session.heldout is not None and stopping.agreed() is None:
            with phases.phase(VALIDATION), session.model.gathered():
                validated = _validate(session, stopping)
    with phases.phase(SAVE):
        saver.end(last.loss, validated)
    phases.end()
    steps, seconds = phases.take()
    reporter.ranks(progress.step, steps, gather([*seconds, *memory_usage(session.rank_context.device)]))
    reporter.end(progress.step, last.reason, is_stopped=last.reason in REASONS)
    return last.reason


def _time_reductions(model: Model, phases: PhaseTimer) -> None:
    """Time what reduces gradients at the end of a backward pass, and gathers weights in the optimizer."""
    model.config.finalize_model_grads_func = phases.timed(REDUCTION, model.config.finalize_model_grads_func)
    if not model.gathers_late:
        for chunk in model.chunks:
            chunk.start_param_sync = phases.timed(REDUCTION, chunk.start_param_sync)


def _steps(
    session: Session,
    phases: PhaseTimer,
    profiler: Profiler,
    saver: Saver,
    stopping: Stopping,
    feed: Prefetcher[MicroBatch],
    stop_after: int | None,
) -> _Last:
    settings, progress = session.settings, session.progress
    device, is_first = session.rank_context.device, True
    clock = StepClock(partial(torch.cuda.synchronize, device) if device.type == "cuda" else None)
    while True:
        profiler.begin_step(progress.step)
        with session.model.ungathered() if is_first else contextlib.nullcontext():
            loss, flags = _step(session, phases, feed, clock, lambda: [saver.is_writing(), *stopping.flags()])
        if profiler.is_last(progress.step - 1):
            with clock.paused():
                profiler.end_step(progress.step - 1)
        if is_first:
            shorten_timeouts(settings.timeouts)
            is_first = False
        validated = None
        is_validated = session.heldout is not None and progress.step % settings.val_interval == 0
        if is_validated:
            with clock.paused(), phases.phase(VALIDATION), session.model.gathered():
                validated = _validate(session, stopping)
        if settings.gc_interval and progress.step % settings.gc_interval == 0:
            gc.collect()
        if progress.step >= settings.max_steps:
            return _Last("max_steps", loss, validated)
        if stop_after is not None and progress.step >= stop_after:
            return _Last("stop_after", loss, validated)
        is_writing, *asked = flags
        stopping.agree(asked)
        saves = saver.is_due() or (saver.is_pending and not is_writing)
        if saves:
            with clock.paused(), phases.phase(SAVE):
                saver.step(loss, validated)
        # After a save that was due: what comes meanwhile is then answered at once, and one save is enough.
        if reason := stopping.agreed() if saves or is_validated else stopping.known:
            return _Last(reason, loss, validated)


@contextlib.contextmanager
def _settled_if_diverged(saver: Saver) -> Iterator[None]:
    """Complete the checkpoint of an earlier step, if one is being written; all ranks diverge at once."""
    try:
        yield
    except DivergedError:
        saver.settle()
        raise


def _step(
    session: Session,
    phases: PhaseTimer,
    feed: Prefetcher[MicroBatch],
    clock: StepClock,
    flags: Callable[[], Sequence[bool]],
) -> tuple[float, list[bool]]:
    """Take a step; return its loss, and for each flag whether any rank had it set before the optimizer."""
    settings, progress = session.settings, session.progress
    waited = feed.waited
    epoch = session.order.epoch(progress.consumed_samples)
    batch = settings.batch_after(progress.consumed_samples)
    micro_batches = batch // (settings.micro_batch * session.rank_context.layout.data)
    batches = phases.items(DATA, feed.step())
    with phases.phase(FORWARD_BACKWARD):
        local_loss = train_losses(settings, session.model, batches, micro_batches)
    timed, phase_seconds = phases.take() if session.reporter.is_logged(progress.step + 1) else (range(0), [])
    values = [*phase_seconds, *memory_usage(session.rank_context.device)] if timed else []
    with phases.phase(REDUCTION):
        reduction = StepReduction(local_loss, flags(), values)
    lr = session.schedule(progress.step)
    with phases.phase(OPTIMIZER):
        grad_norm = session.optimizer.step(lr)
    # Read behind the optimizer, which waits for the device in any case. The weights are spoiled by now if one
    # of the two is not finite, and nothing is saved of them.
    loss, agreed = reduction.read()
    _check_finite("training loss", loss, progress.step)
    _check_finite("gradient norm", grad_norm, progress.step)
    session.optimizer.zero_grad()
    phases.end_step()
    progress.step += 1
    progress.consumed_samples += batch
    seconds = clock.lap()
    session.reporter.step(
        progress, Step(loss, lr, grad_norm, seconds, (feed.waited - waited) / seconds, epoch, batch)
    )
    if timed:
        session.reporter.ranks(progress.step, timed, reduction.read_values())
    return loss, agreed


def _check_finite(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise DivergedError(
            f"the {name} of step {step + 1} is {value}: stopping without a checkpoint; "
            "a lower model.optim.lr or a longer model.optim.sched.warmup_steps may help"
        )


def _feed(session: Session) -> Prefetcher[MicroBatch]:
    device = session.rank_context.device
    return Prefetcher(_batches(session), DEPTH_ON_CUDA if device.type == "cuda" else DEPTH_ON_CPU, device)


def _batches(session: Session) -> Iterator[Iterator[MicroBatch]]:
    """Yield this rank's micro batches of each step that is left."""
    settings, rank_context, consumed = (
        session.settings,
        session.rank_context,
        session.progress.consumed_samples,
    )
    for _ in range(session.progress.step, settings.max_steps):
        batch = settings.batch_after(consumed)
        share = rank_share(consumed, batch, rank_context.data_rank, rank_context.layout.data)
        yield session.batch_builder.batches(
            session.training, [session.order.window(sample) for sample in share], share
        )
        consumed += batch


def _validate(session: Session, stopping: Stopping) -> float | None:
    """Return the loss on the held-out batches; None if this is stopped on the way."""
    assert session.heldout is not None
    began, step = time.perf_counter(), session.progress.step

    def is_stopped() -> bool:
        if reason := stopping.agreed():
            LOGGER.warning("step %d | validation is abandoned: %s", step, reason)
        return bool(reason)

    result = evaluate(session.settings, session.rank_context, session.model, session.heldout, is_stopped)
    if result is None:
        return None
    if not math.isfinite(result.mean):
        raise DivergedError(f"the validation loss after step {step} is {result.mean}: stopping")
    session.reporter.validation(step, result.mean, time.perf_counter() - began)
    return result.mean
