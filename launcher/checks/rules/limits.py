"""The job's time limit, and the times at which training ends by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from launcher.checks.findings import Finding, error, warning
from launcher.estimates.values import Values
from launcher.slurm.times import TIME_FORMS, format_days, margin_of, parse_time_limit

# Lightning's trainer.max_time adds up over the launches of a run, exp_manager's is of this one.
_MAX_TIMES = ("trainer.max_time", "exp_manager.max_time_per_run")
_DURATION = re.compile(":".join([r"(\d{1,9})"] * 4), re.ASCII)


def limit_problems(key: str, limit: str | None) -> Iterator[Finding]:
    """The time limit is one that Slurm reads."""
    if limit is not None and _is_unreadable(limit):
        yield error("time.limit", key, limit, "not a time limit", f"valid: {TIME_FORMS}")


def _is_unreadable(limit: str) -> bool:
    try:
        parse_time_limit(limit)
    except ValueError:
        return True
    return False


def max_time_problems(values: Values, key: str, limit: str | None) -> Iterator[Finding]:
    """Training ends, and saves, before Slurm ends the job.

    The first of the two times counts: `trainer.max_time` may well be that of a whole chain of jobs.
    """
    times = {}
    for name in _MAX_TIMES:
        given = values.raw(name)
        if given is None:
            continue
        time = _seconds(given)
        if time is None:
            expected = "days:hours:minutes:seconds in quotes, such as '00:03:30:00'"
            yield error("time.max_time", _as_written(values, name), given, f"expected {expected}")
        else:
            times[name] = time
    ends = parse_time_limit(limit) if limit is not None and not _is_unreadable(limit) else None
    if not times or ends is None or min(times.values()) < ends:
        return
    first = min(times, key=lambda name: times[name])
    told = f"not before the job's time limit, {limit}: the job would end without a last checkpoint"
    fix = f"'{format_days(max(1, ends - margin_of(ends)))}' or less, or a longer {key}"
    yield warning("time.max_time", _as_written(values, first), values.raw(first), told, fix, also=(key,))


def _as_written(values: Values, name: str) -> str:
    """The key that a time is from: for NeMo, a launch's own configuration has it in the other place."""
    trainers, launches = _MAX_TIMES
    return trainers if name == launches and values.raw(trainers) is None else name


def _seconds(value: Any) -> int | None:
    """Lightning's DD:HH:MM:SS; YAML reads an unquoted one with two parts as a number."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
