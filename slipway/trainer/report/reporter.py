"""Reports of a training's progress in three forms. Only rank 0 writes them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slipway.trainer.checkpoint.state import Progress
from slipway.trainer.config.architecture import Architecture
from slipway.trainer.config.settings import Settings
from slipway.trainer.device import measure_used_bytes
from slipway.trainer.distributed import RankContext
from slipway.trainer.logs import LOGGER
from slipway.trainer.report.flops import device_peak, model_flops
from slipway.trainer.report.memory import find_fullest
from slipway.trainer.report.metrics import DAMAGED_FILE_NAME, EventsFile, MetricsFile, read_first
from slipway.trainer.report.phases import PHASES, compare
from slipway.trainer.report.progress import step_line, time_left

# Steps whose pace predicts the time to the end.
_WINDOW = 20
_SECONDS, _MEMORY = slice(len(PHASES)), slice(len(PHASES), None)


@dataclass(frozen=True)
class Step:
    """The report of a completed step.

    Attributes
    ----------
    loss, lr, grad_norm
        The loss in nats per token, the learning rate, and the gradient's norm before clipping.
    seconds
        From the end of the step before to the end of this, without validations and saves.
    data_wait
        Share of it that rank 0 waited for its data.
    epoch, samples
        The epoch in which it began, from 0, and its samples.
    """

    loss: float
    lr: float
    grad_norm: float
    seconds: float
    data_wait: float
    epoch: int
    samples: int


class Reporter:
    """The writer of ``metrics.jsonl``, TensorBoard events and the progress lines.

    Parameters
    ----------
    rank_context
        This process; on every rank but 0 all methods do nothing.
    vocabulary
        Size of the padded vocabulary, which is that of the logits.
    teacher
        The shape of the model that it learns from, if any.
    """

    def __init__(
        self,
        settings: Settings,
        rank_context: RankContext,
        vocabulary: int,
        teacher: Architecture | None = None,
    ) -> None:
        self._settings = settings
        self._rank_context = rank_context
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._flops, self._causal_flops = (
            model_flops(settings.architecture, vocabulary, settings.encoder, causal, teacher)
            for causal in (False, True)
        )
        self._peak = _peak(settings, rank_context)
        self._saved: Path | None = None
        self._metrics: MetricsFile | None = None
        self._events: EventsFile | None = None
        if not rank_context.is_main:
            return
        self._metrics = MetricsFile(settings.output.log_dir)
        if settings.output.tensorboard:
            self._events = EventsFile(settings.output.log_dir)

    def start(self, progress: Progress, parameters: int, resumed_from: Path | None, attention: str) -> None:
        """Report that training starts; warn if its attention is another than at the run's first start."""
        if resumed_from and self._metrics:
            first = read_first(self._settings.output.log_dir).get("attention", attention)
            if first != attention:
                LOGGER.warning("attention: %s; when this run began: %s", attention, first)
        layout = self._rank_context.layout
        self._write(
            "start",
            step=progress.step,
            max_steps=self._settings.max_steps,
            consumed_samples=progress.consumed_samples,
            world_size=layout.world,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            virtual=layout.virtual,
            context=layout.context,
            data=layout.data,
            parameters=parameters,
            tokens_per_step=self._settings.tokens_per_step,
            model_flops_per_sample=self._flops,
            causal_flops_per_sample=self._causal_flops,
            peak_flops_per_gpu=self._peak,
            resumed_from=str(resumed_from) if resumed_from else None,
            attention=attention,
            torch=str(torch.__version__),
            cudnn=torch.backends.cudnn.version(),
        )

    def report_damaged(self, path: Path, reason: str, moved_to: Path | None) -> None:
        """Report a damaged checkpoint in a file that a reader of the run finds at once."""
        if self._metrics:
            with contextlib.closing(MetricsFile(self._settings.output.log_dir, DAMAGED_FILE_NAME)) as file:
                place = str(moved_to) if moved_to else None
                file.write("damaged", path=str(path), reason=reason, moved_to=place)

    def report_heldout(self, tokens: int, entropy: float) -> None:
        """Report the data that validation will evaluate."""
        has_sentinels = self._settings.denoising is not None
        name = "targets, sentinels included" if has_sentinels else "tokens"
        LOGGER.info("held out: %s %s: unigram entropy %.4f nats per token", f"{tokens:,}", name, entropy)
        self._write(
            "data",
            split="validation",
            tokens=tokens,
            unigram_entropy=entropy,
            has_sentinels=has_sentinels,
        )

    def report_step(self, progress: Progress, step: Step) -> None:
        """Report a completed step."""
        settings = self._settings
        tokens = step.samples * settings.seq_length
        speed = tokens / step.seconds
        flops = self._flops * step.samples / step.seconds / self._rank_context.layout.world
        mfu = None
        if self._peak:
            mfu = flops / self._peak, flops / self._peak * self._causal_flops / self._flops
        memory = measure_used_bytes(self._rank_context.device)
        self._recent.append(step.seconds)
        eta = time_left(settings.max_steps - progress.step, self._recent)
        LOGGER.info(
            step_line(
                progress.step,
                settings.max_steps,
                step.loss,
                step.lr,
                step.grad_norm,
                speed,
                step.seconds,
                eta,
                mfu,
            )
        )
        self._write(
            "train",
            step=progress.step,
            loss=step.loss,
            lr=step.lr,
            grad_norm=step.grad_norm,
            consumed_samples=progress.consumed_samples,
            global_batch=step.samples,
            tokens=tokens,
            step_time=step.seconds,
            tokens_per_second=speed,
            tflops_per_gpu=flops / 1e12,
            mfu=mfu and mfu[0],
            mfu_causal=mfu and mfu[1],
            data_wait=step.data_wait,
            memory_bytes=memory,
        )
        if self._events and self.is_logged(progress.step):
            # NeMo's names; ours for values that it does not log.
            scalars = {
                "reduced_train_loss": step.loss,
                "lr": step.lr,
                "grad_norm": step.grad_norm,
                "global_step": float(progress.step),
                "consumed_samples": float(progress.consumed_samples),
                "epoch": float(step.epoch),
                "train_step_timing in s": step.seconds,
                "tflops_per_sec_per_gpu": flops / 1e12,
                "tokens_per_second": speed,
                "data_wait": step.data_wait,
                "memory_bytes": float(memory),
            }
            shares = dict(zip(("mfu", "mfu_causal"), mfu, strict=True)) if mfu else {}
            self._events.write(progress.step, {**scalars, **shares})

    def report_ranks(self, step: int, steps: range, values: Sequence[Sequence[float]]) -> None:
        """Report phases, in seconds per step, and memory, by rank ``[ranks][PHASES + FIELDS]``."""
        seconds, memory = ([row[part] for row in values] for part in (_SECONDS, _MEMORY))
        self._write("phases", step=step, first_step=steps[0], last_step=steps[-1], phases=compare(seconds))
        self._write("memory", step=step, **find_fullest(memory))

    def report_validation(self, step: int, loss: float, seconds: float) -> None:
        """Report a validation loss."""
        LOGGER.info("step %d | validation loss %.4f | %.1f s", step, loss, seconds)
        self._write("validation", step=step, val_loss=loss, seconds=seconds)
        if self._events:
            self._events.write(step, {"val_loss": loss, "validation_step_timing in s": seconds})

    def report_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """Report a complete checkpoint."""
        self._saved = path
        LOGGER.info("checkpoint %s | %.1f s", path, seconds)
        self._write("checkpoint", step=step, path=str(path), seconds=seconds)

    def end(self, step: int, reason: str, is_stopped: bool = False) -> None:
        """Report that training ends, and why; close the files.

        Parameters
        ----------
        reason
            In one word.
        is_stopped
            Whether it ends before its time, to be continued.
        """
        nothing = ": there is nothing left to do" if reason == "already_complete" else ""
        LOGGER.info("end at step %d: %s%s", step, reason, nothing)
        if is_stopped:
            saved = f"saved as {self._saved}: launching again continues there"
            nothing = (
                "nothing is saved, as create_checkpoint_callback=False asks for: launching again starts anew"
            )
            LOGGER.info(
                "stopped by %s before step %d; %s",
                reason,
                self._settings.max_steps,
                saved if self._saved else nothing,
            )
        self._write("end", step=step, reason=reason, saved=str(self._saved) if self._saved else None)
        if self._metrics:
            self._metrics.close()
        if self._events:
            self._events.close()

    def is_logged(self, step: int) -> bool:
        """Return whether `trainer.log_every_n_steps` has the step logged."""
        return step % self._settings.output.log_every == 0 or step in (1, self._settings.max_steps)

    def _write(self, kind: str, **fields: object) -> None:
        if self._metrics:
            self._metrics.write(kind, **fields)


def _peak(settings: Settings, rank_context: RankContext) -> float | None:
    if rank_context.device.type != "cuda":
        return None
    return device_peak(torch.cuda.get_device_name(rank_context.device), settings.operands)
