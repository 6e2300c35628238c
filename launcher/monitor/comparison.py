"""The losses of several runs in one plot, the run with the best held-out loss first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import UserError, escape
from launcher.monitor.curves import Curves, choose_evenly, keep_finite, smooth
from launcher.monitor.summary import RunSummary, Series, draw_series, held_out_points, summarize, train_points
from launcher.ui import tables
from launcher.ui.plotting import FAINT, INK, escape_label, new_figure, style_axes, write_picture
from launcher.ui.terminal import print_message

Runs = Sequence[tuple[RunSummary, Curves]]

COLUMNS = ("RUN", "STATE", "STEP", "LOSS", "VAL LOSS", "TOKENS/S", "WALL TIME")
# Those of the best runs; the others are grey, and not in the legend.
_COLOURS = ("#4a90e2", "#f08c28", "#50aa5a", "#c94f7c", "#8e6fd1", "#2aa5a0", "#a07a3c", "#d9534f")
_OTHERS = "#b4b9be"
_POINTS = 5600  # of a curve in a picture


def gather(run_dirs: Sequence[Path]) -> Runs:
    """Return the runs that have steps, the best first; raise UserError if none has."""
    runs, missing = [], []
    for run_dir in run_dirs:
        try:
            runs.append(summarize(run_dir))
        except UserError as error:
            missing.append(error)
    if not runs:
        raise missing[0]
    for without in missing:
        print_message(escape(without.message))
    return sorted(runs, key=lambda run: _goodness(run[0]))


def _goodness(summary: RunSummary) -> tuple[bool, float]:
    loss = summary.last_held_out_loss if summary.last_held_out_loss is not None else summary.last_loss
    return loss is None or not math.isfinite(loss), loss or 0.0


def cells(summary: RunSummary) -> list[str]:
    """Return the values of `COLUMNS` for a run."""
    steps, speed = tables.steps(summary.step, summary.max_steps), tables.count(summary.tokens_per_second)
    losses = [tables.loss(summary.last_loss), tables.loss(summary.last_held_out_loss)]
    return [escape(summary.run), summary.state, steps, *losses, speed, tables.duration(summary.seconds)]


def _assign_styles(runs: Runs) -> list[tuple[str | None, str, Curves]]:
    """Return the name for the legend, the colour and the curves of each run."""
    styles = [*_COLOURS, *[_OTHERS] * len(runs)]
    return [
        (summary.run if colour != _OTHERS else None, colour, curves)
        for (summary, curves), colour in zip(runs, styles, strict=False)
    ]


def draw(runs: Runs, width: int, *, coloured: bool) -> str:
    """Draw the losses of runs in characters: lines in training, and symbols on held-out data."""
    series = []
    for name, colour, curves in _assign_styles(runs):
        red, green, blue = bytes.fromhex(colour[1:])
        series.append(Series(name and escape(name), train_points(curves, width), (red, green, blue)))
        series.append(Series(None, held_out_points(curves, width), (red, green, blue), "●"))
    return draw_series(series, None, width, coloured=coloured)


def write_png(path: Path, runs: Runs) -> None:
    """Draw the losses of runs into a PNG file: lines in training, and points on held-out data."""
    figure = new_figure(9, 5.2)
    axes: Any = figure.add_subplot()
    for name, colour, curves in _assign_styles(runs):
        steps, losses = keep_finite(curves.steps, curves.losses)
        drawn = choose_evenly(len(steps), _POINTS)
        style = {"color": colour, "label": name and escape_label(name), "zorder": 2 + (name is not None)}
        axes.plot([steps[index] for index in drawn], smooth(losses, at=drawn), linewidth=1.5, **style)
        steps, losses = keep_finite(curves.validation.steps, curves.validation.columns[0])
        axes.plot(steps, losses, "o", markersize=4, color=colour)
    axes.plot([], [], "o", markersize=4, color=FAINT, label="held-out loss")
    style_axes(axes, f"{len(runs)} runs", "the best first; lines are the loss in training")
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss [nats per token]", color=INK)
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    write_picture(path, figure, "losses")
