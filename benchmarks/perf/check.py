"""The cost of `slipway check` and `slipway suggest`, next to the dry run of the same launch.

    python benchmarks/perf/check.py [--runs N] [--before COMMIT]

With --before the same commands of another commit run too, in the same turns; its ratio is to its own dry
run. All run in turn, so that a noisy machine slows them alike; quote the ratio of the medians. CPU seconds,
those of the processes that a command starts among them, and peak memory are the kernel's own account. No
command of Slurm is on the PATH: how long a cluster takes to answer is not ours to measure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from launch_latency import ROOT, Cost, measure

COMMANDS = {"dry run": ["launch", "--dry-run"], "check": ["check"], "suggest": ["suggest"]}
# The largest sizes; the last one does not fit into its GPUs, so that the search for layouts runs.
LAUNCHES = {
    "175b": ["training=gpt3/175b", "cluster=bcm"],
    "405b": ["training=llama/llama3_1_405b", "cluster=bcm"],
    "175b, no room": ["training=gpt3/175b", "cluster=p5", "training.trainer.num_nodes=8"],
}
# 1: nothing fits. 2: there are errors, such as a tokenizer that this machine has not got.
EXPECTED = (0, 1, 2)


def compare(launch: list[str], runs: int, results: Path, trees: dict[str, Path]) -> dict[str, list[Cost]]:
    """Return the costs by command and tree, of runs that take turns."""
    costs: dict[str, list[Cost]] = {f"{name}{tree}": [] for tree in trees for name in COMMANDS}
    for turn in range(-1, runs):  # the first one warms the caches and the bytecode
        for tree, root in trees.items():
            variables = {"PATH": str(results), "PYTHONPATH": str(root)}
            for name, words in COMMANDS.items():
                command = [sys.executable, "-m", "launcher.cli.app", *words, *launch]
                command.append(f"base_results_dir={results}")
                cost = measure(command, variables=variables, expected=EXPECTED, cwd=root)
                if turn >= 0:
                    costs[f"{name}{tree}"].append(cost)
    return costs


def unpack(commit: str, directory: Path) -> Path:
    """Unpack a commit of this repository, and return its root."""
    root = directory / "before"
    root.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(root)], input=archive.stdout, check=True)
    return root


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--runs", type=int, default=9, help="counted runs of each (default: 9)")
    parser.add_argument("--before", metavar="COMMIT", help="compare with another commit")
    args = parser.parse_args()
    runs = args.runs

    print(f"Medians of {runs} interleaved runs; Python {sys.version.split()[0]}, {os.cpu_count()} cores\n")
    print(f"{'':32}{'CPU [s]':>10}{'ratio':>8}{'min-max [s]':>16}{'memory [MB]':>14}")
    with tempfile.TemporaryDirectory() as results:
        trees = {"": ROOT}
        if args.before:
            trees[" before"] = unpack(args.before, Path(results))
        for launch, words in LAUNCHES.items():
            costs = compare(words, runs, Path(results), trees)
            for name, list_of_costs in costs.items():
                dry = "dry run before" if name.endswith(" before") else "dry run"
                floor = statistics.median(cost.cpu for cost in costs[dry])
                cpu = sorted(cost.cpu for cost in list_of_costs)
                memory = statistics.median(cost.memory for cost in list_of_costs)
                median = statistics.median(cpu)
                spread = f"{cpu[0]:.3f}-{cpu[-1]:.3f}"
                ratio = f"{median / floor:.2f}"
                print(f"{f'{launch}: {name}':32}{median:>10.3f}{ratio:>8}{spread:>16}{memory:>14.1f}")
    print("\nAim: at most 2 times the dry run.")


if __name__ == "__main__":
    main()
