"""The error of a user's mistake, its exit code, and texts of others made fit to be shown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
_LONGEST = 200


class UserError(Exception):
    """A mistake that the user can correct; shown without a traceback.

    Parameters
    ----------
    message
        The mistake and the valid values: ``KEY=VALUE: MISTAKE``.
    found_by
        The processes that find the same mistake, so that one of them reports it: all of the job's, all of a
        node's, or one rank alone.
    key, also
        The key of the configuration, and others that would resolve it too.
    source
        Where the value was set.
    hint
        A remedy, printed on its own line.
    """

    exit_code = EXIT_USER_ERROR

    def __init__(
        self,
        message: str,
        found_by: Literal["job", "node", "rank"] = "job",
        *,
        key: str | None = None,
        also: Sequence[str] = (),
        source: str | None = None,
        hint: str | None = None,
    ) -> None:
        # A message may quote a file of somebody else's.
        self.message = escape_lines(message)
        super().__init__(self.message)
        self.found_by = found_by
        self.key = key
        self.also = tuple(also)
        self.source = source
        self.hint = hint

    @property
    def mistakes(self) -> tuple[UserError, ...]:
        """The single mistakes of this error."""
        return (self,)

    def __str__(self) -> str:
        lines = [self.message, *(part for part in (self.source, self.hint) if part)]
        return "\n".join(lines).replace("\n", "\n  ")


def escape(text: str) -> str:
    """Return text with line breaks and unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def escape_lines(text: str) -> str:
    """Return text whose control characters, which a terminal would obey, are escaped; line ends stay."""
    return "\n".join(map(escape, text.split("\n")))


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its type if it says nothing, no longer than a line."""
    return (str(error).splitlines() or [repr(error)])[0][:_LONGEST]


def nearest(word: str, valid: Iterable[str], count: int = 1) -> list[str]:
    """Return the nearest spellings, ignoring case; an empty list if none is near."""
    by_lower = {option.lower(): option for option in valid}
    return [by_lower[low] for low in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.6)]


def suggest(word: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the valid spelling nearest to `word`, or an empty string."""
    return "".join(f"; did you mean {near!r}?" for near in nearest(word, valid))
