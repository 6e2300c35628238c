"""The error of a user's mistake, its exit code, and texts of others made fit to be shown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
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
        super().__init__(escape_lines(message))
        self.found_by = found_by


def escape(text: str) -> str:
    """Return text with line breaks, and whatever else is not printable, escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def escape_lines(text: str) -> str:
    """Return text whose control characters, which a terminal would obey, are escaped; line ends stay."""
    return "\n".join(map(escape, text.split("\n")))


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its type if it says nothing, no longer than a line."""
    return (str(error).splitlines() or [repr(error)])[0][:_LONGEST]


def suggest(word: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the valid spelling nearest to `word`, or an empty string."""
    near = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
