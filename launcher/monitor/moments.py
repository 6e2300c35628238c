"""Points in time as people read them: in the time zone of where they sit, to the minute."""

from __future__ import annotations

from datetime import datetime

from launcher.monitor.formatting import UNKNOWN


def moment(when: str | float | None) -> str:
    """Format a point in time, given as ISO 8601 or in Unix seconds; what is no time is shown as it is."""
    if when is None or when == "":
        return UNKNOWN
    try:
        time = datetime.fromtimestamp(when) if isinstance(when, int | float) else _read(when)
    except (ValueError, OverflowError, OSError, TypeError):
        return str(when)
    return f"{time:%Y-%m-%d %H:%M}"


def _read(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone()
