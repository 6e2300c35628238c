"""Output to a terminal, with control sequences in other people's texts escaped.

A terminal would obey control sequences in names, reasons and logs. `escape_streams` escapes them in
everything that is printed, `open_console` in what rich prints, whose own control sequences stay.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

# All control characters but line ends and tabs; characters that reverse the order of text, with which one
# name could look like another; and surrogates, which cannot be printed.
_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udbff"
_ESCAPED = re.compile(f"[{_CONTROLS}]")
# A log may have colours, and progress bars that are redrawn in their line.
_OF_LOGS = re.compile(f"\\x1b\\[[0-9;:]*m|[\\r\\b]|([{_CONTROLS}])")
_INCOMPLETE_COLOUR = re.compile(r"\x1b(\[[0-9;:]{0,32})?$")


def escape_controls(text: str) -> str:
    r"""Return text with its control characters written as escapes, such as ``\x1b``."""
    return _ESCAPED.sub(lambda match: repr(match[0])[1:-1], text)


class ChangedStream:
    """A text stream that changes what is written to it; everything else is the stream's own.

    No `io.TextIOBase`: Python 3.13 flushes one when it is collected, and its stream may be closed by then.
    """

    def __init__(self, stream: TextIO, change: Callable[[str], str]) -> None:
        self.unchanged = stream
        self._change = change

    def write(self, text: str, /) -> int:
        """Write the changed text; return the length of the original."""
        self.unchanged.write(self._change(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unchanged, name)


class EscapedStream(ChangedStream):
    """A text stream that escapes written text."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, escape_controls)


@contextlib.contextmanager
def escape_streams() -> Iterator[None]:
    """Escape control sequences written to stdout and stderr."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", EscapedStream(unwrap_stream(stream))) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def unwrap_stream(stream: TextIO) -> TextIO:
    """Return the stream behind an escaped one, for bytes that programs read, such as a script."""
    return stream.unchanged if isinstance(stream, EscapedStream) else stream


def open_console(*, stderr: bool = False, **options: Any) -> Console:
    """Return a rich console on stdout or stderr that escapes the texts it renders."""
    return _console_class()(file=unwrap_stream(sys.stderr if stderr else sys.stdout), **options)


@functools.cache
def _console_class() -> type[Console]:
    # Imported late: in a pipe rich is not needed.
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class EscapingConsole(Console):
        """A console that escapes the texts it renders."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=escape_controls(segment.text))

    return EscapingConsole


def print_json(content: object) -> None:
    """Print the answer of a verb for programs; its JSON is ASCII."""
    print(json.dumps(content, indent=2), flush=True)


def print_plot(draw: Callable[[int, bool], str]) -> None:
    """Print a plot that `draw` makes of the terminal's width in characters, and if it has colours."""
    import shutil  # late: it imports every kind of compression

    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    plot = draw(shutil.get_terminal_size().columns, coloured)
    # Unescaped: a plot has numbers and escaped names alone, and the colours are ours.
    print(f"\n{plot}", file=unwrap_stream(sys.stdout))


def print_stderr(line: str) -> None:
    """Print a line to the user, on stderr as stdout may be for a program."""
    print(line, file=sys.stderr, flush=True)


def print_message(line: str) -> None:
    """Print a message of Slipway's on stderr."""
    print_stderr(f"slipway: {line}")


def agrees(stream: TextIO) -> bool:
    """Ask for a yes or no on the line that a question began; return True for yes."""
    print("[y/N] ", end="", file=stream, flush=True)
    answer = ""
    try:
        answer = sys.stdin.readline()
    finally:
        if not answer.endswith("\n"):  # also after Ctrl-C: the next output begins a line
            print(file=stream)
    return answer.strip().lower() in ("y", "yes")


class LogWriter:
    """A writer of logs to stdout: a terminal gets colours alone, a file the text as it is."""

    def __init__(self) -> None:
        self._incomplete = ""

    def __call__(self, text: str) -> None:
        """Write a piece of a log; an incomplete colour sequence at its end waits for the next piece."""
        stream = unwrap_stream(sys.stdout)
        if stream.isatty():
            text = self._incomplete + text
            incomplete = _INCOMPLETE_COLOUR.search(text)
            self._incomplete = incomplete[0] if incomplete else ""
            text = text.removesuffix(self._incomplete)
            text = _OF_LOGS.sub(lambda match: escape_controls(match[1]) if match[1] else match[0], text)
        stream.write(text)
        stream.flush()
