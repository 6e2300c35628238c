"""Text on a terminal, with colours; the same text without them anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Literal

from launcher.terminal import open_console, unescaped

_INDENT = "  "


def print_code(text: str, language: str) -> None:
    """Print a script or a configuration."""
    if not sys.stdout.isatty():
        unescaped(sys.stdout).write(text)
        return
    # Imported late: in a pipe there is nothing to colour.
    from rich.syntax import Syntax

    # No wrapping: what is copied from the terminal is to be the text.
    highlighted = Syntax(text, language, theme="ansi_dark", background_color="default")
    open_console().print(highlighted.highlight(text), soft_wrap=True, end="")


def print_styled(lines: Iterable[tuple[tuple[str, str], ...]], *, wrap: bool = False) -> None:
    """Print lines that are made of parts, each a text and its style on a terminal.

    With `wrap` a line that is longer than the terminal is broken between words, and goes on indented. Else
    the terminal breaks it where it ends, and what is copied from there is one line.
    """
    if not sys.stdout.isatty():
        for line in lines:
            print("".join(text for text, _ in line))
        return
    from rich.text import Text

    terminal = open_console()
    for line in lines:
        text = Text.assemble(*line)
        if not wrap or text.cell_len <= terminal.width:
            terminal.print(text, soft_wrap=True)
            continue
        for number, part in enumerate(text.wrap(terminal, max(terminal.width - len(_INDENT), 1))):
            part.rstrip()
            terminal.print(Text(_INDENT if number else "") + part, soft_wrap=True)


def print_listing(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, numbers: int = 0) -> None:
    """Print a table; the columns after the first, `numbers` of them, stand to the right."""
    rows = list(rows)
    right = range(1, 1 + numbers)
    if not sys.stdout.isatty():
        table = [columns, *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = zip(row, widths, strict=True)
            line = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(cells))
            print("  ".join(line).rstrip())
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        justify: Literal["left", "right"] = "right" if index in right else "left"
        # In a narrow terminal a name stays whole as long as it can, and nothing is cut off.
        grid.add_column(name.lower(), justify=justify, no_wrap=index == 0, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell, "bold" if index == 0 else "") for index, cell in enumerate(row)))
    open_console().print(grid)
