"""Errors that end a training, and the exit code of each.

A user's mistake is one message and exit code 2. A diverged loss is exit code 3. Everything else is a bug or
a broken machine: it keeps its traceback and exits with 1. A training that was asked to stop is no error: it
has saved, and says with 75 that it is to be launched again. One that leaves at SIGTERM after that exits
with 143, as a shell would say it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_DIVERGED = 3
# EX_TEMPFAIL of sysexits.h: all is well, try again later.
EXIT_STOPPED = 75
_LONGEST = 200


class UserError(Exception):
    """Something the user can put right; shown without a traceback.

    Parameters
    ----------
    message
        What is wrong, and what would be right.
    found_by
        Which processes find the same, so that it is enough that one of them tells it: all of the job's, all
        of a node's, or one rank alone.
    """

    def __init__(self, message: str, found_by: Literal["job", "node", "rank"] = "job") -> None:
        # A message may quote a file of somebody else's.
        super().__init__("\n".join(map(escape, message.split("\n"))))
        self.found_by = found_by


class DivergedError(Exception):
    """The loss or its gradient is no longer a finite number; nothing after this step is worth keeping."""


def escape(text: str) -> str:
    """Return text with line breaks, and whatever else is not printable, escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its type if it says nothing, no longer than a line."""
    return (str(error).splitlines() or [repr(error)])[0][:_LONGEST]


def suggest(word: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the valid spelling nearest to `word`, or an empty string."""
    near = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
