"""The curves of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.monitor import formatting
from launcher.monitor.curves import Curves, evenly, finite_points, outline, smooth
from launcher.monitor.pictures import FAINT, INK, as_label, dress, new_figure, rendered, write_picture
from launcher.monitor.summary import Summary

TRAIN = "#2f6db5"
HELD_OUT = "#e07b1a"
ENTROPY = "#5c6670"
# Of pixels, that a curve has at most: the picture is a little wider.
_COLUMNS = 1400


def write_png(path: Path, summary: Summary, curves: Curves) -> None:
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


def _draw_entropy(axes: Any, curves: Curves) -> None:
    if curves.held_out is None or curves.entropy is None:
        return
    label = as_label(f"unigram entropy of the {curves.held_out.name} ({curves.entropy:.2f})")
    axes.axhline(curves.entropy, color=ENTROPY, linewidth=1.5, linestyle=(0, (5, 3)), label=label, zorder=1)


def _draw_resumes(axes: Any, steps: Sequence[int]) -> None:
    for index, step in enumerate(steps[at] for at in evenly(len(steps), _COLUMNS)):
        label = "resumed from a checkpoint" if index == 0 else None
        axes.axvline(step, color=FAINT, linewidth=1, linestyle=":", label=label, zorder=0)


def _label(axes: Any, summary: Summary) -> None:
    dress(axes, summary.run, subtitle(summary))
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss [nats per token]", color=INK)
    axes.margins(x=0.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)


def subtitle(summary: Summary) -> str:
    """What was trained, on what, in one line."""
    parts = [
        f"{formatting.count(summary.parameters)} parameters" if summary.parameters else "",
        formatting.tasks(summary.nodes, summary.tasks_per_node),
        summary.layout if summary.layout != formatting.UNKNOWN else "",
        f"{formatting.count(summary.tokens)} tokens" if summary.tokens else "",
        f"{formatting.count(summary.tokens_per_second)} tokens/s" if summary.tokens_per_second else "",
    ]
    return "  ·  ".join(part for part in parts if part)
