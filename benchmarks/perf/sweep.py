"""The cost of a sweep's point in one process, next to Hydra's own compose and to our `compose`.

    python benchmarks/perf/sweep.py [--points N]

The ways take turns, some points at a time, so that a noisy machine slows all of them; quote the ratios of the
medians. Before that, some points are compared byte for byte with composing and rendering them alone.
All figures are CPU milliseconds of this process.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hydra import compose as hydra_compose  # noqa: E402
from hydra import initialize_config_dir  # noqa: E402

from launcher.config.compose import (  # noqa: E402
    CONF_DIR,
    BatchComposer,
    Composition,
    compose,
    list_options,
)
from launcher.config.overrides import convert_for_hydra  # noqa: E402
from launcher.config.stored import config_text  # noqa: E402
from launcher.drafting import Draft, Request, drafts  # noqa: E402

T = TypeVar("T")
Point = list[str]
BASE = ["cluster=bcm", "base_results_dir=/nowhere/results"]
TURNS = 10


def values(count: int) -> list[Point]:
    """Return points that differ in values alone, two of which other keys refer to."""
    grid = itertools.product(range(1, 51), (1, 2, 4, 8, 16), (1, 2, 4, 8))
    return [
        [
            f"training.model.optim.lr={rate}e-5",
            f"training.trainer.num_nodes={nodes}",
            f"training.model.tensor_model_parallel_size={tensor}",
            f"training.run.name=sweep_{rate}_{nodes}_{tensor}",
        ]
        for rate, nodes, tensor in itertools.islice(grid, count)
    ]


def added_and_dropped(count: int) -> list[Point]:
    """Return points that hand NeMo a key that the tree does not show, and drop one."""
    return [
        [f"+training.model.new_key={number}", "~training.model.nsys_profile", f"env_vars.N={number}"]
        for number in range(count)
    ]


def groups() -> list[Point]:
    """Return every size on every cluster once, so that no tree is used twice."""
    sizes, clusters = list_options("training"), list_options("cluster")
    return [[f"training={size}", f"cluster={cluster}"] for size in sizes for cluster in clusters]


def scripts(composition: Composition) -> Draft:
    (draft,) = drafts(Request([], [], number=1, tag="tag"), [composition])
    _ = draft.texts
    return draft


def files(composition: Composition) -> tuple[dict[Path, str], str]:
    draft = scripts(composition)
    return draft.texts, config_text(draft.plan.job.config or {})


def compare(points: Sequence[Point]) -> int:
    """Compare some of the points, byte for byte; return how many."""
    sweep, chosen = BatchComposer(BASE), points[:: max(1, len(points) // 20)]
    for point in chosen:
        batched, single = sweep.compose(point), compose([*BASE, *point])
        if batched != single or files(batched) != files(single):
            raise SystemExit(f"{point}: not the same as composed alone")
    return len(chosen)


def hydra_alone(point: Point) -> None:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        hydra_compose("config", overrides=convert_for_hydra([*BASE, *point]))


def milliseconds(work: Callable[[T], object], items: Sequence[T]) -> float:
    start = time.process_time()
    for item in items:
        work(item)
    return (time.process_time() - start) / len(items) * 1000


def measure(points: Sequence[Point]) -> dict[str, float]:
    """Return the median milliseconds per point of each way; the slow ones take a part of the points."""
    sweep = BatchComposer(BASE)
    hydra_alone(points[0])  # warms imports and caches
    slow = max(1, len(points) // TURNS // 20)
    costs: dict[str, list[float]] = {"hydra": [], "compose": [], "many": [], "scripts": []}
    for turn in range(TURNS):
        part = points[turn * len(points) // TURNS : (turn + 1) * len(points) // TURNS]
        compositions: list[Composition] = []
        costs["many"].append(milliseconds(lambda p: compositions.append(sweep.compose(p)), part))  # noqa: B023
        costs["scripts"].append(milliseconds(scripts, compositions))
        costs["hydra"].append(milliseconds(hydra_alone, part[:slow]))
        costs["compose"].append(milliseconds(lambda p: compose([*BASE, *p]), part[:slow]))
    return {way: statistics.median(parts) for way, parts in costs.items()}


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--points", type=int, default=1000, help="points of each sweep (default: 1000)")
    count = parser.parse_args().points

    # The last: every tree is there already, as where few choices meet many values.
    sizes = groups()
    again = [[*sizes[index % 8], f"training.trainer.num_nodes={index}"] for index in range(1, count + 1)]
    sweeps = {
        "values": values(count),
        "+ and ~": added_and_dropped(count),
        "groups, each once": sizes,
        "groups, 8 in turn": again,
    }
    compared_points = sum(compare(points) for points in sweeps.values())
    print(f"{compared_points} points are the same as composed and rendered alone, byte for byte.")
    print(f"CPU ms per point; Python {sys.version.split()[0]}, {os.cpu_count()} cores\n")
    head = ("points", "hydra", "compose()", "BatchComposer", "hydra / many", "+ the scripts")
    print(f"{'':20}{head[0]:>8}{head[1]:>9}{head[2]:>12}{head[3]:>17}{head[4]:>15}{head[5]:>17}")
    for name, points in sweeps.items():
        cost = measure(points)
        times = cost["hydra"] / cost["many"]
        print(
            f"{name:20}{len(points):>8}{cost['hydra']:>9.1f}{cost['compose']:>12.1f}{cost['many']:>17.2f}"
            f"{times:>15.1f}{cost['scripts']:>17.2f}"
        )
    print("\nAim: at most 0.15 of Hydra where only values differ, no slower where groups do.")


if __name__ == "__main__":
    main()
