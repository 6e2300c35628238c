"""Tokenizers of packages."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.torture.cases import Case

CASES: list[Case] = []


def download(say: Callable[[str], object]) -> None:
    """Download the packages that are not there."""
