"""Slurm's notations of time, and the training time within a time limit."""

from __future__ import annotations

import re

TIME_FORMS = "MINUTES[:SECONDS], HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]"

# In any case, as Slurm reads them (src/common/parse_time.c, time_str2secs).
_UNLIMITED = ("unlimited", "infinite", "-1")

_WITH_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_HOURS_OR_MINUTES = re.compile(r"(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)

# The reference sizes leave half an hour of a day for the last checkpoint; a short limit leaves the part that
# their half-hour jobs need.
_LONGEST_MARGIN = 30 * 60
_MARGIN_PART = 6


def parse_time_limit(text: str) -> int | None:
    """Convert a time limit in Slurm's notation to seconds; ``None`` if it is no limit.

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
        match = _HOURS_OR_MINUTES.fullmatch(text)
        if not match:
            raise ValueError(f"not a time limit; valid: {TIME_FORMS}")
        parts = [int(part) for part in match.groups() if part is not None]
        days = 0
        hours, minutes, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None


def margin_of(limit: int) -> int:
    """Return the seconds of a limit to leave for the last checkpoint: a sixth, at most half an hour."""
    return min(_LONGEST_MARGIN, -(-limit // _MARGIN_PART))


def training_seconds(limit: str | None) -> int | None:
    """Return the seconds that training may take within a limit in Slurm's notation; ``None`` is unlimited.

    Raises
    ------
    ValueError
        If Slurm would not read the limit.
    """
    seconds = parse_time_limit(limit) if limit is not None else None
    return seconds - margin_of(seconds) if seconds is not None else None


def format_days(seconds: int) -> str:
    """Write seconds as Lightning does, ``DD:HH:MM:SS``."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days:02}:{hours:02}:{minutes:02}:{seconds:02}"


def format_time_limit(seconds: int) -> str:
    """Write seconds in Slurm's notation, ``[D-]HH:MM:SS``."""
    days, rest = format_days(seconds).split(":", 1)
    return f"{int(days)}-{rest}" if int(days) else rest


def normalize_elapsed(text: str) -> str | None:
    """Bring ``[D-][[HH:]MM:]SS`` to ``[D-]HH:MM:SS``; ``None`` for anything else."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts) or len(parts) > 3:
        return None
    padded = [part.zfill(2) for part in ["0"] * (3 - len(parts)) + parts]
    return f"{days}{dash}{':'.join(padded)}"
