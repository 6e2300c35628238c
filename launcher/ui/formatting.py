"""Numbers and points in time in words; an unknown value is a dash.

Times are those of this machine's time zone, to the minute.
"""

from __future__ import annotations

import math
from datetime import datetime

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
    """Format the size of a job: 2 nodes × 4 tasks."""
    return f"{nodes} node{'s' * (nodes != 1)} × {each} task{'s' * (each != 1)}"


def text(value: object) -> str:
    """Format anything that may be missing."""
    return UNKNOWN if value is None or value == "" else str(value)


def steps(step: int | None, max_steps: int | None) -> str:
    """Format a step out of so many: 120/300."""
    return UNKNOWN if step is None else f"{step}/{text(max_steps)}"


# Not strftime's, which are the locale's.
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def moment(when: str | float | None) -> str:
    """Format a point in time, ISO 8601 or Unix seconds; return any other text as it is."""
    if when is None or when == "":
        return UNKNOWN
    try:
        time = datetime.fromtimestamp(when) if isinstance(when, int | float) else _read(when)
    except (ValueError, OverflowError, OSError, TypeError):
        return str(when)
    return f"{time:%Y-%m-%d %H:%M}"


def since(when: float | None, now: datetime) -> str:
    """Format a point in time in a few characters: ``12:04`` today, ``20 Nov`` this year, else ``2025-11``."""
    if when is None:
        return UNKNOWN
    try:
        time = datetime.fromtimestamp(when)
    except (ValueError, OverflowError, OSError):
        return UNKNOWN
    if time.date() == now.date():
        return f"{time:%H:%M}"
    return f"{time.day} {_MONTHS[time.month - 1]}" if time.year == now.year else f"{time:%Y-%m}"


def _read(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone()
