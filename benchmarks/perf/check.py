"""What `slipway check` costs, next to the dry run of the same launch.

    python benchmarks/perf/check.py [--runs N]

The two run in turn, so that a noisy machine slows both; quote the ratio of the medians. CPU seconds, those of
the processes that a command starts among them, and peak memory are the kernel's own account. No command of
Slurm is on the PATH: how long a cluster takes to answer is not ours to measure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from launch_latency import ROOT, Cost, measure

COMMANDS = {"dry run": ["launch", "--dry-run"], "check": ["check"]}
# Of the largest sizes; the last one does not fit into its GPUs, so that other layouts are looked for.
LAUNCHES = {
    "175b": ["training=gpt3/175b", "cluster=bcm"],
    "405b": ["training=llama/llama3_1_405b", "cluster=bcm"],
    "175b, no room": ["training=gpt3/175b", "cluster=p5", "training.trainer.num_nodes=8"],
}
# 2: there are errors, such as a tokenizer that this machine has not got.
EXPECTED = (0, 2)


def compare(launch: list[str], runs: int, results: Path) -> dict[str, list[Cost]]:
    """Costs by command, of runs that take turns."""
    variables = {"PATH": str(results), "PYTHONPATH": str(ROOT)}
    given = [*launch, f"base_results_dir={results}"]
    commands = {
        name: [sys.executable, "-m", "launcher.cli.app", *words, *given] for name, words in COMMANDS.items()
    }
    for command in commands.values():
        measure(command, variables=variables, expected=EXPECTED)  # warms the caches and the bytecode
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            costs[name].append(measure(command, variables=variables, expected=EXPECTED))
    return costs


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--runs", type=int, default=9, help="counted runs of each (default: 9)")
    runs = parser.parse_args().runs

    print(f"Medians of {runs} interleaved runs; Python {sys.version.split()[0]}, {os.cpu_count()} cores\n")
    print(f"{'':26}{'CPU [s]':>10}{'ratio':>8}{'min-max [s]':>16}{'memory [MB]':>14}")
    with tempfile.TemporaryDirectory() as results:
        for launch, words in LAUNCHES.items():
            costs = compare(words, runs, Path(results))
            floor = statistics.median(cost.cpu for cost in costs["dry run"])
            for name, list_of_costs in costs.items():
                cpu = sorted(cost.cpu for cost in list_of_costs)
                memory = statistics.median(cost.memory for cost in list_of_costs)
                median = statistics.median(cpu)
                spread = f"{cpu[0]:.3f}-{cpu[-1]:.3f}"
                ratio = f"{median / floor:.2f}"
                print(f"{f'{launch}: {name}':26}{median:>10.3f}{ratio:>8}{spread:>16}{memory:>14.1f}")
    print("\nAim: at most 2 times the dry run.")


if __name__ == "__main__":
    main()
