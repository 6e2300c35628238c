"""Values of a job's configuration, read by dotted keys such as ``model.num_layers``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

# Larger factors are found only by their small partners: a slip of many digits must not take minutes.
_MOST_TRIED = 10**6
# NeMo's nodes, and our trainer's own, as a job's configuration names them; the user's tree has them below
# `training`.
_NEMO = ("trainer.", "exp_manager.", "model.", "resume.", "restore_from_path.")


def full(key: str) -> str:
    """Return a key as the user writes it."""
    return f"training.{key}" if f"{key}.".startswith(_NEMO) else key


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a job's configuration.

    A value of the wrong type is None, like a missing one: the checks of types report it, and arithmetic skips
    it.
    """

    config: Mapping[str, Any]

    def raw(self, key: str) -> Any:
        """Return the raw value of a key; None if missing."""
        node: Any = self.config
        for name in key.split("."):
            # Asking an abstract class is slow, and a layout search reads thousands of layouts.
            if not isinstance(node, (dict, Mapping)) or name not in node:
                return None
            node = node[name]
        return node

    def node(self, key: str) -> Mapping[str, Any] | None:
        """Return the keys below a key; None for a value, or if missing."""
        value = self.raw(key)
        return value if isinstance(value, (dict, Mapping)) else None

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int | None:
        """Return a whole number of at least `least`; the default if missing."""
        value = self.raw(key)
        if value is None:
            return default
        return value if is_whole(value) and value >= least else None

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return a finite number; the default if missing."""
        value = self.raw(key)
        if value is None:
            return default
        return value if is_number(value) else None

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a switch; the default for a missing one, and for another type."""
        value = self.raw(key)
        return value if isinstance(value, bool) else default

    def reason(self, reasons: Mapping[str, str]) -> str | None:
        """Return the first of some keys that is set, with its value and its reason."""
        set_keys = (key for key in reasons if self.raw(key))
        return next((f"{full(key)}={self.raw(key)}: {reasons[key]}" for key in set_keys), None)


def is_whole(value: Any) -> bool:
    """Return True for a whole number of at most 63 bits: no job has a larger one."""
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 64


def is_number(value: Any) -> bool:
    """Return True for a number that is neither infinite, nor nan, nor too large to be a float."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


@cache  # a search asks for the same few numbers at each layout and each number of nodes
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending."""
    tried = range(1, min(math.isqrt(number), _MOST_TRIED) + 1)
    small = [candidate for candidate in tried if number % candidate == 0]
    return tuple(sorted({*small, *(number // candidate for candidate in small)}))


def listed(numbers: Sequence[int], most: int = 12) -> str:
    """Return numbers in one line; of many the first ones and the last."""
    if len(numbers) <= most:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[: most - 1]))}, ... {numbers[-1]}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def gib(size: float) -> str:
    """Return a number of bytes in GiB, without the unit: ``56.0``."""
    return f"{size / 2**30:,.1f}"


def memory_text(size: float) -> str:
    """Format bytes of memory: ``512 MiB``, ``56.0 GiB``."""
    return f"{gib(size)} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
