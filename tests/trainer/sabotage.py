"""What goes wrong in a sabotaged rank.

``raise:RANK:STEP``, ``norm:RANK:STEP`` for a gradient, ``tidy:RANK:SECONDS`` for how long it takes to remove
checkpoints.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

SABOTAGE = "TRAINER_TEST_SABOTAGE"


def sabotage() -> None:
    """Have this process go wrong as its environment says."""
    if not os.environ.get(SABOTAGE):
        return
    from trainer.loop import run
    from trainer.optim.build import Optimizer

    kind, rank, step = os.environ[SABOTAGE].split(":")
    if rank not in ("all", os.environ["RANK"]):
        return
    left = int(step)

    def is_due() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    if kind == "raise":
        compute = run.train_losses

        def fail(settings: Any, model: Any, batches: Any, micro_batches: int) -> float:
            if is_due():
                next(batches)
                raise ValueError("a matrix is missing\nand more")
            return compute(settings, model, batches, micro_batches)

        run.train_losses = fail
        return
    if kind == "tidy":
        from trainer.checkpoint import retention

        retention.keep_best = lambda saving, latest: time.sleep(float(step))
        return
    step_of = Optimizer.step

    def spoil(self: Optimizer, lr: float) -> float:
        norm = step_of(self, lr)
        return math.inf if is_due() else norm

    Optimizer.step = spoil  # type: ignore[method-assign]
