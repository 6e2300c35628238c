"""NeMo's nodes as a job's configuration holds them: read, and not judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

# Larger factors are found beside their small partners alone: a slip of many digits must not take minutes.
_MOST_TRIED = 10**6
# NeMo's nodes, and our trainer's own, as a job's configuration names them; the user's tree has them below
# `training`.
_NEMO = ("trainer.", "exp_manager.", "model.", "resume.")


def full(key: str) -> str:
    """Return a key as the user writes it."""
    return f"training.{key}" if f"{key}.".startswith(_NEMO) else key


@dataclass(frozen=True, slots=True)
class Values:
    """Dotted keys such as ``model.num_layers`` of a job's configuration.

    A value of the wrong type is ``None``, as one that is not there: `types` tells of it, and the arithmetic
    leaves alone what it cannot count with.
    """

    config: Mapping[str, Any]

    def raw(self, key: str) -> Any:
        node: Any = self.config
        for name in key.split("."):
            # A dict is told from the rest without asking an abstract class: thousands of layouts are read.
            if not isinstance(node, (dict, Mapping)) or name not in node:
                return None
            node = node[name]
        return node

    def node(self, key: str) -> Mapping[str, Any] | None:
        """The keys below a key; ``None`` if it holds a value, or nothing."""
        found = self.raw(key)
        return found if isinstance(found, (dict, Mapping)) else None

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int | None:
        """A whole number of at least `least`; the default where there is none."""
        found = self.raw(key)
        if found is None:
            return default
        return found if is_whole(found) and found >= least else None

    def number(self, key: str, default: float | None = None) -> float | None:
        found = self.raw(key)
        if found is None:
            return default
        return found if is_number(found) else None

    def flag(self, key: str, default: bool = False) -> bool:
        found = self.raw(key)
        return found if isinstance(found, bool) else default


def is_whole(value: Any) -> bool:
    """A whole number that can be counted with: no job's has more than 63 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 64


def is_number(value: Any) -> bool:
    """A number that can be counted with: neither infinite, nor nan, nor too large to be a float."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def divisors(number: int) -> list[int]:
    """What a positive number can be divided by, ascending."""
    return list(_divisors(number))


@cache
def _divisors(number: int) -> tuple[int, ...]:
    """Asked of the same few numbers for each layout and each number of nodes."""
    tried = range(1, min(math.isqrt(number), _MOST_TRIED) + 1)
    small = [candidate for candidate in tried if number % candidate == 0]
    return tuple(sorted({*small, *(number // candidate for candidate in small)}))


def listed(numbers: list[int], most: int = 12) -> str:
    """Numbers in one line; of many the first ones and the last."""
    if len(numbers) <= most:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[: most - 1]))}, ... {numbers[-1]}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
