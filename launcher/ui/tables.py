"""Tables and styled lines, with colours on a terminal and plain text anywhere else; numbers in words."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from launcher.errors import escape
from launcher.slurm.notations import format_time_limit
from launcher.slurm.states import State
from launcher.ui.terminal import open_console, unwrap_stream

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

# A text, or a text and its style on a terminal; and a line of such parts.
Cell = str | tuple[str, str]
Line = tuple[tuple[str, str], ...]

REASON = "REASON"
NO_STEP = "no new step"  # how the reason of a job begins that runs, and whose training is silent
# The columns that a narrow terminal leaves out, the most dispensable first.
_DROPPED_FIRST = (
    "NODES×TASKS",
    "NODELIST",
    "TOKENS/S",
    "LAUNCH",
    "ELAPSED/LIMIT",
    "ELAPSED",
    "USER",
    "LOSS",
    "SINCE",
    "JOB",
    "VAL LOSS",
)
# The full list of a hundred nodes is in --json and in piped output.
_LONGEST = {"NODELIST": 20, "RUN": 40}
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
    """Return the rich style of a state; every bad end is red."""
    return _COLOURS.get(state, "bold red")


def _style(state: State, reason: str) -> str:
    return "bold yellow" if state is State.RUNNING and reason.startswith(NO_STEP) else colour(state)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], states: Sequence[State]) -> None:
    """Print rows, the cell under ``STATE`` in the colour of its state."""
    if not sys.stdout.isatty():
        print(*align([columns, *rows]), sep="\n")
        return
    terminal = open_console()
    terminal.print(rich_table(columns, rows, states, terminal.width))
    for line in reasons(rows, states):
        terminal.print(line)


def align(rows: Sequence[Sequence[str]], numbers: int = 0) -> list[str]:
    """Return rows as aligned lines; of the columns after the first, `numbers` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{'>' if 0 < index <= numbers else '<'}{width}" for index, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


def rich_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], states: Sequence[State], width: int
) -> Table:
    """Return a table that fits into `width` characters, the cell under ``STATE`` in its colour.

    A column that is empty in all rows is left out, and in a narrow terminal the dispensable ones. So is the
    last: reasons are sentences, which `reasons` returns as lines to print below.
    """
    from rich.text import Text

    columns = columns[:-1]
    short = [list(map(_shorten, columns, row)) for row in rows]
    indices = fitting_columns(columns, short, _DROPPED_FIRST, width - _GAP)
    table = new_table(show_edge=False)
    for index in indices:
        table.add_column(columns[index].lower(), no_wrap=True)
    for whole, row, state in zip(rows, short, states, strict=True):
        style = _style(state, whole[-1])
        cells = [Text(row[index], style if columns[index] == "STATE" else "") for index in indices]
        table.add_row(*cells)
    return table


def fitting_columns(
    columns: Sequence[str], rows: Sequence[Sequence[str]], dropped_first: Sequence[str], width: float
) -> list[int]:
    """Return the columns that have values, without the dispensable ones for which there is no room."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    indices = [i for i in range(len(columns)) if any(row[i] not in ("", UNKNOWN) for row in rows)]
    for name in ("", *dropped_first):
        indices = [index for index in indices if columns[index] != name]
        if sum(widths[index] + _GAP for index in indices) - _GAP <= width:
            break
    return indices


def new_table(**options: Any) -> Table:
    """Return an empty table in the style of all of them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), **options)


def _shorten(column: str, cell: str) -> str:
    longest = _LONGEST.get(column)
    return f"{cell[: longest - 1]}…" if longest and len(cell) > longest else cell


def reasons(rows: Sequence[Sequence[str]], states: Sequence[State]) -> list[Text]:
    """Return a line for each reason in the rows' last cells; rows of one state and reason share a line."""
    from rich.text import Text

    runs_by_reason: dict[tuple[State, str], list[str]] = {}
    for row, state in zip(rows, states, strict=True):
        if row[-1] != UNKNOWN:
            runs_by_reason.setdefault((state, row[-1]), []).append(row[0])
    return [
        Text.assemble(f"  {join_first(runs)} ", (f"{state.value} ", _style(state, reason)), (reason, "dim"))
        for (state, reason), runs in runs_by_reason.items()
    ]


def join_first(names: Sequence[str], most: int = 3) -> str:
    """Return the first of some names, each once, and the number of the others."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def print_pairs(title: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values in two columns, each value in one line."""
    pairs = [(name, escape(value)) for name, value in pairs]
    if not sys.stdout.isatty():
        print(*align([(name, value) for name, value in pairs]), sep="\n")
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


_INDENT = "  "


