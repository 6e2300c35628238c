"""Plots as files, drawn with matplotlib, and those of a data set's manifest."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from launcher.errors import UserError, escape
from launcher.ui.tables import count
from slipway.common.extras import install_command
from slipway.common.files import write_atomic

INK = "#22272b"
FAINT = "#6f7880"
GRID = "#e6e9ec"
# The characters of a title, and of the line below it, that fit over the narrowest figure at their own size.
_TITLE, _SUBTITLE = 56, 110


def missing_plot_extra(error: ImportError) -> UserError:
    """Return the error for a missing plotting library, with the command that installs it."""
    return UserError(f"plots need {error.name}, which is not installed", hint=install_command("plot"))


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure; its size is in inches; raise UserError if matplotlib is missing."""
    try:
        # Not pyplot: it keeps figures for ever and looks for a display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise missing_plot_extra(error) from error
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def escape_label(text: str) -> str:
    """Escape dollars, between which matplotlib would read a formula."""
    return escape(text).replace("$", r"\$")


def style_axes(axes: Any, title: str, subtitle: str) -> None:
    """Set the title and the colours of the axes."""
    title, subtitle = escape_label(title), escape_label(subtitle)
    large, small = _fit_font_size(title, 15, _TITLE), _fit_font_size(subtitle, 9.5, _SUBTITLE)
    axes.set_title(title, loc="left", fontsize=large, fontweight="bold", color=INK, pad=24)
    below = axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=small, color=FAINT)
    below.set_in_layout(False)  # a long one may be wider than the axes
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9.5)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _fit_font_size(text: str, size: float, most: int) -> float:
    """Return the font size at which a long line ends within the figure."""
    return size * min(1.0, most / max(len(text), 1))


def write_picture(path: Path, figure: Any, title: str, suffix: str = "png") -> None:
    """Write a figure as a png, svg or pdf, replacing an older file at once; raise UserError if that fails."""
    content = BytesIO()
    with warnings.catch_warnings():
        # A letter that no font has is drawn as a box, which needs no warning.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(content, format=suffix, metadata={"Title": escape(title)})
    try:
        write_atomic(path, content.getvalue())
    except OSError as error:
        raise UserError(f"cannot write the plot {path}: {error.strerror}") from error


_BLUE, _ORANGE = "#2f6db5", "#e07b1a"
# The same in a terminal, a little lighter.
_LENGTHS, _REASONS = "\x1b[38;2;74;144;226m", "\x1b[38;2;240;140;40m"
_NARROWEST, _WIDEST = 40, 110
# Reasons that are drawn; the others are summed up.
_DRAWN = 12
_LONGEST_REASON = 40


@dataclass(frozen=True)
class DataCounts:
    """Counts of the documents that a manifest holds.

    `lengths` has documents by the smallest length of their class in tokens: 0, 1, 2, 4, 8, ..., without gaps;
    a class ends before the next one begins. `dropped` has them by the reason, the most frequent first.
    """

    name: str
    documents: int
    tokens: int
    lengths: Mapping[int, int]
    dropped: Mapping[str, int]

    @property
    def subtitle(self) -> str:
        """Return the totals in one line."""
        parts = [f"{count(self.documents)} documents", f"{count(self.tokens)} tokens"]
        if self.documents:
            parts.append(f"{count(self.tokens / self.documents)} tokens a document")
        if self.dropped:
            lost = sum(self.dropped.values())
            parts.append(f"{count(lost)} of {count(lost + self.documents)} dropped")
        return "  ·  ".join(parts)


