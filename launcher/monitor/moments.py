"""Points in time as people read them: in the time zone of where they sit, to the minute."""

from __future__ import annotations

from datetime import datetime

from launcher.monitor.formatting import UNKNOWN

# Not strftime's, which are the locale's.
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def moment(when: str | float | None) -> str:
    """Format a point in time, given as ISO 8601 or in Unix seconds; what is no time is shown as it is."""
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
