"""The figure of `docs/watch.md`: four curves, and when each rule alarms."""

from __future__ import annotations

from pathlib import Path

from benchmarks.watch.curves import Curve
from benchmarks.watch.rules import Alarms, find_llm_foundry, find_olmo_core, find_ours

# By family: a title, and steps to show before and after the fault.
_PANELS = {
    "real, ramp": ("A real divergence: the rate grows by 10 % a step from step 181 on", 60, 45),
    "real, jump": ("A real divergence: 30 times the rate from step 181 on", 60, 45),
    "synthetic, spike": ("A spike that goes by", 60, 60),
    "healthy, wild": ("Healthy: hard batches and restless stretches", 0, 1500),
}
_LINES = (
    ("Slipway, gradient", "#0b6e4f", "--"),
    ("Slipway, loss", "#0b6e4f", "-"),
    ("OLMo-core", "#c26a00", ":"),
    ("llm-foundry", "#7a3ea1", "-."),
)


def draw(curves: list[Curve], path: Path) -> None:
    """Write the figure."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    mpl.rcParams.update({"svg.hashsalt": "watch", "font.size": 8, "svg.fonttype": "none"})
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for axes, (family, (title, before, after)) in zip(panels, _PANELS.items(), strict=True):
        curve = next(curve for curve in curves if curve.family == family)
        start = max((curve.onset or 0) - before, 0)
        shown = slice(start, (curve.onset or 0) + after)
        steps = range(start + 1, start + 1 + len(curve.loss[shown]))
        axes.plot(steps, curve.loss[shown], color="#1f4e9c", linewidth=0.8)
        axes.set_title(title, fontsize=8)
        axes.set_ylabel("loss", color="#1f4e9c")
        other = axes.twinx()
        other.plot(steps, curve.grad_norm[shown], color="#999999", linewidth=0.6)
        other.set_yscale("log")
        other.set_ylabel("norm of the gradient", color="#777777")
        if curve.is_divergence:
            axes.set_ylim(top=min(max(curve.loss[shown]), 12))
        for (_, color, style), alarms in zip(_LINES, find_alarms(curve), strict=True):
            for index in alarms:
                if shown.start <= index < shown.stop:
                    axes.axvline(index + 1, color=color, linestyle=style, linewidth=1.2)
    handles = [Line2D([], [], color=color, linestyle=style, label=name) for name, color, style in _LINES]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def find_alarms(curve: Curve) -> list[Alarms]:
    """Return the alarms of each line of the legend."""
    ours = find_ours(curve)
    return [ours["grad_norm_spike"], ours["loss_spike"], find_olmo_core(curve), find_llm_foundry(curve)]
