"""The loss curves of a run, drawn in characters for a terminal and as a PNG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.monitor.curves import Curves, evenly, finite_points, outline, smooth
from launcher.monitor.summary import RunSummary
from launcher.ui import formatting
from launcher.ui.plotting import (
    FAINT,
    INK,
    as_label,
    missing_plot_extra,
    new_figure,
    rendered,
    style_axes,
    write_picture,
)

_HEIGHT = 20
_NARROWEST, _WIDEST = 40, 110
_BLUE, _ORANGE, _GREY = (74, 144, 226), (240, 140, 40), (150, 150, 150)
_GREEN = (80, 170, 90)

Points = Sequence[tuple[int, float]]


def evaluated_losses(summary: RunSummary) -> list[tuple[int, float]]:
    """Return the held-out losses of the checkpoints that were evaluated, by their steps."""
    return [(item.step, item.loss) for item in summary.evaluations if item.loss is not None]


def draw(curves: Curves, evaluated: Points, width: int, *, coloured: bool) -> str:
    """Draw the losses of a run, with a legend above.

    Parameters
    ----------
    evaluated
        The losses of evaluated checkpoints by their steps.
    width
        The columns of the terminal; the plot fills them within readable limits.

    Raises
    ------
    UserError
        If plotext is missing.
    """
    try:
        import plotext
    except ImportError as error:
        raise missing_plot_extra(error) from error
    width = min(max(width, _NARROWEST), _WIDEST)
    steps, losses = finite_points(curves.steps, curves.losses)
    # Twice as many points as columns: a braille character has two.
    drawn = evenly(len(steps), 2 * width)
    train = list(zip([steps[index] for index in drawn], smooth(losses, at=drawn), strict=True))
    steps, losses = finite_points(curves.validation.steps, curves.validation.columns[0])
    held_out = [(steps[index], losses[index]) for index in evenly(len(steps), width // 3)]
    plotext.terminal.limit(False, False)  # a pipe has no size
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, _HEIGHT)
    figure.theme("colorless")
    figure.canvas("default")
    for axis, side in (("x", "upper"), ("y", "right")):
        figure.axes(False, axis=axis, side=side)
    shown = [evaluated[index] for index in evenly(len(evaluated), width // 3)]
    _set_ticks(figure, [*train, *held_out, *shown], curves.entropy)
    if curves.entropy is not None:
        figure.line(curves.entropy, pixel=plotext.pixel(_GREY), style="dotted")
    for points, symbol, pixel in (
        (train, "braille", _BLUE),
        (held_out, "●", _ORANGE),
        (shown, "◆", _GREEN),
    ):
        if points:
            marker = plotext.marker(symbol, plotext.pixel(pixel))
            signal = figure.signal([step for step, _ in points], [loss for _, loss in points], marker=marker)
            figure.draw(signal.lines() if symbol == "braille" else signal)
    lines = str(figure.build().string(colorless=not coloured)).rstrip("\n").split("\n")
    return "\n".join([_legend(curves, bool(shown), coloured), *(line.rstrip() for line in lines)])


def _legend(curves: Curves, has_evaluations: bool, coloured: bool) -> str:
    """Return the legend, which stands above the plot: within it, it would hide a part of the curves."""
    entries = [("⠤⠤", _BLUE, "train loss")]
    if curves.validation:
        entries.append(("●", _ORANGE, "held-out loss"))
    if has_evaluations:
        entries.append(("◆", _GREEN, "evaluated"))
    if curves.entropy is not None:
        entries.append(("┈┈", _GREY, f"unigram entropy {formatting.loss(curves.entropy)}"))
    parts = [f"{_paint(symbol, colour) if coloured else symbol} {name}" for symbol, colour, name in entries]
    return "  loss [nats per token] by step:  " + "   ".join(parts)


def _paint(text: str, colour: tuple[int, int, int]) -> str:
    return f"\x1b[38;2;{colour[0]};{colour[1]};{colour[2]}m{text}\x1b[0m"


def _set_ticks(figure: object, points: Points, entropy: float | None) -> None:
    steps = [step for step, _ in points] or [0]
    losses = [loss for _, loss in points] + ([entropy] if entropy is not None else [])
    for axis, values, most in (("x", [0, *steps], 8), ("y", losses or [0.0], 6)):
        low, high = (float(f(values)) for f in (min, max))
        at = ticks(low, high, most)
        ruler = figure.ruler(axis)  # type: ignore[attr-defined]
        ruler.lim(min(low, high - 1e-9), high)
        ruler.ticks(at, [f"{tick:g}" for tick in at])


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` round numbers within a range: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most - 1)
    return [round(step * index, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


TRAIN = "#2f6db5"
HELD_OUT = "#e07b1a"
ENTROPY = "#5c6670"
EVALUATED = "#3d8b50"
# The columns of pixels of a curve at most: the picture is a little wider.
_COLUMNS = 1400


def write_png(path: Path, summary: RunSummary, curves: Curves) -> None:
    """Draw the losses of a run into a PNG file, replacing an older one at once.

    Raises
    ------
    UserError
        If matplotlib is missing or the file cannot be written.
    """
    figure = new_figure(9, 5.2)
    axes: Any = figure.add_subplot()
    _draw_train(axes, curves)
    _draw_held_out(axes, curves)
    _draw_evaluated(axes, evaluated_losses(summary))
    _draw_entropy(axes, curves)
    _draw_resumes(axes, curves.resumed)
    _label(axes, summary)
    write_picture(path, rendered(figure, summary.run))


def _draw_train(axes: Any, curves: Curves) -> None:
    steps, losses = finite_points(curves.steps, curves.losses)
    _line(axes, steps, losses, outline(steps, losses, _COLUMNS), color=TRAIN, alpha=0.3, linewidth=1)
    drawn = evenly(len(steps), 4 * _COLUMNS)
    smoothed = smooth(losses, at=drawn)
    axes.plot([steps[index] for index in drawn], smoothed, color=TRAIN, linewidth=2, label="train loss")


def _line(
    axes: Any, steps: Sequence[int], values: Sequence[float], drawn: Sequence[int], **style: Any
) -> None:
    axes.plot([steps[index] for index in drawn], [values[index] for index in drawn], **style)


def _draw_held_out(axes: Any, curves: Curves) -> None:
    steps, losses = finite_points(curves.validation.steps, curves.validation.columns[0])
    if not steps:
        return
    style = {"linewidth": 2, "marker": "o" if len(steps) <= 60 else None, "markersize": 5}
    drawn = outline(steps, losses, _COLUMNS)
    _line(axes, steps, losses, drawn, color=HELD_OUT, label="held-out loss", **style)
    axes.annotate(
        f"{losses[-1]:.2f}", (steps[-1], losses[-1]), xytext=(7, 0), textcoords="offset points",
        color=HELD_OUT, fontweight="bold", va="center", annotation_clip=False,
    )  # fmt: skip


def _draw_evaluated(axes: Any, evaluated: Points) -> None:
    if evaluated:
        steps, losses = zip(*evaluated, strict=True)
        axes.plot(steps, losses, color=EVALUATED, marker="D", markersize=5, linewidth=1, label="evaluated")


def _draw_entropy(axes: Any, curves: Curves) -> None:
    if curves.held_out is None or curves.entropy is None:
        return
    label = as_label(f"unigram entropy of the {curves.held_out.name} ({curves.entropy:.2f})")
    axes.axhline(curves.entropy, color=ENTROPY, linewidth=1.5, linestyle=(0, (5, 3)), label=label, zorder=1)


def _draw_resumes(axes: Any, steps: Sequence[int]) -> None:
    for index, step in enumerate(steps[at] for at in evenly(len(steps), _COLUMNS)):
        label = "resumed from a checkpoint" if index == 0 else None
        axes.axvline(step, color=FAINT, linewidth=1, linestyle=":", label=label, zorder=0)


def _label(axes: Any, summary: RunSummary) -> None:
    style_axes(axes, summary.run, subtitle(summary))
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss [nats per token]", color=INK)
    axes.margins(x=0.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)


def subtitle(summary: RunSummary) -> str:
    """Return the model's size, the job's size, the layout and the throughput in one line."""
    parts = [
        f"{formatting.count(summary.parameters)} parameters" if summary.parameters else "",
        formatting.tasks(summary.nodes, summary.tasks_per_node),
        summary.layout if summary.layout != formatting.UNKNOWN else "",
        f"{formatting.count(summary.tokens)} tokens" if summary.tokens else "",
        f"{formatting.count(summary.tokens_per_second)} tokens/s" if summary.tokens_per_second else "",
    ]
    return "  ·  ".join(part for part in parts if part)
