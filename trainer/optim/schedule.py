"""NeMo's CosineAnnealing, as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config.settings import Optimization


@dataclass(frozen=True)
class CosineAnnealing:
    """Linear warm-up, a cosine from `max_lr` to `min_lr`, then `min_lr`.

    The formula is that of NeMo 2.x, ``nemo/core/optim/lr_scheduler.py``: ``CosineAnnealing`` over
    ``WarmupAnnealHoldPolicy`` and, with constant steps, ``_linear_warmup_with_cosine_annealing``. It has two
    warm-ups: with constant steps Megatron-LM's ``max_lr * step / warmup`` (whose first step has learning
    rate 0), without them ``max_lr * (step + 1) / (warmup + 1)``.

    Attributes
    ----------
    max_lr, min_lr
        Highest and lowest learning rate.
    warmup, constant, total
        Steps of the warm-up, of the constant end, and of the whole schedule.
    """

    max_lr: float
    min_lr: float
    warmup: int
    constant: int
    total: int

    @classmethod
    def from_settings(cls, settings: Optimization) -> CosineAnnealing:
        """Take the schedule's numbers from the settings."""
        return cls(
            settings.lr,
            settings.min_lr,
            settings.warmup_steps,
            settings.constant_steps,
            settings.schedule_steps,
        )

    @property
    def decay(self) -> int:
        """Steps between warm-up and constant end; not positive if these two leave no room."""
        return self.total - self.warmup - self.constant

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 for the first optimizer step."""
        if self.warmup > 0 and step <= self.warmup:
            if self.constant > 0:
                return self.max_lr * step / self.warmup
            return self.max_lr * (step + 1) / (self.warmup + 1)
        if step > self.total or step > self.warmup + self.decay:
            return self.min_lr
        if self.decay == 0:
            return self.max_lr
        progress = (step - self.warmup) / self.decay
        return self.min_lr + (self.max_lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
