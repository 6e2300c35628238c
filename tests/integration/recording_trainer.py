"""The trainer, recording the tokens that reach its model, step by step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# The directory where each rank appends what it was fed.
RECORD = "FED_RECORD"


def main(arguments: Sequence[str]) -> int:
    """Take ``-u -m slipway.trainer.pretrain ...``, as the interpreter that this stands for would."""
    from slipway.trainer import pretrain
    from slipway.trainer.loop import run

    compute, rows = run.train_losses, list[list[int]]()

    def record_batches(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            # The window again: its inputs, and the last of its targets.
            rows.extend(
                [*tokens, labels[-1]]
                for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
            )
            yield batch

    def compute_and_record(settings: Any, model: Any, batches: Iterator[Any], micro_batches: int) -> Any:
        rows.clear()
        loss = compute(settings, model, record_batches(batches), micro_batches)
        launch = settings.output.log_dir.parent.name
        path = Path(os.environ[RECORD]) / f"{launch}.rank{os.environ['RANK']}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(rows) + "\n")
        return loss

    run.train_losses = compute_and_record
    return pretrain.main(arguments[arguments.index("-m") + 2 :])