def read_counts(name: str, manifest: Mapping[str, Any]) -> DataCounts:
    """Read a manifest; raise UserError if it is not a data set's."""
    try:
        counts = manifest["counts"]
        known = {int(start): int(number) for start, number in manifest["lengths"].items()}
        dropped = {str(reason): int(number) for reason, number in counts["dropped"].items()}
        if counts.get("bad"):
            dropped["not readable"] = int(counts["bad"])
        documents, tokens = int(counts["documents"]), int(counts["tokens"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{name}: not a manifest of data: {error!r}") from error
    classes = [start for start in (0, *(1 << bits for bits in range(64))) if start <= max(known, default=0)]
    first = next((start for start in classes if start in known), 0)
    lengths = {start: known.get(start, 0) for start in classes if start >= first}
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return DataCounts(name, documents, tokens, lengths, dict(ordered))


def draw(data: DataCounts, width: int, *, coloured: bool) -> str:
    """Draw both plots in characters: a line with a bar for each class of lengths, and for each reason."""
    width = min(max(width, _NARROWEST), _WIDEST)
    lengths = {_class(start): number for start, number in data.lengths.items()}
    lines = ["documents by length in tokens", *_bars(lengths, width, _LENGTHS if coloured else None)]
    if data.dropped:
        top = _top(data.dropped).items()
        reasons = {escape(reason)[:_LONGEST_REASON]: number for reason, number in top}
        lines += ["", "documents dropped, by reason"]
        lines += _bars(reasons, width, _REASONS if coloured else None)
    return "\n".join(lines)


def _bars(numbers: Mapping[str, int], width: int, colour: str | None) -> list[str]:
    names = max(map(len, numbers), default=0)
    digits = max((len(f"{number:,}") for number in numbers.values()), default=0)
    room, most = max(width - names - digits - 4, 8), max(numbers.values(), default=0)
    lines = []
    for name, number in numbers.items():
        bar = _bar(room * number / most) if number else ""
        painted = f"{colour}{bar}\x1b[0m" if colour and bar else bar
        lines.append(f"{name.rjust(names)}  {f'{number:,}'.rjust(digits)}  {painted}".rstrip())
    return lines


def _bar(length: float) -> str:
    """Return a bar of a length in characters, to an eighth; one that is not empty can be seen."""
    eighths = max(round(8 * length), 1)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _top(dropped: Mapping[str, int]) -> dict[str, int]:
    """Return the most frequent reasons, and the sum of the others."""
    rest = list(dropped.values())[_DRAWN:]
    others = {f"{len(rest)} other reasons": sum(rest)} if rest else {}
    return dict(list(dropped.items())[:_DRAWN]) | others


def _class(start: int) -> str:
    """Return the lengths of a class: 0, 1, 2-3, 4-7, ..., 1k-2k."""
    if start < 2:
        return str(start)
    return f"{start}-{2 * start - 1}" if start < 1 << 10 else f"{_power(start)}-{_power(2 * start)}"


def _power(start: int) -> str:
    """Return a power of two in at most four characters: 512, 1k, 512k, 1M."""
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("k", 1 << 10)):
        if start >= size:
            return f"{start // size}{unit}"
    return str(start)


def write_png(path: Path, data: DataCounts) -> None:
    """Draw both plots into a PNG file; raise UserError if matplotlib is missing or it cannot be written."""
    dropped = _top(data.dropped)
    heights = [3.6, *([1.0 + 0.3 * len(dropped)] if dropped else [])]
    figure = new_figure(9, sum(heights))
    plots = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    _draw_lengths(plots[0], data)
    if dropped:
        _draw_dropped(plots[1], dropped)
    write_picture(path, figure, data.name)


def _draw_lengths(axes: Any, data: DataCounts) -> None:
    style_axes(axes, data.name, data.subtitle)
    places = range(len(data.lengths))
    axes.bar(places, list(data.lengths.values()), width=0.85, color=_BLUE)
    axes.set_xticks(places, [_power(start) for start in data.lengths])
    axes.set_xlabel("length [tokens], from this to less than the next", color=INK)
    axes.set_ylabel("documents", color=INK)
    axes.yaxis.set_major_formatter(lambda number, _: count(number))


def _draw_dropped(axes: Any, dropped: Mapping[str, int]) -> None:
    numbers: Sequence[int] = list(dropped.values())
    places = range(len(dropped))
    axes.barh(places, numbers, height=0.7, color=_ORANGE)
    axes.set_yticks(places, [escape_label(reason)[:_LONGEST_REASON] for reason in dropped])
    axes.invert_yaxis()
    for place, number in zip(places, numbers, strict=True):
        axes.annotate(
            f"{number:,}", (number, place), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=9, color=INK,
        )  # fmt: skip
    axes.set_title("documents dropped, by reason", loc="left", fontsize=11, color=INK)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9.5)
    axes.set_xticks([])
    axes.margins(x=0.12)
