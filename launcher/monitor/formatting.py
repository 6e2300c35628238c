"""Numbers as people read them. What is not known is a dash."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.monitor.events import Start

UNKNOWN = "-"


def duration(seconds: float | None) -> str:
    """Format seconds as Slurm does, ``[D-]HH:MM:SS``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN if seconds is None else str(seconds)
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def count(number: float | None) -> str:
    """Format a count with three digits and a letter: 950, 4.12k, 126M, 1.5T."""
    if number is None or not math.isfinite(number):
        return UNKNOWN if number is None else str(number)
    for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= unit * 0.9995:
            return f"{_three_digits(number / unit)}{letter}"
    return _three_digits(number)


def _three_digits(number: float) -> str:
    if float(number).is_integer():
        return str(int(number))
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{digits}f}"


def loss(number: float | None) -> str:
    """Format a loss in nats."""
    return UNKNOWN if number is None else f"{number:.4f}"


def small(number: float | None) -> str:
    """Format a learning rate or the like: 6.00e-04."""
    return UNKNOWN if number is None else f"{number:.2e}"


def tasks(nodes: int, each: int) -> str:
    """Format what a job has: 2 nodes × 4 tasks."""
    return f"{nodes} node{'s' * (nodes != 1)} × {each} task{'s' * (each != 1)}"


def layout(start: Start | None) -> str:
    """Format the parallel sizes that a trainer told: tensor 2 × pipeline 2 × data 4."""
    if start is None or start.tensor is None or start.data is None:
        return UNKNOWN
    between = (("pipeline", start.pipeline), ("virtual", start.virtual), ("context", start.context))
    sizes = [("tensor", start.tensor), *((n, s) for n, s in between if s and s > 1), ("data", start.data)]
    return " × ".join(f"{name} {size}" for name, size in sizes)


def text(value: object) -> str:
    """Format anything that may be missing."""
    return UNKNOWN if value is None or value == "" else str(value)


def steps(step: int | None, max_steps: int | None) -> str:
    """Format a step out of so many: 120/300."""
    return UNKNOWN if step is None else f"{step}/{text(max_steps)}"
