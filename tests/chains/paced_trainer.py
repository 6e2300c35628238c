"""The trainer, but each step lasts as long as a file says, and a rank fails when another file says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACE = "CHAIN_TEST_PACE"
# The orders to a rank, in a file beside the pace: fail once, in this way.
CRASH, OUT_OF_MEMORY = "crash", "out of memory"


def main(arguments: Sequence[str]) -> int:
    """Take ``-u -m slipway.trainer.pretrain ...``, as the interpreter that this stands for would."""
    from slipway.trainer import pretrain
    from slipway.trainer.loop import run

    compute, pace = run.train_losses, Path(os.environ[PACE])
    order = pace.with_name(f"order.{os.environ['RANK']}")

    def paced(*arguments: Any) -> Any:
        time.sleep(float(pace.read_text()))
        if order.exists():
            word = order.read_text()
            order.unlink()
            if word == OUT_OF_MEMORY:  # as Slurm says it where memory has limits
                os.write(2, b"slurmstepd: error: Detected 1 oom_kill event in StepId=1.0\n")
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("it was ordered to crash")
        return compute(*arguments)

    run.train_losses = paced
    return pretrain.main(arguments[arguments.index("-m") + 2 :])
