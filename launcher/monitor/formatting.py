"""Numbers as people read them. What is not known is a dash."""

from __future__ import annotations

import math

UNKNOWN = "-"


def duration(seconds: float | None) -> str:
    """Format seconds as Slurm does, ``[D-]HH:MM:SS``."""
    if seconds is None:
        return UNKNOWN
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


def text(value: object) -> str:
    """Format anything that may be missing."""
    return UNKNOWN if value is None or value == "" else str(value)


def steps(step: int | None, max_steps: int | None) -> str:
    """Format a step out of so many: 120/300."""
    return UNKNOWN if step is None else f"{step}/{text(max_steps)}"
