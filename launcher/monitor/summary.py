"""The closing table of a run, and its loss curves in characters for a terminal or as a PNG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import UserError
from launcher.jobs.launches import open_launches
from launcher.jobs.status import poll
from launcher.monitor.curves import Curves, choose_evenly, keep_finite, smooth
from launcher.monitor.evaluations import Evaluation, progress_rows, read_evaluations
from launcher.monitor.provenance_report import encode
from launcher.monitor.readers import all_events
from launcher.monitor.run_status import attributes
from launcher.ui import tables
from launcher.ui.plotting import (
    FAINT,
    INK,
    escape_label,
    missing_plot_extra,
    new_figure,
    style_axes,
    write_picture,
)
from slipway.common.node.events import Start


@dataclass(frozen=True)
class RunSummary:
    """The closing table. Losses and the entropy are in nats per token.

    `world` is the number of tasks; `below_entropy` is True if the last held-out loss is below the unigram
    entropy of the same tokens, that is, if the model learned more than the tokens' frequencies. `entropy_of`
    names these tokens: a T5's are targets, with sentinels. `evaluations` are the results of its checkpoints.
    """

    run: str
    launches: int
    job_id: str | None
    state: str
    reason: str | None
    nodes: int
    tasks_per_node: int
    world: int
    tensor: int | None
    data: int | None
    layout: str
    parameters: int | None
    step: int | None
    max_steps: int | None
    tokens: int | None
    first_loss: float | None
    last_loss: float | None
    first_held_out_loss: float | None
    last_held_out_loss: float | None
    unigram_entropy: float | None
    entropy_of: str
    below_entropy: bool | None
    tokens_per_second: float | None
    seconds: float
    evaluations: Sequence[Evaluation] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the table for programs; a number that is not finite is a string, ``"nan"``."""
        values = asdict(self) | {"evaluations": [evaluation.to_json() for evaluation in self.evaluations]}
        return {key: encode(value) if isinstance(value, float) else value for key, value in values.items()}

    def rows(self) -> list[tuple[str, str]]:
        """Return the table for people: names and values."""
        state = self.state + (f" ({self.reason})" if self.reason else "")
        below = tables.UNKNOWN
        if self.last_held_out_loss is not None and self.unigram_entropy is not None:
            distance = abs(self.unigram_entropy - self.last_held_out_loss)
            below = f"{'yes, by' if self.below_entropy else 'no, above by'} {distance:.4f} nats"
        return [
            ("run", self.run + (f", {self.launches} launches" if self.launches > 1 else "")),
            ("job", tables.text(self.job_id)),
            ("state", state),
            ("tasks", f"{tables.tasks(self.nodes, self.tasks_per_node)} = {self.world}"),
            ("parallel", self.layout),
            ("parameters", tables.count(self.parameters)),
            ("steps", tables.steps(self.step, self.max_steps)),
            ("tokens seen", tables.count(self.tokens)),
            ("train loss", _arrow(self.first_loss, self.last_loss)),
            ("held-out loss", _arrow(self.first_held_out_loss, self.last_held_out_loss)),
            ("unigram entropy", f"{tables.loss(self.unigram_entropy)} nats of the {self.entropy_of}"),
            ("below entropy", below),
            *progress_rows(self.evaluations),
            ("throughput", f"{tables.count(self.tokens_per_second)} tokens/s, mean"),
            ("wall time", tables.duration(self.seconds)),
        ]


def _arrow(first: float | None, last: float | None) -> str:
    return tables.UNKNOWN if last is None else f"{tables.loss(first)} → {tables.loss(last)}"


