"""The trainer, with the tokens that reach its model written down, step by step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# The directory where each rank appends what it was fed.
RECORD = "FED_RECORD"


def main(arguments: Sequence[str]) -> int:
    """Take ``-u -m trainer.pretrain ...``, as the interpreter that this stands for would."""
    from trainer import pretrain
    from trainer.loop import run

    compute, rows = run.train_losses, list[list[int]]()

    def recorded(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            # The window again: its inputs, and the last of its targets.
            rows.extend(
                [*tokens, labels[-1]]
                for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
            )
            yield batch

    def recording(settings: Any, model: Any, batches: Iterator[Any], micro_batches: int) -> Any:
        rows.clear()
        loss = compute(settings, model, recorded(batches), micro_batches)
        launch = settings.output.log_dir.parent.name
        path = Path(os.environ[RECORD]) / f"{launch}.rank{os.environ['RANK']}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(rows) + "\n")
        return loss

    run.train_losses = recording
    return pretrain.main(arguments[arguments.index("-m") + 2 :])
