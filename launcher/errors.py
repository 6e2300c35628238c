"""The errors that a user can mend: no traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user's, told so that it can be mended.

    Parameters
    ----------
    message
        What is wrong: the key, the value and what would be valid.
    hint
        What to do next: the nearest spelling, a command to run.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


def did_you_mean(name: str, valid: Iterable[str]) -> str | None:
    """Name the nearest valid spelling, or list what is valid when nothing is near."""
    options = sorted(valid)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"valid: {', '.join(options)}" if options else None
