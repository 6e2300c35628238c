"""Slurm's notations: lists of nodes, tasks and features, and times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product

# Longer lists are mistakes.
_MAX_NAMES = 100_000
# More than Slurm allows (MaxArraySize is 4,000,001 at most); the text may come from anywhere.
_MAX_TASKS = 5_000_000

_OUTSIDE = re.compile(r",(?![^\[]*\])")
_RANGES = re.compile(r"\[([\d,-]+)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_TASK_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)
_FLAT = re.compile(r"[^&|,*()\[\]\s]+(?:[&|][^&|,*()\[\]\s]+)*")


def expand_hostlist(hostlist: str) -> frozenset[str] | None:
    """Return the nodes of ``n[1-3,7],m01``; ``None`` for another form or a huge list."""
    if "/" in hostlist:
        return None  # a file with names, which sbatch accepts too
    names: set[str] = set()
    for part in _OUTSIDE.split(re.sub(r"\s", "", hostlist)):
        pieces = _RANGES.split(part)
        numbers = [_numbers(text) for text in pieces[1::2]]
        if any("[" in text or "]" in text for text in pieces[::2]) or not all(numbers):
            return None
        size = len(names)
        for choices in numbers:
            size = max(size, 1) * len(choices)
        if size > _MAX_NAMES:
            return None
        for chosen in product(*numbers):
            between = zip(pieces[::2], (*chosen, ""), strict=True)
            names.add("".join(text + number for text, number in between))
    return frozenset(names - {""})


def _numbers(text: str) -> list[str]:
    """Return the numbers of ``01-03,7`` with their leading zeros; empty for anything else."""
    numbers: list[str] = []
    for part in text.split(","):
        ends = _RANGE.fullmatch(part)
        if not ends:
            return []
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first or len(numbers) + last - first > _MAX_NAMES:
            return []
        numbers += [f"{number:0{len(ends[1])}}" for number in range(first, last + 1)]
    return numbers


def expand_tasks(numbers: str, most: int = _MAX_TASKS) -> list[int]:
    """Return the numbers of array tasks, such as ``0-2,7`` and ``0-8:4``; skip other words."""
    tasks: list[int] = []
    for part in numbers.split(","):
        match = _TASK_RANGE.fullmatch(part)
        if match:
            first, last, step = (int(text) if text else None for text in match.groups())
            assert first is not None
            range_ = range(first, (first if last is None else last) + 1, step or 1)
            tasks += range_[: most - len(tasks)]
    return tasks


def compress_tasks(numbers: Sequence[int]) -> str:
    """Write ascending task numbers compactly: ``0-2,7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def feature_names(constraint: str) -> Iterator[str]:
    """Yield the features that a constraint names, however it combines them."""
    for word in re.split(r"[&|,()\[\]\s]+", constraint):
        name = word.partition("*")[0]
        if name and not name.isdigit():
            yield name


def is_plain(constraint: str) -> bool:
    """Return True if a constraint is about each node by itself, without counts and matching groups."""
    return _FLAT.fullmatch(constraint) is not None


def has_features(constraint: str, features: frozenset[str]) -> bool:
    """Return True if a node with these features satisfies a plain constraint.

    Slurm reads ``a&b|c`` from left to right (22.05, src/slurmctld/job_scheduler.c, valid_feature_counts).
    """
    first, *rest = re.split(r"([&|])", constraint)
    matches = first in features
    for sign, name in zip(rest[::2], rest[1::2], strict=True):
        matches = matches and name in features if sign == "&" else matches or name in features
    return matches


# --- times

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
    """Convert Slurm's time limit to seconds, ``None`` for 0 or no limit; raise ValueError if invalid."""
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


def limit_seconds(text: str | None) -> int | None:
    """Return a time limit in seconds; ``None`` for no limit and for text that is not in Slurm's notation."""
    try:
        return parse_time_limit(text) if text else None
    except ValueError:
        return None


def margin_of(limit: int) -> int:
    """Return the seconds of a limit for the last checkpoint: a sixth, at most half an hour."""
    return min(_LONGEST_MARGIN, -(-limit // _MARGIN_PART))


def training_seconds(limit: str | None) -> int | None:
    """Return the seconds that training may take within a limit, as `parse_time_limit` reads it."""
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
