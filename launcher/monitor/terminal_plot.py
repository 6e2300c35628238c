"""The curves of a run in characters, for a terminal or a pipe."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.monitor import formatting
from launcher.monitor.curves import Curves, evenly, finite_points, smooth
from launcher.monitor.pictures import missing_plot_extra

_HEIGHT = 20
_NARROWEST, _WIDEST = 40, 110
_BLUE, _ORANGE, _GREY = (74, 144, 226), (240, 140, 40), (150, 150, 150)

Points = Sequence[tuple[int, float]]


def draw(curves: Curves, width: int, *, coloured: bool) -> str:
    """Draw the losses of a run, with a legend above.

    Parameters
    ----------
    width
        Columns of the terminal; the plot fills them as far as it stays readable.

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
    # Twice as many points as columns: a braille character holds two.
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
    _set_ticks(figure, [*train, *held_out], curves.entropy)
    if curves.entropy is not None:
        figure.line(curves.entropy, pixel=plotext.pixel(_GREY), style="dotted")
    for points, symbol, pixel in ((train, "braille", _BLUE), (held_out, "●", _ORANGE)):
        if points:
            marker = plotext.marker(symbol, plotext.pixel(pixel))
            signal = figure.signal([step for step, _ in points], [loss for _, loss in points], marker=marker)
            figure.draw(signal.lines() if symbol == "braille" else signal)
    lines = str(figure.build().string(colorless=not coloured)).rstrip("\n").split("\n")
    return "\n".join([_legend(curves, coloured), *(line.rstrip() for line in lines)])


def _legend(curves: Curves, coloured: bool) -> str:
    """Name the curves above the plot: inside of it a legend hides a part of them."""
    entries = [("⠤⠤", _BLUE, "train loss")]
    if curves.validation:
        entries.append(("●", _ORANGE, "held-out loss"))
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
    """Round numbers within a range, at most `most` of them: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most - 1)
    return [round(step * index, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
