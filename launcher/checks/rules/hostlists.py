"""Names of nodes and features of them, as Slurm's options take them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

# More names than that are no list that anybody wrote.
_MOST = 100_000

_OUTSIDE = re.compile(r",(?![^\[]*\])")
_RANGES = re.compile(r"\[([\d,-]+)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_FLAT = re.compile(r"[^&|,*()\[\]\s]+(?:[&|][^&|,*()\[\]\s]+)*")


def expand(hostlist: str) -> frozenset[str] | None:
    """The nodes of ``n[1-3,7],m01``; ``None`` if it is not of that form, or names very many."""
    if "/" in hostlist:
        return None  # a file of names, as sbatch takes it too
    names: set[str] = set()
    for part in _OUTSIDE.split(re.sub(r"\s", "", hostlist)):
        pieces = _RANGES.split(part)
        numbers = [_numbers(text) for text in pieces[1::2]]
        if any("[" in text or "]" in text for text in pieces[::2]) or not all(numbers):
            return None
        size = len(names)
        for each in numbers:
            size = max(size, 1) * len(each)
        if size > _MOST:
            return None
        for chosen in product(*numbers):
            between = zip(pieces[::2], (*chosen, ""), strict=True)
            names.add("".join(text + number for text, number in between))
    return frozenset(names - {""})


def _numbers(text: str) -> list[str]:
    """The numbers of ``01-03,7`` with their leading zeros; none if it is something else."""
    found: list[str] = []
    for part in text.split(","):
        ends = _RANGE.fullmatch(part)
        if not ends:
            return []
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first or last - first > _MOST:
            return []
        found += [f"{number:0{len(ends[1])}}" for number in range(first, last + 1)]
    return found


def feature_names(constraint: str) -> Iterator[str]:
    """The features that a constraint names, whatever it makes of them."""
    for word in re.split(r"[&|,()\[\]\s]+", constraint):
        name = word.partition("*")[0]
        if name and not name.isdigit():
            yield name


def is_plain(constraint: str) -> bool:
    """Whether a constraint is about each node for itself: neither counts nor one of several for all."""
    return _FLAT.fullmatch(constraint) is not None


def has_features(constraint: str, features: frozenset[str]) -> bool:
    """Whether a node with these features will do for a plain constraint.

    Slurm reads ``a&b|c`` from left to right (22.05, src/slurmctld/job_scheduler.c, valid_feature_counts).
    """
    first, *rest = re.split(r"([&|])", constraint)
    good = first in features
    for sign, name in zip(rest[::2], rest[1::2], strict=True):
        good = good and name in features if sign == "&" else good or name in features
    return good
