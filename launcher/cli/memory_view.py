"""The memory of a GPU by pipeline stage: lines in a pipe, a table with bars on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from launcher.estimates.memory import StageMemory
from launcher.estimates.overview import MemoryEstimate
from launcher.ui.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

GIB = 2**30
_MIB = 2**20

# A longer pipeline is told by its ends and its fullest stage.
MOST_ROWS = 10
_FIRST, _LAST = 3, 2

_NARROWEST, _WIDEST = 12, 60
_GAP = 2  # between two columns of a rich table


class Part(NamedTuple):
    """A part of a stage's memory: its field, its short name, and how it looks in a bar."""

    name: str
    short: str
    colour: str
    shade: str
    meaning: str


# The shades tell the parts from each other where there are no colours.
PARTS = (
    Part("weights", "weights", "#2f6db5", "█", "weights"),
    Part("gradients", "grads", "#35a7a0", "▓", "gradients"),
    Part("optimizer", "optim", "#8a5fb8", "▒", "optimizer"),
    Part("activations", "activ", "#e0a11a", "░", "activations"),
    Part("logits", "logits", "#c75d8f", "▚", "logits, loss"),
)
_OVER = "bold red"

Row = StageMemory | tuple[StageMemory, ...]


def headline(memory: MemoryEstimate) -> str:
    """What the fullest stage takes of which GPU, in one line."""
    fullest, (gpu, source, _) = memory.fullest, memory.counted
    where = (
        f"stage {fullest.stage} is the fullest of {len(memory.stages)}: " if len(memory.stages) > 1 else ""
    )
    over = fullest.total - memory.capacity
    if over > 0:
        held = f", {size(over)} more than the {size(memory.capacity)} that a GPU has"
    else:
        held = f" of {size(memory.capacity)}"
        held += f", {size(memory.capacity - memory.usable)} of them margin" if memory.margin else ""
    return f"{where}{size(fullest.total)}{held} ({gpu.name}; {source})"


def size(number: int) -> str:
    """Format bytes of memory: 512 MiB, 56.0 GiB."""
    return f"{number / GIB:,.1f} GiB" if number >= GIB else f"{number / _MIB:.0f} MiB"


def plain_lines(memory: MemoryEstimate) -> Iterator[str]:
    """A line for each row of the table."""
    unit, name = _unit(memory)
    for row in folded(memory.stages):
        if isinstance(row, tuple):
            yield f"{_stages(row)}: {_range(row, unit)} {name}"
            continue
        parts = " + ".join(f"{part.name} {getattr(row, part.name) / unit:.1f}" for part in PARTS)
        yield f"stage {row.stage} ({_layers(row)}): {row.total / unit:.1f} {name} = {parts}"


def folded(stages: Sequence[StageMemory], most: int = MOST_ROWS) -> list[Row]:
    """The rows of a table: a stage, or several neighbours that take a row together."""
    if len(stages) <= most:
        return list(stages)
    fullest = max(stages, key=lambda stage: stage.total)
    own = {*stages[:_FIRST], fullest, *stages[-_LAST:]}
    rows: list[Row] = []
    between: list[StageMemory] = []
    for stage in stages:
        if stage not in own:
            between.append(stage)
            continue
        rows += [tuple(between)] if len(between) > 1 else between
        between = []
        rows.append(stage)
    return rows


def bar(parts: Sequence[int], usable: int, capacity: int, width: int, scale: int) -> list[tuple[int, int]]:
    """Where the parts of a bar end, in cells, and what comes after them.

    Returns
    -------
    Pairs of a part's index and its cells; after the parts −1 is what is free, −2 the margin that is free.
    """
    ends, total = [], 0
    for part in parts:
        total += part
        ends.append(_cells(total, width, scale))
    ends += [max(ends[-1], _cells(usable, width, scale)), max(ends[-1], _cells(capacity, width, scale))]
    indices = [*range(len(parts)), -1, -2]
    begins = [0, *ends]
    return [
        (index, end - begin) for index, begin, end in zip(indices, begins, ends, strict=False) if end > begin
    ]


