"""Write, as JSON, the learning rates of NeMo's own schedulers, step by step; run with its interpreter.

The golden file that `make test` holds our schedules against is what it writes:

    PYTHONPATH=tests/nemo/cpu .venv-nemo/bin/python tests/nemo/record_schedules.py \
        tests/trainer/data/nemo_schedules.json

The rate of a step is the one with which an optimizer makes it: what the scheduler has left in the optimizer's
group when ``optimizer.step()`` is called, the first time before any ``scheduler.step()``, as in Lightning's
loop.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_COSINE, _LINE = "CosineAnnealing", "WarmupAnnealing"

# Highest rate, trainer.max_steps, and model.optim.sched; the steps recorded are a few more than max_steps.
VARIANTS: tuple[tuple[float, int, dict[str, Any]], ...] = (
    # gpt3/126m's warm-up, then llama's, then 175b's rates.
    (6e-4, 1100, {"name": _COSINE, "warmup_steps": 636, "constant_steps": 100, "min_lr": 6e-5}),
    (1e-4, 1000, {"name": _COSINE, "warmup_steps": 500, "constant_steps": 0, "min_lr": 1e-5}),
    (9e-5, 1000, {"name": _COSINE, "warmup_steps": 500, "constant_steps": 0, "min_lr": 9e-5}),
    (1.1e-4, 1000, {"name": _COSINE, "min_lr": 1.1e-5}),
    (2e-3, 1013, {"name": _COSINE, "warmup_ratio": 0.013, "constant_ratio": 0.29, "min_lr": 0.0}),
    (3e-4, 1000, {"name": _COSINE, "warmup_ratio": 0.07, "min_lr": 7e-6, "last_epoch": -1}),
    (1e-3, 1009, {"name": _COSINE, "constant_steps": 31, "min_lr": 1e-6}),
    # Stopped within the warm-up, as gpt3/126m with few steps is.
    (6e-4, 1000, {"name": _COSINE, "warmup_steps": 1600, "constant_steps": 100000, "min_lr": 6e-5}),
    # T5's, t5/tiny's, and others.
    (1e-4, 1000, {"name": _LINE, "warmup_ratio": 0.01, "min_lr": 1e-5, "last_epoch": -1}),
    (1e-3, 1007, {"name": _LINE, "warmup_ratio": 0.1, "min_lr": 1e-4, "last_epoch": -1}),
    (7e-4, 1000, {"name": _LINE, "warmup_steps": 333, "min_lr": 3e-6}),
    (5e-4, 1000, {"name": _LINE}),
)
_AFTER = 5


def rates(lr: float, max_steps: int, sched: dict[str, Any]) -> list[float]:
    """Return the learning rates of the first `max_steps` steps and some more."""
    import torch
    from nemo.core.optim.lr_scheduler import prepare_lr_scheduler

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    # nemo/core/classes/modelPT.py, setup_optimization: the trainer's max_steps are the schedule's.
    prepared = prepare_lr_scheduler(optimizer, {**sched, "max_steps": max_steps})
    assert prepared is not None
    values = []
    for _ in range(max_steps + _AFTER):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        prepared["scheduler"].step()
    return values


def main() -> None:
    lines = [
        json.dumps({"lr": lr, "max_steps": steps, "sched": sched, "rates": rates(lr, steps, sched)})
        for lr, steps, sched in VARIANTS
    ]
    # NeMo logs to stdout.
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
