"""The memory of a GPU by pipeline stage as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.cli.memory_view import GIB, PARTS, headline
from launcher.errors import UserError, shown
from launcher.estimates.overview import MemoryEstimate
from launcher.ui.plotting import FAINT, INK, new_figure, rendered, style_axes, write_picture

_SUFFIXES = (".png", ".svg", ".pdf")
_OVER = "#c22f2f"
# Totals stand above the bars where there is room for them.
_MOST_LABELLED = 24


def require_suffix(path: Path) -> None:
    """Refuse a name that does not tell which kind of picture it is of.

    Raises
    ------
    UserError
        With those that there are.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(
            f"--plot {shown(str(path))}: not a picture's name",
            hint=f"one that ends with {', '.join(_SUFFIXES)}",
        )


def write_figure(path: Path, run: str, memory: MemoryEstimate) -> None:
    """Draw the stages' memory against the GPU's into a file, replacing an older one at once.

    Raises
    ------
    UserError
        If matplotlib is missing, or the file cannot be written.
    """
    figure = new_figure(max(9.0, min(16.0, 3.5 + 0.5 * len(memory.stages))), 5.2)
    axes = figure.add_subplot()
    _draw_stages(axes, memory)
    _draw_capacity(axes, memory)
    style_axes(axes, run, headline(memory))
    axes.set_xlabel("pipeline stage", color=INK)
    axes.set_ylabel("memory of a GPU at its peak [GiB]", color=INK)
    axes.set_xlim(-0.6, len(memory.stages) - 0.4)
    axes.set_ylim(0, 1.08 * max(memory.capacity, memory.fullest.total) / GIB)
    axes.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = axes.get_legend_handles_labels()
    # As the parts stand on each other, and below the title's lines, which are longer than the axes.
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False, labelcolor=INK, fontsize=9.5
    )
    write_picture(path, rendered(figure, run, path.suffix.lower().removeprefix(".")))


def _draw_stages(axes: Any, memory: MemoryEstimate) -> None:
    at = [stage.stage for stage in memory.stages]
    below = [0.0] * len(at)
    for part in PARTS:
        heights = [getattr(stage, part.name) / GIB for stage in memory.stages]
        axes.bar(at, heights, width=0.72, bottom=below, color=part.colour, label=part.meaning, linewidth=0)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if len(at) <= _MOST_LABELLED:
        _label(axes, at, below, memory.capacity / GIB)


def _label(axes: Any, at: Sequence[int], totals: Sequence[float], capacity: float) -> None:
    for stage, total in zip(at, totals, strict=True):
        axes.annotate(
            f"{total:.1f}", (stage, total), xytext=(0, 3), textcoords="offset points", ha="center",
            fontsize=8.5, fontweight="bold", color=_OVER if total > capacity else INK,
        )  # fmt: skip


def _draw_capacity(axes: Any, memory: MemoryEstimate) -> None:
    gpu, usable = memory.counted.gpu, memory.usable / GIB
    capacity = memory.capacity / GIB
    axes.axhline(capacity, color=_OVER, linewidth=1.8, label=f"{gpu.name}: {capacity:.1f} GiB")
    if memory.margin:
        axes.axhspan(
            usable,
            capacity,
            color=FAINT,
            alpha=0.12,
            linewidth=0,
            label=f"margin {memory.margin:.0%}",
            zorder=0,
        )