def _scale(memory: MemoryEstimate) -> int:
    """The bytes of a bar's whole width."""
    return max(memory.capacity, memory.fullest.total)


def _cells(number: int, width: int, scale: int) -> int:
    return round(number * width / scale)


def print_table(memory: MemoryEstimate) -> bool:
    """Print the table, its bars as wide as the terminal leaves them; return False if it is too narrow."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    terminal = open_console()
    unit, name = _unit(memory)
    rows = folded(memory.stages)
    names = ("stage", "layers", *(part.short for part in PARTS), "total")
    cells = [_cells_of(row, unit) for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    width = min(terminal.width - sum(widths) - _GAP * len(widths) - 1, _WIDEST)
    if width < _NARROWEST:
        return False
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in names:
        table.add_column(column, justify="right", no_wrap=True)
    end = _cells(memory.capacity, width, _scale(memory))
    table.add_column(f"{name} of {memory.capacity / unit:.1f} │".rjust(end + 1), no_wrap=True)
    for row, texts in zip(rows, cells, strict=True):
        style = "dim" if isinstance(row, tuple) else ""
        drawn = Text("") if isinstance(row, tuple) else _drawn(row, memory, width, terminal)
        total = Text(texts[-1], _OVER if _is_over(row, memory) else style or "bold")
        table.add_row(*(Text(text, style) for text in texts[:-1]), total, drawn)
    terminal.print(table)
    terminal.print(_legend(memory, terminal))
    return True


def _is_over(row: Row, memory: MemoryEstimate) -> bool:
    return any(stage.total > memory.capacity for stage in (row if isinstance(row, tuple) else (row,)))


def _cells_of(row: Row, unit: int) -> list[str]:
    if isinstance(row, tuple):
        first, last = row[0].stage, row[-1].stage
        return [f"{first}–{last}", "", *("" for _ in PARTS), _range(row, unit)]
    parts = (f"{getattr(row, part.name) / unit:.1f}" for part in PARTS)
    return [str(row.stage), str(row.layers), *parts, f"{row.total / unit:.1f}"]


def _drawn(stage: StageMemory, memory: MemoryEstimate, width: int, console: Console) -> Text:
    """A bar; the line in it is where the GPU's memory ends."""
    from rich.text import Text

    scale = _scale(memory)
    values = [getattr(stage, part.name) for part in PARTS]
    text = Text()
    for index, cells in bar(values, memory.usable, memory.capacity, width, scale):
        if index >= 0:
            text.append(_shade(PARTS[index], console) * cells, PARTS[index].colour)
        else:
            text.append(("·" if index == -1 else "┄") * cells, "dim")
    end = _cells(memory.capacity, width, scale)
    over = stage.total > memory.capacity
    line = Text("│", _OVER if over else "")
    return Text.assemble(text[:end], line, text[end:])


def _shade(part: Part, console: Console) -> str:
    return part.shade if console.no_color or console.color_system is None else "█"


def _legend(memory: MemoryEstimate, console: Console) -> Text:
    from rich.text import Text

    text = Text()
    for part in PARTS:
        text.append(_shade(part, console), part.colour).append(f" {part.meaning}  ")
    if memory.margin:
        text.append("┄", "dim").append(f" margin {memory.margin:.0%}")
    return text


def _unit(memory: MemoryEstimate) -> tuple[int, str]:
    """All rows in one unit, by the fullest of them."""
    return (GIB, "GiB") if memory.fullest.total >= GIB else (_MIB, "MiB")


def _range(stages: Sequence[StageMemory], unit: int) -> str:
    least, most = (f"{pick(stage.total for stage in stages) / unit:.1f}" for pick in (min, max))
    return least if least == most else f"{least}–{most}"


def _stages(stages: Sequence[StageMemory]) -> str:
    return f"stages {stages[0].stage} to {stages[-1].stage}"


def _layers(stage: StageMemory) -> str:
    return f"{stage.layers} layer{'s' * (stage.layers != 1)}"