def summarize(run_dir: Path) -> tuple[RunSummary, Curves]:
    """Return the closing table and the curves of a run; raise UserError before its first step."""
    launches, curves = open_launches(run_dir), Curves()
    for launch in launches:
        curves.add(all_events(launch))
    if not curves.train:
        raise UserError(
            f"{run_dir.name} has no training step yet",
            hint=f"show its state: slipway status {run_dir.name}",
        )
    (current,) = poll(launches[-1:])
    nodes, tasks = launches[-1].nodes, launches[-1].manifest.tasks_per_node
    validations, entropy = curves.validations, curves.entropy
    held_out = validations[-1][1] if validations else None
    summary = RunSummary(
        run=current.run,
        launches=len(launches),
        job_id=current.job_id,
        state=current.state.value,
        reason=current.reason,
        nodes=nodes,
        tasks_per_node=tasks,
        world=nodes * tasks,
        layout=_layout(curves.start),
        step=curves.steps[-1],
        tokens=curves.tokens,
        first_loss=curves.loss(0),
        last_loss=curves.loss(-1),
        first_held_out_loss=validations[0][1] if validations else None,
        last_held_out_loss=held_out,
        unigram_entropy=entropy,
        entropy_of=curves.held_out.name if curves.held_out else "held-out tokens",
        below_entropy=None if held_out is None or entropy is None else held_out < entropy,
        tokens_per_second=curves.tokens_per_second,
        seconds=curves.seconds,
        evaluations=read_evaluations(run_dir, curves.starts),
        **attributes(curves.start, "tensor", "data", "parameters", "max_steps"),
    )
    return summary, curves


def _layout(start: Start | None) -> str:
    """Format the parallel sizes in a trainer's start event: tensor 2 × pipeline 2 × data 4."""
    if start is None or start.tensor is None or start.data is None:
        return tables.UNKNOWN
    between = (("pipeline", start.pipeline), ("virtual", start.virtual), ("context", start.context))
    sizes = [("tensor", start.tensor), *((n, s) for n, s in between if s and s > 1), ("data", start.data)]
    return " × ".join(f"{name} {size}" for name, size in sizes)


# --- the curves

_HEIGHT = 20
_NARROWEST, _WIDEST = 40, 110
_BLUE, _ORANGE, _GREY = (74, 144, 226), (240, 140, 40), (150, 150, 150)
_GREEN, _RED = (80, 170, 90), (214, 69, 65)

Points = Sequence[tuple[int, float]]


def evaluated_losses(summary: RunSummary) -> list[tuple[int, float]]:
    """Return the held-out losses of the checkpoints that were evaluated, by their steps."""
    current = (item for item in summary.evaluations if not item.is_abandoned)
    return [(item.step, item.loss) for item in current if item.loss is not None]


class Series(NamedTuple):
    """Points of a plot: a line of braille, or symbols. The legend has those with a name."""

    name: str | None
    points: Points
    colour: tuple[int, int, int]
    symbol: str = "braille"


