"""Views of the estimates of a training: its time, compute and disk space, and the memory of its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.checks.rules.runs import days_text
from launcher.checks.rules.space import bytes_text
from launcher.errors import UserError, literal
from launcher.estimates.cost import Cost, MemoryEstimate, TrainingAmount
from launcher.estimates.memory import StageMemory
from launcher.estimates.values import memory_text
from launcher.plan import Plan
from launcher.ui.plotting import FAINT, INK, new_figure, style_axes, write_picture
from launcher.ui.tables import count, new_table
from launcher.ui.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def cost_lines(plan: Plan, amount: TrainingAmount) -> Iterator[tuple[str, str]]:
    """Yield the lines of time, compute and space, each with its name; without a `Cost` none of the time.

    The space is that of the checkpoints on disk, and of a save in memory.
    """
    compute = f"{count(amount.parameters)} parameters, {count(amount.tokens)} tokens"
    compute += f", {amount.flops:.3g} FLOPs on {amount.gpus:,} GPUs"
    if isinstance(amount, Cost):
        time = f"{days_text(amount.seconds)}: {amount.steps:,} steps of {amount.seconds_per_step:.3g} s"
        limit, price = plan.job.resources.time_limit, plan.assumptions.gpu_hour_price
        if amount.links is not None and limit is not None:
            time += f"; {'one job' if amount.links == 1 else f'{amount.links:,} jobs'} of {limit}"
        yield "time", time
        mfu = f"MFU {amount.mfu:.0%} of {amount.peak / 1e12:,.0f} TFLOP/s ({amount.mfu_source})"
        hours = f"{amount.gpu_hours:,.0f}" if amount.gpu_hours >= 10 else f"{amount.gpu_hours:.2g}"
        total = "" if amount.price is None or price is None else f", {amount.price:,.0f} at {price:g} each"
        compute += f" at {mfu}: {hours} GPU-hours{total}"
    yield "compute", compute
    bytes_of_one, kept = amount.checkpoint_bytes, amount.kept_checkpoints
    text = f"a checkpoint {bytes_text(bytes_of_one)}"
    if bytes_of_one == 0:
        text = "no checkpoint is written"
    elif kept is None:
        text += ", and all of them are kept"
    elif kept != 1:
        text += f", {kept} kept: {bytes_text(kept * bytes_of_one)}"
    yield "space", text
    if amount.save_bytes:
        saving = memory_text(amount.save_bytes)
        yield "save", f"a checkpoint takes {saving} of a node's memory, and none of a GPU's"


GIB = 2**30
_MIB = 2**20

# Only the first, the last and the fullest stages of a longer pipeline are shown.
MOST_ROWS = 10
_FIRST, _LAST = 3, 2

_NARROWEST, _WIDEST = 12, 60
_GAP = 2  # between two columns of a rich table


class Part(NamedTuple):
    """A part of a stage's memory: its field, its short name, and its colour and shade in a bar."""

    name: str
    short: str
    colour: str
    shade: str
    meaning: str


# The shades distinguish the parts without colours.
PARTS = (
    Part("weights", "weights", "#2f6db5", "█", "weights"),
    Part("gradients", "grads", "#35a7a0", "▓", "gradients"),
    Part("optimizer", "optim", "#8a5fb8", "▒", "optimizer"),
    Part("activations", "activ", "#e0a11a", "░", "activations"),
    Part("logits", "logits", "#c75d8f", "▚", "logits, loss"),
)
_OVER = "bold red"

Row = tuple[StageMemory, ...]  # a stage, or several neighbours that share a row


def headline(memory: MemoryEstimate) -> str:
    """Return the memory of the fullest stage and of its GPU in one line."""
    fullest, (gpu, source, _) = memory.fullest, memory.counted
    where = (
        f"stage {fullest.stage} is the fullest of {len(memory.stages)}: " if len(memory.stages) > 1 else ""
    )
    over = fullest.total - memory.capacity
    if over > 0:
        held = f", {memory_text(over)} more than the {memory_text(memory.capacity)} of a GPU"
    else:
        held = f" of {memory_text(memory.capacity)}"
        held += f", {memory_text(memory.capacity - memory.usable)} of it kept free" if memory.margin else ""
    return f"{where}{memory_text(fullest.total)}{held} ({gpu.name}; {source})"


