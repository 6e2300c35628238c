"""Typed access to configuration values, with errors that name the key, the value and the valid ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from slipway.common.errors import UserError, suggest

_REQUIRED: Any = object()
# What torch and the files of checkpoints hold as a whole number.
_MOST_BITS = 63


class Values:
    """Dotted keys and their raw values.

    A key that is absent or null takes the default; without a default it is an error.
    """

    def __init__(self, flat: Mapping[str, Any]) -> None:
        self._flat = flat

    def raw(self, key: str) -> Any:
        """Return the value as YAML gave it, or None."""
        return self._flat.get(key)

    def integer(self, key: str, default: Any = _REQUIRED, minimum: int | None = None) -> int:
        """Return a whole number."""
        value = self._number(key, default)
        if value != int(value):
            self.fail(key, "a whole number")
        if int(value).bit_length() > _MOST_BITS:
            self.fail(key, f"a whole number below 2^{_MOST_BITS}")
        if minimum is not None and value < minimum:
            self.fail(key, f"a whole number of at least {minimum}")
        return int(value)

    def number(
        self, key: str, default: Any = _REQUIRED, minimum: float | None = None, below: float | None = None
    ) -> float:
        """Return a finite real number; strings such as '1e-5', which YAML 1.1 leaves as text, are read."""
        value = self._number(key, default)
        if minimum is not None and value < minimum:
            self.fail(key, f"a number of at least {minimum:g}")
        if below is not None and value >= below:
            self.fail(key, f"a number below {below:g}")
        return value

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """Return True or False."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.fail(key, "True or False")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """Return a non-empty string, which may be a path."""
        value = self._value(key, default)
        if not isinstance(value, str) or not value or "\0" in value:
            self.fail(key, "a non-empty string")
        return value

    def choice(self, key: str, valid: Sequence[str], default: Any = _REQUIRED) -> str:
        """Return one of `valid`."""
        value = str(self._value(key, default))
        if value not in valid:
            self.fail(key, f"one of {', '.join(valid)}{suggest(value, valid)}")
        return value

    def is_set(self, key: str) -> bool:
        """Return whether the key is present and not null."""
        return self._flat.get(key) is not None

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raise the error for a value that is not `expected`."""
        raise UserError(f"{key}={self._flat.get(key)!r}: expected {expected}")

    def _number(self, key: str, default: Any) -> float:
        value = self._value(key, default)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                self.fail(key, "a number")
        # Neither infinite nor nan, nor a whole number that is no float.
        if isinstance(value, bool) or not (
            isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
        ):
            self.fail(key, "a number")
        # A Python int may be too large for an exact float; counts of samples and tokens stay integers.
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self._flat.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise UserError(f"{key} is missing: it has no default")
        return default
