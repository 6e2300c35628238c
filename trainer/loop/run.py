"""Train until the last step, the time limit or a request to stop; validate, save, and say why it ended."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator

from trainer.data.batches import Batch
from trainer.data.order import rank_share
from trainer.distributed import any_rank
from trainer.errors import DivergedError
from trainer.loop.saving import Saver
from trainer.loop.session import Session, report_heldout
from trainer.loop.step import evaluate_losses, train_losses


def train(session: Session, started: float, stop_after: int | None) -> None:
    """Run the training of a session.

    Parameters
    ----------
    session
        What :func:`trainer.loop.session.open_session` returned.
    started
        ``time.monotonic()`` when this process began; the time limit counts from there.
    stop_after
        Stop once this many steps are completed, as if interrupted; None to go on to the last.

    Raises
    ------
    DivergedError
        If a loss or a gradient is not finite.
    """
    progress, reporter = session.progress, session.reporter
    reporter.start(progress, session.parameters, session.resumed_from)
    if progress.step >= session.settings.max_steps:
        reporter.end(progress.step, "already_complete")
        return
    report_heldout(session)
    if session.settings.gc_interval:
        gc.disable()
    saver = Saver(session)
    reason, loss, validated = _steps(session, saver, started, stop_after)
    if session.heldout_batches and validated is None:
        validated = _validate(session)
    saver.end(loss, validated)
    reporter.end(progress.step, reason)


def _steps(
    session: Session, saver: Saver, started: float, stop_after: int | None
) -> tuple[str, float, float | None]:
    """Return why stepping ended, the last training loss, and the validation loss if it was just computed."""
    settings, progress = session.settings, session.progress
    while True:
        loss = _step(session)
        validated = None
        if session.heldout_batches and progress.step % settings.val_interval == 0:
            validated = _validate(session)
        if settings.gc_interval and progress.step % settings.gc_interval == 0:
            gc.collect()
        reason = _reason_to_end(session, started, stop_after)
        if reason:
            return reason, loss, validated
        saver.step(loss, validated)


def _reason_to_end(session: Session, started: float, stop_after: int | None) -> str | None:
    settings, progress = session.settings, session.progress
    if progress.step >= settings.max_steps:
        return "max_steps"
    if stop_after is not None and progress.step >= stop_after:
        return "stop_after"
    if settings.max_seconds is not None:
        over = time.monotonic() - started > settings.max_seconds
        if any_rank(over, session.place.device):
            return "max_time"
    return None


def _step(session: Session) -> float:
    settings, progress = session.settings, session.progress
    began = time.perf_counter()
    epoch = session.order.epoch(progress.consumed_samples)
    loss = train_losses(
        settings, session.model, _training_batches(session), session.place.layout.micro_batches
    )
    _check_finite("training loss", loss, progress.step)
    lr = session.schedule(progress.step)
    grad_norm = session.optimizer.step(lr)
    # A finite loss can have such a gradient, and the weights are spoiled by now.
    _check_finite("gradient norm", grad_norm, progress.step)
    session.optimizer.zero_grad()
    progress.step += 1
    progress.consumed_samples += settings.global_batch
    session.reporter.step(progress, loss, lr, grad_norm, time.perf_counter() - began, epoch)
    return loss


def _check_finite(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise DivergedError(
            f"the {name} of step {step + 1} is {value}: stopping without a checkpoint; "
            "a lower model.optim.lr or a longer model.optim.sched.warmup_steps may help"
        )


def _training_batches(session: Session) -> Iterator[Batch]:
    place = session.place
    share = rank_share(
        session.progress.consumed_samples, session.settings.global_batch, place.data_rank, place.layout.data
    )
    return session.maker.batches(session.training, [session.order.window(sample) for sample in share])


def _validate(session: Session) -> float:
    settings, place = session.settings, session.place
    assert session.heldout is not None
    began = time.perf_counter()
    total, count = 0.0, 0.0
    for windows in session.heldout_batches:
        share = rank_share(0, len(windows), place.data_rank, place.layout.data)
        mine = [windows[index] for index in share]
        batches = session.maker.batches(session.heldout, mine)
        sums = evaluate_losses(settings, session.model, batches, len(mine) // settings.micro_batch)
        total, count = total + float(sums[0]), count + float(sums[1])
    loss = total / max(count, 1.0)
    if not math.isfinite(loss):
        raise DivergedError(f"the validation loss after step {session.progress.step} is {loss}: stopping")
    session.reporter.validation(session.progress.step, loss, time.perf_counter() - began)
    return loss
