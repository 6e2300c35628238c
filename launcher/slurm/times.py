"""Slurm's time limits, and the time that training may take within one."""

from __future__ import annotations

import re

TIME_FORMS = "MINUTES[:SECONDS], HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]"

# In capitals or not, as Slurm reads them (src/common/parse_time.c, time_str2secs).
_UNLIMITED = ("unlimited", "infinite", "-1")

_WITH_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_HOURS_OR_MINUTES = re.compile(r"(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)

# What the reference sizes leave of a day for the last checkpoint; of a short limit, as large a part as its
# half-hour jobs need.
_LONGEST_MARGIN = 30 * 60
_MARGIN_PART = 6


def parse_time_limit(text: str) -> int | None:
    """Slurm's notation of a time limit to seconds; ``None`` where there is no limit.

    A limit of 0 is none, as for sbatch.

    Raises
    ------
    ValueError
        If Slurm would not read it.
    """
    if text.lower() in _UNLIMITED:
        return None
    with_days = _WITH_DAYS.fullmatch(text)
    if with_days:
        days, hours, minutes, seconds = (int(part or 0) for part in with_days.groups())
    else:
        found = _HOURS_OR_MINUTES.fullmatch(text)
        if not found:
            raise ValueError(f"not a time limit; valid: {TIME_FORMS}")
        parts = [int(part) for part in found.groups() if part is not None]
        days = 0
        hours, minutes, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None


def margin_of(limit: int) -> int:
    """The seconds of a limit that are left for the last checkpoint: a sixth, at most half an hour."""
    return min(_LONGEST_MARGIN, -(-limit // _MARGIN_PART))


def training_seconds(limit: str | None) -> int | None:
    """The seconds that training may take within a limit in Slurm's notation, ``None`` if it has none.

    Raises
    ------
    ValueError
        If Slurm would not read the limit.
    """
    seconds = parse_time_limit(limit) if limit is not None else None
    return seconds - margin_of(seconds) if seconds is not None else None


def format_days(seconds: int) -> str:
    """Seconds as Lightning writes them, ``DD:HH:MM:SS``."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days:02}:{hours:02}:{minutes:02}:{seconds:02}"


def format_time_limit(seconds: int) -> str:
    """Seconds in Slurm's notation, ``[D-]HH:MM:SS``."""
    days, rest = format_days(seconds).split(":", 1)
    return f"{int(days)}-{rest}" if int(days) else rest
