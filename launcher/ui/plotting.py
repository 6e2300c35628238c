"""Pictures as files: matplotlib is asked for late, and an older picture is replaced at once."""

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
# So many characters of a title, and of the line below it, fit over the narrowest figure at their own size.
_TITLE, _SUBTITLE = 56, 110


def missing_plot_extra(error: ImportError) -> UserError:
    """Name what to install for plots."""
    told = f"plots need {error.name}, which is not installed"
    return UserError(told, hint="pip install matplotlib plotext")


def new_figure(width: float, height: float) -> Any:
    """An empty figure, its size in inches.

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
    """Return text as matplotlib draws it letter by letter: between dollars it would read a formula."""
    return one_line(text).replace("$", r"\$")


def dress(axes: Any, title: str, subtitle: str) -> None:
    """The title, and axes that stay behind what they measure."""
    title, subtitle = as_label(title), as_label(subtitle)
    large, small = _fitting(title, 15, _TITLE), _fitting(subtitle, 9.5, _SUBTITLE)
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


def _fitting(text: str, size: float, most: int) -> float:
    """The size of the font with which a long line ends within the figure."""
    return size * min(1.0, most / max(len(text), 1))


def rendered(figure: Any, title: str, suffix: str = "png") -> bytes:
    """The bytes of a figure as a png, svg or pdf."""
    content = BytesIO()
    with warnings.catch_warnings():
        # A letter that no font has is drawn as a box, which says as much.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(content, format=suffix, metadata={"Title": one_line(title)})
    return content.getvalue()


def write_picture(path: Path, content: bytes) -> None:
    """Write a picture, replacing an older one at once.

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
