"""Tell a training's progress in its three forms. Only rank 0 has one that writes."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint.state import Progress
from trainer.config.settings import Settings
from trainer.distributed import Place
from trainer.logs import LOGGER
from trainer.report.metrics import MetricsFile
from trainer.report.progress import Pace, step_line


class Reporter:
    """Writes ``metrics.jsonl``, TensorBoard events and the progress lines.

    Parameters
    ----------
    settings
        What is trained.
    place
        This process; on every rank but 0 all methods do nothing.
    """

    def __init__(self, settings: Settings, place: Place) -> None:
        self._settings = settings
        self._place = place
        self._pace = Pace(settings.max_steps)
        self._metrics: MetricsFile | None = None
        self._events = None
        if not place.is_main:
            return
        self._metrics = MetricsFile(settings.output.log_dir)
        if settings.output.tensorboard:
            from trainer.report.events import EventsFile

            self._events = EventsFile(settings.output.log_dir)

    def start(self, progress: Progress, parameters: int, resumed_from: Path | None) -> None:
        """Tell that training starts."""
        layout = self._place.layout
        self._write(
            "start",
            step=progress.step,
            max_steps=self._settings.max_steps,
            consumed_samples=progress.consumed_samples,
            world_size=layout.world,
            tensor=layout.tensor,
            data=layout.data,
            parameters=parameters,
            tokens_per_step=self._settings.tokens_per_step,
            resumed_from=str(resumed_from) if resumed_from else None,
        )

    def heldout(self, tokens: int, entropy: float) -> None:
        """Tell what validation will evaluate."""
        LOGGER.info(
            "validation tokens: %s, their unigram entropy: %.4f nats per token", f"{tokens:,}", entropy
        )
        self._write("data", split="validation", tokens=tokens, unigram_entropy=entropy)

    def step(
        self, progress: Progress, loss: float, lr: float, grad_norm: float, seconds: float, epoch: int
    ) -> None:
        """Tell a completed step."""
        settings = self._settings
        speed = settings.tokens_per_step / seconds
        self._pace.add(seconds)
        eta = self._pace.eta(progress.step)
        LOGGER.info(step_line(progress.step, settings.max_steps, loss, lr, grad_norm, speed, seconds, eta))
        self._write(
            "train",
            step=progress.step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            consumed_samples=progress.consumed_samples,
            step_time=seconds,
            tokens_per_second=speed,
        )
        if self._events and self._is_logged(progress.step):
            self._events.write(
                progress.step,
                {
                    "reduced_train_loss": loss,
                    "lr": lr,
                    "grad_norm": grad_norm,
                    "global_step": float(progress.step),
                    "consumed_samples": float(progress.consumed_samples),
                    "epoch": float(epoch),
                    "train_step_timing in s": seconds,
                },
            )

    def validation(self, step: int, loss: float, seconds: float) -> None:
        """Tell a validation loss."""
        LOGGER.info("step %d | validation loss %.4f | %.1f s", step, loss, seconds)
        self._write("validation", step=step, val_loss=loss)
        if self._events:
            self._events.write(step, {"val_loss": loss, "validation_step_timing in s": seconds})

    def checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """Tell a complete checkpoint."""
        LOGGER.info("checkpoint %s | %.1f s", path, seconds)
        self._write("checkpoint", step=step, path=str(path))

    def end(self, step: int, reason: str) -> None:
        """Tell that training ends, and why; close the files."""
        LOGGER.info("end at step %d: %s", step, reason)
        self._write("end", step=step, reason=reason)
        if self._metrics:
            self._metrics.close()
        if self._events:
            self._events.close()

    def _is_logged(self, step: int) -> bool:
        return step % self._settings.output.log_every == 0 or step in (1, self._settings.max_steps)

    def _write(self, kind: str, **fields: object) -> None:
        if self._metrics:
            self._metrics.write(kind, **fields)