def plain_lines(memory: MemoryEstimate) -> Iterator[str]:
    unit, name = _unit(memory)
    for row in folded(memory.stages):
        stage, *others = row
        if others:
            yield f"stages {stage.stage} to {others[-1].stage}: {_range(row, unit)} {name}"
            continue
        parts = " + ".join(f"{part.name} {getattr(stage, part.name) / unit:.1f}" for part in PARTS)
        layers = f"{stage.layers} layer{'s' * (stage.layers != 1)}"
        yield f"stage {stage.stage} ({layers}): {stage.total / unit:.1f} {name} = {parts}"


def folded(stages: Sequence[StageMemory], most: int = MOST_ROWS) -> list[Row]:
    """Return the rows of a table: in a long one most stages share a row with their neighbours."""
    fullest = max(stages, key=lambda stage: stage.total)
    own = {*stages[:_FIRST], fullest, *stages[-_LAST:]} if len(stages) > most else {*stages}
    rows: list[Row] = []
    for has_own, group in groupby(stages, own.__contains__):
        neighbours = tuple(group)
        rows += [(stage,) for stage in neighbours] if has_own else [neighbours]
    return rows


def bar(parts: Sequence[int], usable: int, capacity: int, width: int, scale: int) -> list[tuple[int, int]]:
    """Return the parts of a bar as pairs of an index and its cells; `scale` are the bytes of its full width.

    After the parts, index −1 is free memory and −2 the free margin.
    """
    total = sum(parts)
    limits = [*accumulate(parts), max(total, usable), max(total, capacity)]
    ends = [round(limit * width / scale) for limit in limits]
    indices = [*range(len(parts)), -1, -2]
    spans = zip(indices, pairwise([0, *ends]), strict=True)
    return [(index, end - begin) for index, (begin, end) in spans if end > begin]


