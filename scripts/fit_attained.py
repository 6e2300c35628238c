"""Fit the constants of the speed model to published step times, and show how far off each row is.

    .venv/bin/python -m scripts.fit_attained [--fit | --layouts]

Of tests/checks/published_steps.json, the rows of the half `calibration` are fitted to, those of the half
`held-out` only shown. Least squares of the logarithm of estimate / published, each series of rows (a model, a
layout, growing numbers of GPUs) weighing as much as one; each constant is drawn to the value that it starts
from, in launcher/attained.json. Without --fit nothing is fitted. --layouts compares each
published layout with the first one that `slipway suggest` has for the same model and GPUs.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launcher.attained import Attained, attained
from tests.checks.published import CALIBRATION, HELD_OUT, LAYOUTS, STEPS, Published, rating

FITTED = (
    "gpus.h100.half",
    "gpus.h100.fp8",
    "gpus.b200.half",
    "gpus.b200.fp8",
    "gpus.gb300.fp8",
    "gpus.a100.half",
    "memory",
    "exposed.tensor",
    "exposed.data",
    "straggling",
    "step",
)
# How much a constant's change weighs beside the error of a series of rows. What a step does once depends on
# data, logging and file systems: it may be several times as long.
_PRIOR = {key: 0.05 if key == "step" else 0.2 for key in FITTED}
_ROUNDS = 40


def changes_of(values: Mapping[str, float]) -> dict[str, Any]:
    """Return dotted keys as the tree that `attained` takes."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def start_of(table: Attained, key: str) -> float:
    """Return a constant by its key."""
    if key.startswith("gpus."):
        _, gpu, name = key.split(".")
        return table.gpus[gpu][name]
    return float(getattr(table, key.replace(".", "_")))


def fit(keys: Sequence[str], rows: Sequence[Published]) -> dict[str, float]:
    """Return the constants that fit best: Gauss-Newton on their logarithms."""
    start = np.log([start_of(attained(), key) for key in keys])
    series = Counter(_series(row) for row in rows)
    prior = np.array([_PRIOR[key] for key in keys])
    weights = np.array([series[_series(row)] ** -0.5 for row in rows])

    def residuals(point: np.ndarray) -> np.ndarray:
        table = attained(changes_of(dict(zip(keys, map(float, np.exp(point)), strict=True))))
        errors = np.log([row.estimate(table) / row.seconds for row in rows])
        return np.concatenate([weights * errors, prior * (point - start)])

    point = start
    for _ in range(_ROUNDS):
        here = residuals(point)
        slopes = [(residuals(point + 1e-4 * unit) - here) / 1e-4 for unit in np.eye(len(keys))]
        point = point - np.linalg.lstsq(np.array(slopes).T, here, rcond=None)[0]
    return {key: float(value) for key, value in zip(keys, np.exp(point), strict=True)}


def show(table: Attained) -> None:
    """Print estimate / published, a line for each series."""
    ratios: dict[tuple[str, ...], list[float]] = {}
    for row in STEPS:
        ratios.setdefault((row.half, *_series(row)), []).append(row.estimate(table) / row.seconds)
    for name, found in ratios.items():
        print(f"{' '.join(name):70}", " ".join(f"{ratio:.3f}" for ratio in found))
    for name, rows in (("calibration", CALIBRATION), ("held out", HELD_OUT)):
        off = sorted(abs(row.estimate(table) / row.seconds - 1) for row in rows)
        above = sum(error > 0.15 for error in off)
        worst = f"median {off[len(off) // 2]:.3f}, worst {off[-1]:.3f}"
        print(f"{name}: {len(off)} rows, {worst}, {above} above 15 %")


def show_layouts() -> None:
    """Print each published layout's step in parts of that of the first suggestion."""
    good = 0
    for row in LAYOUTS:
        rated, first = rating(row)
        good += rated <= 1.05
        print(f"{row!s:76} {rated:.3f}  suggested: {first}")
    print(f"{good} of {len(LAYOUTS)} within 5 %")


def _series(row: Published) -> tuple[str, ...]:
    layout = f"t{row.tensor}p{row.pipeline}v{row.virtual or 1}c{row.context}m{row.micro}"
    # A global batch that grows with the GPUs is the same series; one that does not is another.
    each = row.batch / row.gpus
    return row.source, row.model, row.gpu, row.precision, layout, f"{each:g}"


def main() -> None:
    """Fit, if asked to, and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants first")
    parser.add_argument("--layouts", action="store_true", help="compare layouts with suggested ones")
    args = parser.parse_args()
    if args.layouts:
        show_layouts()
        return
    if not args.fit:
        show(attained())
        return
    fitted = fit(FITTED, CALIBRATION)
    print(json.dumps({key: float(f"{value:.3g}") for key, value in fitted.items()}, indent=2))
    show(attained(changes_of(fitted)))


if __name__ == "__main__":
    main()
