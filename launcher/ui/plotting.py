"""Plots as files, drawn with matplotlib."""

from __future__ import annotations

import os
import tempfile
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

from launcher.errors import UserError, one_line

INK = "#22272b"
FAINT = "#6f7880"
GRID = "#e6e9ec"
# The characters of a title, and of the line below it, that fit over the narrowest figure at their own size.
_TITLE, _SUBTITLE = 56, 110


def missing_plot_extra(error: ImportError) -> UserError:
    """Return the error for a missing plotting library, with the command that installs it."""
    return UserError(
        f"plots need {error.name}, which is not installed", hint="pip install matplotlib plotext"
    )


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure; its size is in inches.

    Raises
    ------
    UserError
        If matplotlib is missing.
    """
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


def as_label(text: str) -> str:
    """Escape dollars, between which matplotlib would read a formula."""
    return one_line(text).replace("$", r"\$")


def style_axes(axes: Any, title: str, subtitle: str) -> None:
    """Set the title and the colours of the axes."""
    title, subtitle = as_label(title), as_label(subtitle)
    large, small = _fit_font_size(title, 15, _TITLE), _fit_font_size(subtitle, 9.5, _SUBTITLE)
    axes.set_title(title, loc="left", fontsize=large, fontweight="bold", color=INK, pad=24)
    below = axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=small, color=FAINT)
    below.set_in_layout(False)  # a long one may stand above what is beside the axes
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


def rendered(figure: Any, title: str, suffix: str = "png") -> bytes:
    """Return the bytes of a figure as a png, svg or pdf."""
    content = BytesIO()
    with warnings.catch_warnings():
        # A letter that no font has is drawn as a box, which needs no warning.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(content, format=suffix, metadata={"Title": one_line(title)})
    return content.getvalue()


def write_picture(path: Path, content: bytes) -> None:
    """Write a picture, replacing an older one atomically.

    Raises
    ------
    UserError
        If the file cannot be written.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                os.fchmod(stream.fileno(), 0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"cannot write the plot {path}: {error.strerror}") from error
