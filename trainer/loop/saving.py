"""When a training saves, and what becomes of the checkpoints before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from trainer.checkpoint import naming, retention, state, store
from trainer.checkpoint.lock import Lock
from trainer.checkpoint.marker import Marker
from trainer.config.saving import Saving
from trainer.distributed import Place, together
from trainer.loop.session import Session


@contextlib.contextmanager
def sole_writer(saving: Saving, place: Place) -> Iterator[None]:
    """Hold the lock of the directory of checkpoints on rank 0, if any is going to be written.

    Raises
    ------
    UserError
        On every rank, if another training holds it.
    """
    lock = together(lambda: Lock(saving.directory) if saving.enabled and place.is_main else None)
    yield
    if lock:
        lock.release()


class Saver:
    """Saves a training as its settings say; every rank has one and calls it at the same steps."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._saving = session.settings.saving
        # Only those of earlier launches, and only until this one has a checkpoint of its own.
        self._leftovers = store.leftovers(self._saving.directory) if session.place.is_main else []

    def step(self, loss: float, validated: float | None) -> None:
        """Save if a checkpoint is due after this step.

        Parameters
        ----------
        loss
            The training loss of the step.
        validated
            The validation loss after it, or None if that is not known.
        """
        if self._saving.every and self._session.progress.step % self._saving.every == 0:
            self._save(loss, validated)

    def end(self, loss: float, validated: float | None) -> None:
        """Save after the last step of this launch, which is not followed by :meth:`step`."""
        self._save(loss, validated)

    def _save(self, loss: float, validated: float | None) -> None:
        if not self._saving.enabled:
            return
        session, progress, began = self._session, self._session.progress, time.perf_counter()
        known = {"val_loss": validated, **self._counts(), "reduced_train_loss": loss}
        found = state.save(
            self._saving.directory,
            naming.render(self._saving.name, known),
            session.model,
            session.optimizer.inner,
            progress,
            session.place,
            self._marker({name: float(value) for name, value in known.items() if value is not None}),
        )
        session.reporter.checkpoint(progress.step, found.path, time.perf_counter() - began)
        if session.place.is_main:
            retention.keep_best(self._saving, found)
            retention.remove(self._leftovers)
            self._leftovers = []

    def _counts(self) -> dict[str, int]:
        progress = self._session.progress
        return {
            "step": progress.step,
            "epoch": self._session.order.epoch(progress.consumed_samples),
            "consumed_samples": progress.consumed_samples,
        }

    def _marker(self, metrics: dict[str, float]) -> Marker:
        session, layout = self._session, self._session.place.layout
        return Marker(
            step=session.progress.step,
            consumed_samples=session.progress.consumed_samples,
            world_size=layout.world,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=1,
            architecture=session.shape,
            metrics=metrics,
            training=session.training_id,
        )
