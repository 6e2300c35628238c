"""The way out to a terminal: nothing that is printed makes it do anything but show text.

Names, reasons and logs are other people's words, and what they hold a terminal might obey. `escaped_streams`
escapes it in all that is printed, `open_console` in what rich prints, whose own control sequences stay.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

# All control characters but the ends of lines and tabs; what reverses the order of text, as letters of one
# name could look like another; and halves of characters, which cannot be printed.
_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udbff"
_ESCAPED = re.compile(f"[{_CONTROLS}]")
# A log may have colours, and bars that are drawn anew in their line.
_OF_LOGS = re.compile(f"\\x1b\\[[0-9;:]*m|[\\r\\b]|([{_CONTROLS}])")
_BEGUN = re.compile(r"\x1b(\[[0-9;:]{0,32})?$")


def escaped(text: str) -> str:
    """Return text with its control characters written out, such as ``\\x1b``."""
    return _ESCAPED.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1] if not 0xD800 <= ord(found[0]) <= 0xDBFF else f"\\u{ord(found[0]):04x}"


class EscapedStream:
    """A stream of text that escapes what is written to it; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream

    def write(self, text: str) -> int:
        """Write text, escaped; return the length of what was given."""
        self.unescaped.write(escaped(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


@contextlib.contextmanager
def escaped_streams() -> Iterator[None]:
    """Escape what is written to stdout and stderr."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", EscapedStream(unescaped(stream))) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unescaped(stream: TextIO) -> TextIO:
    """Return the stream behind an escaped one, for bytes that programs read, such as a script."""
    return stream.unescaped if isinstance(stream, EscapedStream) else stream


def open_console(*, stderr: bool = False, **options: Any) -> Console:
    """Return a console of rich on stdout or stderr; texts that it renders are escaped."""
    return _console_class()(file=unescaped(sys.stderr if stderr else sys.stdout), **options)


@functools.cache
def _console_class() -> type[Console]:
    # Imported late: in a pipe rich is not needed.
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class EscapingConsole(Console):
        """A console that escapes the texts which it renders."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=escaped(segment.text))

    return EscapingConsole


class LogWriter:
    """Writes the text of logs to stdout: to a terminal with nothing but colours, to a file as it is."""

    def __init__(self) -> None:
        self._begun = ""

    def __call__(self, text: str) -> None:
        """Write a piece; a colour that is cut off at its end waits for the next one."""
        stream = unescaped(sys.stdout)
        if stream.isatty():
            text = self._begun + text
            begun = _BEGUN.search(text)
            self._begun = begun[0] if begun else ""
            text = _OF_LOGS.sub(_unless_shown, text.removesuffix(self._begun))
        stream.write(text)
        stream.flush()


def _unless_shown(found: re.Match[str]) -> str:
    return found[0] if found[1] is None else repr(found[1])[1:-1]