def print_code(text: str, language: str) -> None:
    """Print a script or a configuration."""
    if not sys.stdout.isatty():
        unwrap_stream(sys.stdout).write(text)
        return
    # Imported late: in a pipe there is nothing to colour.
    from rich.syntax import Syntax

    # No wrapping, so that text copied from the terminal is unchanged.
    highlighted = Syntax(text, language, theme="ansi_dark", background_color="default")
    open_console().print(highlighted.highlight(text), soft_wrap=True, end="")


def print_styled(lines: Iterable[Line], *, wrap: bool = False) -> None:
    """Print lines of parts, each a text and its style on a terminal.

    With `wrap` a line longer than the terminal is broken between words and continues indented. Otherwise
    the terminal breaks it, and text copied from there is one line.
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


def print_lines(*lines: str) -> None:
    """Print lines of other people's texts as they are."""
    print_styled(((line, ""),) for line in lines)


def print_listing(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    numbers: int = 0,
    unfolded: Container[int] = (0,),
) -> None:
    """Print a table; on a terminal that of `print_grid`."""
    rows = list(rows)
    if sys.stdout.isatty():
        print_grid(columns, rows, numbers=numbers, unfolded=unfolded)
    else:
        texts = [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in rows]
        print(*align([columns, *texts], numbers), sep="\n")


def print_grid(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell | Text]],
    *,
    numbers: int = 0,
    unfolded: Container[int] = (0,),
) -> None:
    """Print a table with the lines and colours of a terminal.

    Of the columns after the first, `numbers` are right-aligned. In a narrow terminal the cells of `unfolded`
    keep their line as long as possible, the others are folded, and nothing else is cut off.
    """
    from rich.text import Text

    grid = new_table(pad_edge=False)
    for index, name in enumerate(columns):
        justify: Literal["left", "right"] = "right" if 0 < index <= numbers else "left"
        grid.add_column(name.lower(), justify=justify, no_wrap=index in unfolded, overflow="fold")
    for row in rows:
        first, *others = (Text(*cell) if isinstance(cell, tuple) else cell for cell in row)
        texts = (Text(cell) if isinstance(cell, str) else cell for cell in others)
        grid.add_row(Text(first, "bold") if isinstance(first, str) else first, *texts)
    open_console().print(grid)


# --- numbers and times in words

UNKNOWN = "-"


def duration(seconds: float | None) -> str:
    """Format seconds as Slurm does, ``[D-]HH:MM:SS``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN if seconds is None else str(seconds)
    return format_time_limit(int(seconds))


def count(number: float | None) -> str:
    """Format a count with three digits and a letter: 950, 4.12k, 126M, 1.5T."""
    if number is None or not math.isfinite(number):
        return UNKNOWN if number is None else str(number)
    for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= unit * 0.9995:
            return f"{_format_three_digits(number / unit)}{letter}"
    return _format_three_digits(number)


def _format_three_digits(number: float) -> str:
    if float(number).is_integer():
        return str(int(number))
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{digits}f}"


def loss(number: float | None) -> str:
    """Format a loss in nats."""
    return UNKNOWN if number is None else f"{number:.4f}"


def learning_rate(number: float | None) -> str:
    """Format a learning rate or the like: 6.00e-04."""
    return UNKNOWN if number is None else f"{number:.2e}"


def tasks(nodes: int, each: int) -> str:
    """Format the size of a job: 2 nodes × 4 tasks."""
    return f"{nodes} node{'s' * (nodes != 1)} × {each} task{'s' * (each != 1)}"


def text(value: object) -> str:
    """Format anything that may be missing."""
    return UNKNOWN if value is None or value == "" else str(value)


def steps(step: int | None, max_steps: int | None) -> str:
    """Format a step out of so many: 120/300."""
    return UNKNOWN if step is None else f"{step}/{text(max_steps)}"


# Not strftime's, which are the locale's.
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def moment(when: str | float | None) -> str:
    """Format a point in time, ISO 8601 or Unix seconds; return any other text as it is."""
    if when is None or when == "":
        return UNKNOWN
    try:
        if isinstance(when, str):
            time = datetime.fromisoformat(when).astimezone()
        else:
            time = datetime.fromtimestamp(when)
    except (ValueError, OverflowError, OSError, TypeError):
        return str(when)
    return f"{time:%Y-%m-%d %H:%M}"


def since(when: float | None, now: datetime) -> str:
    """Format a point in time in a few characters: ``12:04`` today, ``20 Nov`` this year, else ``2025-11``."""
    if when is None:
        return UNKNOWN
    try:
        time = datetime.fromtimestamp(when)
    except (ValueError, OverflowError, OSError):
        return UNKNOWN
    if time.date() == now.date():
        return f"{time:%H:%M}"
    return f"{time.day} {_MONTHS[time.month - 1]}" if time.year == now.year else f"{time:%Y-%m}"