def print_table(memory: MemoryEstimate) -> bool:
    """Print the table, its bars as wide as the terminal leaves them; return False if it is too narrow."""
    from rich.text import Text

    terminal = open_console()
    unit, name = _unit(memory)
    rows = folded(memory.stages)
    names = ("stage", "layers", *(part.short for part in PARTS), "total")
    cells = [_cells(row, unit) for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    width = min(terminal.width - sum(widths) - _GAP * len(widths) - 1, _WIDEST)
    if width < _NARROWEST:
        return False
    table = new_table(pad_edge=False, show_edge=False)
    for column in names:
        table.add_column(column, justify="right", no_wrap=True)
    scale = max(memory.capacity, memory.fullest.total)
    end = round(memory.capacity * width / scale) + 1
    table.add_column(f"{name} of {memory.capacity / unit:.1f} │".rjust(end), no_wrap=True)
    for row, texts in zip(rows, cells, strict=True):
        style = "dim" if len(row) > 1 else ""
        drawn = Text() if len(row) > 1 else _draw_bar(row[0], memory, width, scale, terminal)
        is_over = any(stage.total > memory.capacity for stage in row)
        total = Text(texts[-1], _OVER if is_over else style or "bold")
        table.add_row(*(Text(text, style) for text in texts[:-1]), total, drawn)
    terminal.print(table)
    legend = Text()
    for part in PARTS:
        legend.append(_shade(part, terminal), part.colour).append(f" {part.meaning}  ")
    if memory.margin:
        legend.append("┄", "dim").append(f" margin {memory.margin:.0%}")
    terminal.print(legend)
    return True


def _draw_bar(stage: StageMemory, memory: MemoryEstimate, width: int, scale: int, console: Console) -> Text:
    """Draw a bar with a line at the end of the GPU's memory; `scale` are the bytes of the whole width."""
    from rich.text import Text

    values = [getattr(stage, part.name) for part in PARTS]
    text = Text()
    for index, cells in bar(values, memory.usable, memory.capacity, width, scale):
        if index >= 0:
            text.append(_shade(PARTS[index], console) * cells, PARTS[index].colour)
        else:
            text.append(("·" if index == -1 else "┄") * cells, "dim")
    end = round(memory.capacity * width / scale)
    line = Text("│", _OVER if stage.total > memory.capacity else "")
    return Text.assemble(text[:end], line, text[end:])


def _cells(row: Row, unit: int) -> list[str]:
    stage, *others = row
    if others:
        return [f"{stage.stage}–{others[-1].stage}", "", *("" for _ in PARTS), _range(row, unit)]
    parts = (f"{getattr(stage, part.name) / unit:.1f}" for part in PARTS)
    return [str(stage.stage), str(stage.layers), *parts, f"{stage.total / unit:.1f}"]


def _shade(part: Part, console: Console) -> str:
    return part.shade if console.no_color or console.color_system is None else "█"


def _unit(memory: MemoryEstimate) -> tuple[int, str]:
    """Return the unit of all rows, by the fullest of them, and its name."""
    return (GIB, "GiB") if memory.fullest.total >= GIB else (_MIB, "MiB")


def _range(stages: Sequence[StageMemory], unit: int) -> str:
    least, most = (f"{pick(stage.total for stage in stages) / unit:.1f}" for pick in (min, max))
    return least if least == most else f"{least}–{most}"


_SUFFIXES = (".png", ".svg", ".pdf")
_OVER_INK = "#c22f2f"
# Totals are printed above at most so many bars.
_MOST_LABELLED = 24


def require_suffix(path: Path) -> None:
    """Raise UserError for a file name without the suffix of a supported picture format."""
    if path.suffix.lower() not in _SUFFIXES:
        message = f"--plot {literal(str(path))}: unknown picture format"
        raise UserError(message, hint=f"choose a name that ends with {', '.join(_SUFFIXES)}")


def write_figure(path: Path, run: str, memory: MemoryEstimate) -> None:
    """Draw the stages' memory against the GPU's into a file; raise UserError if that is not possible."""
    figure = new_figure(max(9.0, min(16.0, 3.5 + 0.5 * len(memory.stages))), 5.2)
    axes = figure.add_subplot()
    _draw_stages(axes, memory)
    style_axes(axes, run, headline(memory))
    axes.set_xlabel("pipeline stage", color=INK)
    axes.set_ylabel("memory of a GPU at its peak [GiB]", color=INK)
    axes.set_xlim(-0.6, len(memory.stages) - 0.4)
    axes.set_ylim(0, 1.08 * max(memory.capacity, memory.fullest.total) / GIB)
    axes.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = axes.get_legend_handles_labels()
    # In the order of the stack, to the right of the axes: the title's lines are longer than these.
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False, labelcolor=INK, fontsize=9.5
    )
    write_picture(path, figure, run, path.suffix.lower().removeprefix("."))


def _draw_stages(axes: Any, memory: MemoryEstimate) -> None:
    """Draw the bars, the GPU's memory and its margin."""
    at = [stage.stage for stage in memory.stages]
    below = [0.0] * len(at)
    for part in PARTS:
        heights = [getattr(stage, part.name) / GIB for stage in memory.stages]
        axes.bar(at, heights, width=0.72, bottom=below, color=part.colour, label=part.meaning, linewidth=0)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    capacity, usable = memory.capacity / GIB, memory.usable / GIB
    for stage, total in zip(at, below, strict=True) if len(at) <= _MOST_LABELLED else ():
        axes.annotate(
            f"{total:.1f}", (stage, total), xytext=(0, 3), textcoords="offset points", ha="center",
            fontsize=8.5, fontweight="bold", color=_OVER_INK if total > capacity else INK,
        )  # fmt: skip
    gpu = memory.counted.gpu.name
    axes.axhline(capacity, color=_OVER_INK, linewidth=1.8, label=f"{gpu}: {capacity:.1f} GiB")
    if memory.margin:
        label = f"margin {memory.margin:.0%}"
        axes.axhspan(usable, capacity, color=FAINT, alpha=0.12, linewidth=0, label=label, zorder=0)
