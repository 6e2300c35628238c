"""All cases, by name."""

from __future__ import annotations

from benchmarks.torture import exports, packages, sources, tokenizers
from benchmarks.torture.cases import Case


def generated() -> list[Case]:
    """Return the cases that need no download."""
    return [*sources.CASES, *tokenizers.CASES, *exports.CASES]


def cases() -> list[Case]:
    """Return all cases; those of a package that is not there are `absent`."""
    return [*generated(), *packages.CASES, *exports.of_packages()]
