"""Saving during a training: the times, the lock of the directory, and the removal of older checkpoints."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from slipway.trainer.checkpoint import naming, retention, state, store
from slipway.trainer.checkpoint.async_save import AsyncSave
from slipway.trainer.checkpoint.lock import Lock
from slipway.trainer.checkpoint.marker import Marker
from slipway.trainer.checkpoint.strategies import SaveStrategy
from slipway.trainer.config.settings import Settings
from slipway.trainer.data.identity import to_json
from slipway.trainer.distributed import RankContext, run_on_all_ranks
from slipway.trainer.logs import LOGGER
from slipway.trainer.loop.session import Session


@contextlib.contextmanager
def lock_directory(settings: Settings, rank_context: RankContext) -> Iterator[Lock | None]:
    """Hold the lock of the directory of checkpoints on rank 0, if any is going to be written.

    Raises
    ------
    UserError
        On every rank, if another training holds it.
    """
    saving, is_held = settings.saving, settings.saving.enabled and rank_context.is_main
    lock = run_on_all_ranks(lambda: Lock(saving.directory, settings.output.log_dir) if is_held else None)
    yield lock
    if lock:
        lock.release()


class Saver:
    """The saving of a training by its settings; every rank has one and calls it at the same steps.

    At most one save is under way: the next one that is due waits for it. Nothing is saved once the run was
    deleted or moved, which the holder of the `lock`, rank 0, finds.
    """

    def __init__(self, session: Session, lock: Lock | None) -> None:
        self._session, self._lock = session, lock
        self._saving = session.settings.saving
        self._strategy = SaveStrategy()
        self._pending: AsyncSave | None = None
        self._tidying: threading.Thread | None = None
        self._began, self._saved = 0.0, -1
        # Only those of earlier launches, and only until this one has saved a checkpoint.
        self._leftovers = store.list_leftovers(self._saving.directory) if session.rank_context.is_main else []

    def is_due(self) -> bool:
        """Return whether :meth:`step` saves after this step."""
        return bool(self._saving.every) and self._session.progress.step % self._saving.every == 0

    @property
    def is_pending(self) -> bool:
        """Return whether a save was begun that is not complete, on all ranks alike."""
        return self._pending is not None

    def is_writing(self) -> bool:
        """Return whether this rank has not yet written its part of the save that was begun."""
        return self._pending is not None and self._pending.is_writing()

    def step(self, loss: float, validated: float | None) -> None:
        """Save if a checkpoint is due after this step, else complete the one that is written.

        Parameters
        ----------
        loss
            The training loss of the step.
        validated
            The validation loss after it, or None if that is not known.
        """
        if self.is_due():
            self._save(loss, validated, self._saving.background)
        else:
            self.settle()

    def end(self, loss: float, validated: float | None) -> None:
        """Save after the last step, unless :meth:`step` just did, and complete the pending save."""
        if self._saved != self._session.progress.step:
            self._save(loss, validated, background=False)
        self.settle()
        self._wait_until_tidy()

    def settle(self) -> None:
        """Complete the checkpoint that is being written, if there is one.

        Raises
        ------
        RuntimeError
            On every rank, if one could not write.
        UserError
            On every rank, if the run was deleted or moved.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._wait_until_tidy()
        self._check_lock()
        checkpoint = pending.finish()
        self._session.reporter.report_checkpoint(
            checkpoint.marker.step, checkpoint.path, time.perf_counter() - self._began
        )
        if self._session.rank_context.is_main:
            # In the background: removing a large checkpoint takes long, and all ranks would wait for it. A
            # daemon keeps no process from ending; a checkpoint that is not yet removed is hidden.
            self._tidying = threading.Thread(
                target=self._tidy, args=(checkpoint,), name="retention", daemon=True
            )
            self._tidying.start()

    def _tidy(self, latest: store.Checkpoint) -> None:
        try:
            retention.keep_best(self._saving, latest)
        except OSError as error:
            LOGGER.warning("cannot remove checkpoints in %s: %s", self._saving.directory, error)
        retention.remove(self._leftovers)
        self._leftovers = []

    def _wait_until_tidy(self) -> None:
        if self._tidying is not None:
            self._tidying.join()
            self._tidying = None

    def _save(self, loss: float, validated: float | None, background: bool) -> None:
        self.settle()
        if not self._saving.enabled:
            return
        self._check_lock()
        session, self._began = self._session, time.perf_counter()
        known = {"val_loss": validated, **self._counts(), "reduced_train_loss": loss}
        self._pending = state.save(
            self._saving.directory,
            naming.render(self._saving.name, known),
            session.model,
            session.optimizer.inner,
            session.progress,
            session.rank_context,
            self._marker({name: float(value) for name, value in known.items() if value is not None}),
            self._strategy,
            background,
        )
        self._saved = session.progress.step
        if not background:
            self.settle()

    def _check_lock(self) -> None:
        run_on_all_ranks(lambda: self._lock.check() if self._lock else None)

    def _counts(self) -> dict[str, int]:
        progress = self._session.progress
        return {
            "step": progress.step,
            "epoch": self._session.order.epoch(progress.consumed_samples),
            "consumed_samples": progress.consumed_samples,
        }

    def _marker(self, metrics: dict[str, float]) -> Marker:
        session, layout = self._session, self._session.rank_context.layout
        return Marker(
            step=session.progress.step,
            consumed_samples=session.progress.consumed_samples,
            world_size=layout.world,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual,
            context_parallel_size=layout.context,
            architecture=session.shape,
            metrics=metrics,
            training=session.training_id,
            resume=session.settings.resume.record(),
            intervention_step=session.intervention_step,
            data=to_json(session.data_identity),
            model=session.description.to_json(),
            split_rule=session.settings.data.split_rule,
            configuration=session.settings.configuration,
        )
