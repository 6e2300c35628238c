"""Slurm's compact lists: node names, array task numbers, and the features of a constraint."""

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
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
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
        if last < first or last - first > _MAX_NAMES:
            return []
        numbers += [f"{number:0{len(ends[1])}}" for number in range(first, last + 1)]
    return numbers


def expand_tasks(numbers: str, most: int = _MAX_TASKS) -> list[int]:
    """Return the numbers of array tasks, such as ``0-2,7`` and ``0-8:4``; skip what is not a number."""
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
