"""Curves of loss and gradient norm with labels: real trainings, those with injected faults, synthetic ones.

Nothing here depends on the detectors. The same seed makes the same curves.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded.json.gz")


@dataclass(frozen=True)
class Curve:
    """The losses and gradient norms of a training, one a step from step 1 on.

    Attributes
    ----------
    family
        Its row in the table.
    onset
        Index of the first faulty step; ``None`` for a healthy training.
    end
        Index after the last faulty step; the length if it does not recover.
    is_divergence
        The fault is a real divergence: a training of ours whose loss rose and stayed.
    """

    name: str
    family: str
    loss: list[float]
    grad_norm: list[float]
    onset: int | None = None
    end: int = 0
    is_divergence: bool = False

    @property
    def healthy_steps(self) -> int:
        return len(self.loss) - (self.end - self.onset if self.onset is not None else 0)


Maker = Callable[[str, int, random.Random], Curve]


def make_curves(seed: int = 45, length: int = 4000, count: int = 200) -> list[Curve]:
    """Return the curves; synthetic ones have `length` steps, healthy ones four times as many."""
    source = random.Random(seed)
    curves = read_recorded()
    curves += inject_faults([curve for curve in curves if curve.onset is None], count // 5, source)
    makers = (*HEALTHY, *FAULTY)
    while len(curves) < count:
        family, maker = makers[len(curves) % len(makers)]
        curves.append(maker(family, 4 * length if (family, maker) in HEALTHY else length, source))
    return curves


def split(curves: Sequence[Curve]) -> tuple[list[Curve], list[Curve]]:
    """Return the curves to tune on, and those to report on: every second of each family."""
    families: dict[str, list[Curve]] = {}
    for curve in curves:
        families.setdefault(curve.family, []).append(curve)
    return (
        [curve for family in families.values() for curve in family[::2]],
        [curve for family in families.values() for curve in family[1::2]],
    )


# --- real trainings


def read_recorded() -> list[Curve]:
    """Return the recorded trainings, with their labels."""
    return [label(row) for row in json.loads(gzip.decompress(RECORDED.read_bytes()))]


def label(row: dict[str, Any]) -> Curve:
    """Label a recorded training by its fault and by the course of its loss."""
    kind, loss, at = row["kind"], row["loss"], row["at"]
    curve = Curve(row["name"], f"real, {kind}", loss, row["grad_norm"])
    if kind == "healthy":
        return curve
    if kind in ("ramp", "jump"):
        return replace(curve, onset=find_onset(loss, at), end=len(loss), is_divergence=True)
    return replace(curve, onset=at, end=find_return(loss, at, at + row["length"]))


def find_onset(loss: Sequence[float], at: int) -> int:
    """Return the index from which on a loss is above its range before `at` for good.

    In hindsight: a median of five steps above nine tenths of the 60 losses before `at` is out of the range.
    """
    inside = [index for index in range(at, len(loss)) if _is_inside(loss, at, index)]
    if not loss or (inside and inside[-1] > len(loss) - 10):
        raise ValueError("the loss has not left its range for good: this training does not diverge")
    return inside[-1] + 1 if inside else at


def find_return(loss: Sequence[float], at: int, after: int) -> int:
    """Return the index, from `after` on, at which a loss is back in its range; the length if it is not."""
    return next((index for index in range(after, len(loss)) if _is_inside(loss, at, index)), len(loss))


def _is_inside(loss: Sequence[float], at: int, index: int) -> bool:
    return statistics.median(loss[max(index - 2, 0) : index + 3]) <= sorted(loss[at - 60 : at])[54]


# --- faults injected into real trainings


def inject_faults(healthy: Sequence[Curve], count: int, source: random.Random) -> Iterator[Curve]:
    """Yield healthy trainings with a fault in each."""
    for number in range(count):
        curve, fault = healthy[number % len(healthy)], list(FAULTS)[number % len(FAULTS)]
        onset = source.randrange(120, 240)
        yield FAULTS[fault](
            replace(curve, name=f"{curve.name} + {fault} {number}", family="injected"), onset, source
        )


def add_spike(curve: Curve, onset: int, source: random.Random) -> Curve:
    """Add a spike that goes by: the gradient's norm rises some steps earlier."""
    height, decay = source.uniform(0.5, 3), source.uniform(4, 30)
    lead, rise = source.randrange(0, 6), source.uniform(3, 20)
    length = max(int(decay * math.log(height / 0.1)), 5)
    loss, norm = list(curve.loss), list(curve.grad_norm)
    for i in range(onset, min(onset + length, len(loss))):
        loss[i] += height * math.exp(-(i - onset) / decay)
    for i in range(onset - lead, min(onset + length, len(loss))):
        norm[i] *= 1 + rise * math.exp(-abs(i - onset) / decay)
    return replace(curve, loss=loss, grad_norm=norm, onset=onset - lead, end=min(onset + length, len(loss)))


