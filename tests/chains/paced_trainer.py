"""The trainer, run as ``python -m trainer.pretrain`` runs it, but each step lasts as long as a file says."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

PACE = "CHAIN_TEST_PACE"


def main() -> None:
    """Take ``-u -m trainer.pretrain ...``, as the interpreter that this stands for would."""
    from trainer.loop import run

    compute, pace = run.train_losses, Path(os.environ[PACE])

    def paced(*arguments: Any) -> Any:
        time.sleep(float(pace.read_text()))
        return compute(*arguments)

    run.train_losses = paced
    sys.argv = sys.argv[sys.argv.index("-m") + 1 :]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
