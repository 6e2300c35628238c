"""The trainer, but each step lasts as long as a file says."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACE = "CHAIN_TEST_PACE"


def main(arguments: Sequence[str]) -> int:
    """Take ``-u -m slipway.trainer.pretrain ...``, as the interpreter that this stands for would."""
    from slipway.trainer import pretrain
    from slipway.trainer.loop import run

    compute, pace = run.train_losses, Path(os.environ[PACE])

    def paced(*arguments: Any) -> Any:
        time.sleep(float(pace.read_text()))
        return compute(*arguments)

    run.train_losses = paced
    return pretrain.main(arguments[arguments.index("-m") + 2 :])