def add_divergence(curve: Curve, onset: int, source: random.Random) -> Curve:
    """Let the loss grow ever faster, to a plateau, after the norm of the gradient has begun to grow."""
    top, pace, lead = source.uniform(1.5, 6), source.uniform(3, 15), source.randrange(2, 15)
    loss, norm = list(curve.loss), list(curve.grad_norm)
    for i in range(onset - lead, len(loss)):
        loss[i] += min(0.1 * math.expm1(min(max(i - onset, 0) / pace, 9)), top)
        norm[i] *= math.exp(min((i - onset + lead) / pace, 4))
    return replace(curve, loss=loss, grad_norm=norm, onset=onset - lead, end=len(loss))


def add_slow_divergence(curve: Curve, onset: int, source: random.Random) -> Curve:
    """Let the loss rise on a straight line, by one to three in 150 to 400 steps; the norm grows along."""
    slope = source.uniform(1, 3) / source.uniform(150, 400)
    loss, norm = list(curve.loss), list(curve.grad_norm)
    for i in range(onset, len(loss)):
        loss[i] += min(slope * (i - onset), 4)
        norm[i] *= 1 + 0.01 * min(i - onset, 300)
    return replace(curve, loss=loss, grad_norm=norm, onset=onset, end=len(loss))


def add_jump(curve: Curve, onset: int, source: random.Random) -> Curve:
    """Throw the model back within a step, as a broken update or data does; it learns anew, slowly."""
    height = source.uniform(0.8, 4)
    loss, norm = list(curve.loss), list(curve.grad_norm)
    for i in range(onset, len(loss)):
        loss[i] += height * math.exp(-(i - onset) / 600)
        norm[i] *= 1 + 4 * math.exp(-(i - onset) / 20)
    return replace(curve, loss=loss, grad_norm=norm, onset=onset, end=len(loss))


def add_nan(curve: Curve, onset: int, source: random.Random) -> Curve:
    """Let loss and gradient be NaN from a step on."""
    rest = [math.nan] * (len(curve.loss) - onset)
    loss, norm = curve.loss[:onset] + rest, curve.grad_norm[:onset] + rest
    return replace(curve, loss=loss, grad_norm=norm, onset=onset, end=len(loss))


FAULTS: dict[str, Callable[[Curve, int, random.Random], Curve]] = {
    "spike": add_spike,
    "divergence": add_divergence,
    "slow divergence": add_slow_divergence,
    "jump": add_jump,
    "nan": add_nan,
}

# --- synthetic trainings


def make_healthy(
    family: str, length: int, source: random.Random, wild: bool = False, change: float = 0.0
) -> Curve:
    """Make a training that learns by a power law, with noise.

    Parameters
    ----------
    wild
        A twentieth of the noise is drawn from Student's distribution with three degrees of freedom, batches
        come that the model finds hard (one or two steps with a loss of up to 1 more and up to ten times the
        norm), and there are stretches in which all noise is twice as large.
    change
        Largest change of the loss where the data change, which they do every two thousand steps or so.
    """
    floor, power = source.uniform(1.8, 3), source.uniform(0.25, 0.5)
    noise, spread = source.uniform(0.005, 0.05), source.uniform(0.05, 0.25)
    correlation, drift = source.choice((0.0, 0.0, 0.6)), source.uniform(-0.3, 0.7)
    loss, norm = [], []
    level = previous = 0.0
    restless = hard = 0
    height = 0.0
    for step in range(length):
        if change and source.random() < 0.0005:
            level += source.uniform(-change, change)
        draw, swing = source.gauss(0, 1), source.gauss(0, 1)
        if wild:
            if source.random() < 0.05:
                draw, swing = _draw_student(source), _draw_student(source)
            restless = source.randrange(10, 60) if source.random() < 0.002 else restless - 1
            if source.random() < 0.0005:
                hard, height = source.randrange(1, 3), source.uniform(0.1, 1)
            draw, swing = (draw * 2, swing * 2) if restless > 0 else (draw, swing)
        scale = 1 + 4 / (1 + step / 100)  # the first steps are noisy
        previous = correlation * previous + math.sqrt(1 - correlation**2) * draw
        extra = height if hard > 0 else 0.0
        loss.append(floor + level + 8 * (1 + step / 20) ** -power + noise * scale * previous + extra)
        warm = 1 + 5 * math.exp(-step / 50) + math.exp(-(((step - 100) / 40) ** 2))
        norm.append(warm * (1 + 10 * extra) * math.exp(drift * step / length + spread * swing))
        hard -= 1
    return Curve(f"{family} {source.random():.6f}", family, loss, norm)


def _draw_student(source: random.Random) -> float:
    """Draw from Student's distribution with three degrees of freedom, cut off at ten."""
    return max(min(source.gauss(0, 1) / math.sqrt(source.gammavariate(1.5, 2) / 3), 10), -10)


def _faulty(fault: str) -> Maker:
    def make(family: str, length: int, source: random.Random) -> Curve:
        curve = make_healthy(family, length, source, source.random() < 0.5, source.choice((0.0, 0.1)))
        return FAULTS[fault](curve, source.randrange(length // 4, length - 600), source)

    return make


HEALTHY: tuple[tuple[str, Maker], ...] = (
    ("healthy, Gaussian", make_healthy),
    ("healthy, wild", partial(make_healthy, wild=True)),
    ("healthy, data change", partial(make_healthy, wild=True, change=0.1)),
)
FAULTY: tuple[tuple[str, Maker], ...] = tuple((f"synthetic, {fault}", _faulty(fault)) for fault in FAULTS)
