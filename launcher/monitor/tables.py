"""Tables: with colours on a terminal, aligned text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.errors import one_line
from launcher.monitor.formatting import UNKNOWN
from launcher.slurm.states import State
from launcher.terminal import open_console

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

REASON = "REASON"
# What a narrow terminal does without, the most dispensable first.
_DROPPED_FIRST = (
    "NODES×TASKS",
    "NODELIST",
    "VAL LOSS",
    "TOKENS/S",
    "LAUNCH",
    "ELAPSED/LIMIT",
    "USER",
    "LOSS",
    "SINCE",
)
# A list of a hundred nodes stands in a pipe and in --json.
_LONGEST = {"NODELIST": 20, "RUN": 40}
# So many runs are named before "and 12 more".
_NAMED = 3

_GAP = 2  # between two columns of a rich table, and at its edges together

_COLOURS = {
    State.PENDING: "yellow",
    State.SUSPENDED: "yellow",
    State.RUNNING: "bold cyan",
    State.COMPLETING: "cyan",
    State.COMPLETED: "green",
    State.INTERRUPTED: "yellow",
    State.UNKNOWN: "bold magenta",
}


def colour(state: State) -> str:
    """The rich style of a state; every bad end is red."""
    return _COLOURS.get(state, "bold red")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], states: Sequence[State]) -> None:
    """Print rows, the cell under ``STATE`` in the colour of its state."""
    if sys.stdout.isatty():
        _print_rich(columns, rows, states)
    else:
        print(align([columns, *rows]))


def align(rows: Sequence[Sequence[str]]) -> str:
    """Set rows in columns of equal width, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], states: Sequence[State]) -> None:
    terminal = open_console()
    terminal.print(rich_table(columns, rows, states, terminal.width))
    for line in reasons(rows, states):
        terminal.print(line)


def rich_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], states: Sequence[State], width: int
) -> Table:
    """A table that fits into `width` characters, the cell under ``STATE`` in its colour.

    A column that says nothing of any row is left out, and in a narrow terminal those that can be spared. A
    reason is a sentence: `reasons` has them, to stand below.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    short = [[_shortened(name, cell) for name, cell in zip(columns, row, strict=True)] for row in rows]
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    shown = _fitting(columns, short, width)
    for index in shown:
        table.add_column(columns[index].lower(), no_wrap=True)
    for row, state in zip(short, states, strict=True):
        cells = [Text(row[index], colour(state) if columns[index] == "STATE" else "") for index in shown]
        table.add_row(*cells)
    return table


def _fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    shown = [index for index, name in enumerate(columns) if _says_something(name, index, rows)]
    for name in ("", *_DROPPED_FIRST):
        shown = [index for index in shown if columns[index] != name]
        if sum(_width(columns, rows, index) for index in shown) <= width:
            break
    return shown


def _says_something(name: str, index: int, rows: Sequence[Sequence[str]]) -> bool:
    return name != REASON and any(row[index] != UNKNOWN for row in rows)


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]], index: int) -> int:
    return max(len(columns[index]), *(len(row[index]) for row in rows)) + _GAP


def _shortened(column: str, cell: str) -> str:
    longest = _LONGEST.get(column)
    return f"{cell[: longest - 1]}…" if longest and len(cell) > longest else cell


def reasons(rows: Sequence[Sequence[str]], states: Sequence[State]) -> list[Text]:
    """A line for each reason that rows have in their last cell; those of the same state share it."""
    from rich.text import Text

    told: dict[tuple[State, str], list[str]] = {}
    for row, state in zip(rows, states, strict=True):
        if row[-1] != UNKNOWN:
            told.setdefault((state, row[-1]), []).append(row[0])
    return [
        Text.assemble(f"  {_names(runs)} ", (f"{state.value} ", colour(state)), (reason, "dim"))
        for (state, reason), runs in told.items()
    ]


def _names(runs: Sequence[str]) -> str:
    named = list(dict.fromkeys(runs))
    further = len(named) - _NAMED
    return ", ".join(named[:_NAMED]) + (f" and {further} more" if further > 0 else "")


def print_pairs(title: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values below each other, each in one line."""
    pairs = [(name, one_line(value)) for name, value in pairs]
    if not sys.stdout.isatty():
        print(align([(name, value) for name, value in pairs]))
        return
    from rich.box import ROUNDED
    from rich.table import Table
    from rich.text import Text

    table = Table(box=ROUNDED, show_header=False, title=Text(title, "bold"), title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, Text(value))
    open_console().print(table)