def draw(curves: Curves, evaluated: Points, width: int, *, coloured: bool) -> str:
    """Draw the losses of a run, with a legend above; raise UserError if plotext is missing."""
    width = min(max(width, _NARROWEST), _WIDEST)
    train, held_out = train_points(curves, width), held_out_points(curves, width)
    shown = [evaluated[index] for index in choose_evenly(len(evaluated), width // 3)]
    series = [
        Series("train loss", train, _BLUE),
        Series("held-out loss", held_out, _ORANGE, "●"),
        Series("evaluated", shown, _GREEN, "◆"),
        Series("spike", curves.spikes, _RED, "▲"),
    ]
    return draw_series(series, curves.entropy, width, coloured=coloured)


def train_points(curves: Curves, width: int) -> Points:
    """Return the smoothed training loss, twice as many points as columns: a braille character has two."""
    steps, losses = keep_finite(curves.steps, curves.losses)
    drawn = choose_evenly(len(steps), 2 * width)
    return list(zip([steps[index] for index in drawn], smooth(losses, at=drawn), strict=True))


def held_out_points(curves: Curves, width: int) -> Points:
    """Return the held-out loss, a point for each three columns at most."""
    steps, losses = keep_finite(curves.validation.steps, curves.validation.columns[0])
    return [(steps[index], losses[index]) for index in choose_evenly(len(steps), width // 3)]


def draw_series(series: Sequence[Series], entropy: float | None, width: int, *, coloured: bool) -> str:
    """Draw series of losses, with a legend above; raise UserError if plotext is missing."""
    try:
        import plotext
    except ImportError as error:
        raise missing_plot_extra(error) from error
    width = min(max(width, _NARROWEST), _WIDEST)
    plotext.terminal.limit(False, False)  # a pipe has no size
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, _HEIGHT)
    figure.theme("colorless")
    figure.canvas("default")
    for axis, side in (("x", "upper"), ("y", "right")):
        figure.axes(False, axis=axis, side=side)
    series = [item for item in series if item.points]
    _set_ticks(figure, [point for item in series for point in item.points], entropy)
    if entropy is not None:
        figure.line(entropy, pixel=plotext.pixel(_GREY), style="dotted")
    for item in series:
        marker = plotext.marker(item.symbol, plotext.pixel(item.colour))
        signal = figure.signal(*map(list, zip(*item.points, strict=True)), marker=marker)
        figure.draw(signal.lines() if item.symbol == "braille" else signal)
    lines = str(figure.build().string(colorless=not coloured)).rstrip("\n").split("\n")
    return "\n".join([_legend(series, entropy, coloured), *(line.rstrip() for line in lines)])


def _legend(series: Sequence[Series], entropy: float | None, coloured: bool) -> str:
    """Return the legend, printed above the plot: inside, it would hide a part of the curves."""
    entries = [
        ("⠤⠤" if item.symbol == "braille" else item.symbol, item.colour, item.name)
        for item in series
        if item.name is not None
    ]
    if entropy is not None:
        entries.append(("┈┈", _GREY, f"unigram entropy {tables.loss(entropy)}"))
    parts = []
    for symbol, (red, green, blue), name in entries:
        painted = f"\x1b[38;2;{red};{green};{blue}m{symbol}\x1b[0m" if coloured else symbol
        parts.append(f"{painted} {name}")
    return "  loss [nats per token] by step:  " + "   ".join(parts)


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
SPIKE = "#d64541"
# The columns of pixels of a curve at most: the picture is a little wider.
_COLUMNS = 1400


def write_png(path: Path, summary: RunSummary, curves: Curves) -> None:
    """Draw the losses into a PNG file; raise UserError without matplotlib, or if it cannot be written."""
    figure = new_figure(9, 5.2)
    axes: Any = figure.add_subplot()
    steps, losses = keep_finite(curves.steps, curves.losses)
    axes.plot(steps, losses, color=TRAIN, alpha=0.3, linewidth=1)
    drawn = choose_evenly(len(steps), 4 * _COLUMNS)
    means = smooth(losses, at=drawn)
    axes.plot([steps[index] for index in drawn], means, color=TRAIN, linewidth=2, label="train loss")
    if curves.spikes:
        style = {"color": SPIKE, "linestyle": "", "marker": "v", "markersize": 5}
        axes.plot(*zip(*curves.spikes, strict=True), label="spike", **style)
    steps, losses = keep_finite(curves.validation.steps, curves.validation.columns[0])
    if steps:
        marker = "o" if len(steps) <= 60 else None
        style = {"color": HELD_OUT, "linewidth": 2, "marker": marker, "markersize": 5}
        axes.plot(steps, losses, label="held-out loss", **style)
        axes.annotate(
            f"{losses[-1]:.2f}", (steps[-1], losses[-1]), xytext=(7, 0), textcoords="offset points",
            color=HELD_OUT, fontweight="bold", va="center", annotation_clip=False,
        )  # fmt: skip
    if evaluated := evaluated_losses(summary):
        style = {"color": EVALUATED, "linewidth": 1, "marker": "D", "markersize": 5}
        axes.plot(*zip(*evaluated, strict=True), label="evaluated", **style)
    if curves.held_out is not None:
        entropy = curves.held_out.unigram_entropy
        label = escape_label(f"unigram entropy of the {curves.held_out.name} ({entropy:.2f})")
        style = {"color": ENTROPY, "linewidth": 1.5, "linestyle": (0, (5, 3))}
        axes.axhline(entropy, label=label, zorder=1, **style)
    for index, at in enumerate(choose_evenly(len(curves.resumed), _COLUMNS)):
        note = None if index else "resumed from a checkpoint"
        axes.axvline(curves.resumed[at], color=FAINT, linewidth=1, linestyle=":", label=note, zorder=0)
    style_axes(axes, summary.run, subtitle(summary))
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss [nats per token]", color=INK)
    axes.margins(x=0.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    write_picture(path, figure, summary.run)


def subtitle(summary: RunSummary) -> str:
    """Return the model's size, the job's size, the layout and the throughput in one line."""
    parts = [
        f"{tables.count(summary.parameters)} parameters" if summary.parameters else "",
        tables.tasks(summary.nodes, summary.tasks_per_node),
        summary.layout if summary.layout != tables.UNKNOWN else "",
        f"{tables.count(summary.tokens)} tokens" if summary.tokens else "",
        f"{tables.count(summary.tokens_per_second)} tokens/s" if summary.tokens_per_second else "",
    ]
    return "  ·  ".join(part for part in parts if part)
