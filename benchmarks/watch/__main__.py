"""The latency of the detectors of a loss and their false alarms, beside the rules of others.

    python -m benchmarks.watch [--half tune|report] [--misses] [--figure FILE.svg]

The detectors' parameters were chosen on one half of the curves; the table is of the other half. Latency is in
steps from the label's first faulty step to the first alarm. An alarm up to 50 steps ahead of a real
divergence belongs to it: its label is where the loss leaves its range for good, and the gradient is earlier.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.watch.curves import Curve, make_curves, split
from benchmarks.watch.rules import RULES, Alarms, find_ours, merge

# Steps before a real divergence at which an alarm is right, and after a fault at which one is not wrong.
AHEAD, AFTER = 50, 20


@dataclass
class Score:
    """The alarms of a rule on some curves."""

    steps: int = 0
    false: int = 0
    latencies: list[int] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def add(self, curve: Curve, alarms: Alarms) -> None:
        """Count the alarms on a curve: the first one in its fault, and all outside."""
        self.steps += curve.healthy_steps
        if curve.onset is None:
            self.false += len(alarms)
            return
        begin = curve.onset - (AHEAD if curve.is_divergence else 0)
        self.false += sum(not begin <= index < curve.end + AFTER for index in alarms)
        first = next((index for index in alarms if begin <= index < curve.end), None)
        if first is None:
            self.missed.append(curve.name)
        else:
            self.latencies.append(first - curve.onset)

    @property
    def faults(self) -> int:
        return len(self.latencies) + len(self.missed)

    @property
    def latency(self) -> float:
        """The median over the faults that were seen."""
        return statistics.median(self.latencies) if self.latencies else math.nan

    @property
    def false_rate(self) -> float:
        """False alarms per 100,000 healthy steps."""
        return 1e5 * self.false / self.steps


def score(curves: Iterable[Curve], find: dict[str, Alarms]) -> Score:
    """Return the score of alarms by the names of their curves."""
    result = Score()
    for curve in curves:
        result.add(curve, find[curve.name])
    return result


def find_leads(curves: Iterable[Curve], ours: dict[str, dict[str, Alarms]]) -> dict[str, int]:
    """Return by how many steps the gradient's alarm came ahead of the loss's in each real divergence."""
    leads = {}
    for curve in curves:
        if curve.is_divergence and curve.onset is not None:
            begin = curve.onset - AHEAD
            alarms = ours[curve.name]
            norm, loss = (
                min((index for index in alarms[name] if index >= begin), default=len(curve.loss))
                for name in ("grad_norm_spike", "loss_spike")
            )
            leads[curve.name] = loss - norm
    return leads


def report(curves: Sequence[Curve], misses: bool) -> None:
    """Print the tables."""
    began = time.process_time()
    ours = {curve.name: find_ours(curve) for curve in curves}
    seconds = time.process_time() - began
    columns = {"Slipway": {name: merge(alarms) for name, alarms in ours.items()}}
    for name in ("loss_spike", "grad_norm_spike"):
        columns[name] = {curve: alarms[name] for curve, alarms in ours.items()}
    for rule, find in RULES.items():
        if rule not in columns:
            columns[rule] = {curve.name: find(curve) for curve in curves}
    print(f"{'':28}" + "".join(f"{rule:>26}" for rule in columns))
    print(f"{'curves':22}{'':6}" + f"{'seen  latency  false/1e5':>26}" * len(columns))
    for family in [*dict.fromkeys(curve.family for curve in curves), "all"]:
        rows = [curve for curve in curves if family in (curve.family, "all")]
        cells = [format_score(score(rows, alarms)) for alarms in columns.values()]
        print(f"{family:24}{len(rows):>4}" + "".join(f"{cell:>26}" for cell in cells))
    leads = find_leads(curves, ours)
    ahead = sum(lead > 0 for lead in leads.values())
    print(
        f"\nThe gradient's norm is ahead of the loss in {ahead} of {len(leads)} real divergences, "
        f"by {statistics.median(leads.values()):g} steps in the median."
    )
    steps = sum(len(curve.loss) for curve in curves)
    print(f"{1e6 * seconds / steps:.0f} us of CPU a step, with three readings after each of {steps:,} steps.")
    if misses:
        total = score(curves, columns["Slipway"])
        print("missed:", ", ".join(total.missed) or "none")
        print("leads:", ", ".join(f"{name} {lead}" for name, lead in leads.items()))


def format_score(result: Score) -> str:
    """Return seen of all faults, their median latency, and the rate of false alarms."""
    seen = f"{len(result.latencies)}/{result.faults}" if result.faults else "-"
    latency = f"{result.latency:g}" if result.latencies else "-"
    return f"{seen:>6}{latency:>9}{result.false_rate:>11.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--half", choices=("tune", "report", "both"), default="report", help="of the curves")
    parser.add_argument("--misses", action="store_true", help="name the faults that were not seen")
    parser.add_argument("--figure", type=Path, help="draw some curves with the alarms, as SVG")
    arguments = parser.parse_args()
    curves = make_curves()
    tune, rest = split(curves)
    report({"tune": tune, "report": rest, "both": curves}[arguments.half], arguments.misses)
    if arguments.figure:
        from benchmarks.watch.figure import draw

        draw(curves, arguments.figure)


if __name__ == "__main__":
    main()
