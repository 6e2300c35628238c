"""The cost of a dry run, next to a process that only imports Hydra and composes the same tree.

    python benchmarks/perf/launch_latency.py [--runs N]

The two run in turn, so that a noisy machine slows both; quote the ratio of the medians. CPU seconds and peak
memory are the kernel's own account of each finished process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAIN = str(ROOT / "launcher" / "main.py")
DRY_RUN = [sys.executable, MAIN, "training=gpt3/126m", "cluster=bcm", "--dry-run"]
# The floor: Hydra imported, the tree composed and nothing else.
FLOOR = [
    sys.executable,
    "-c",
    "from hydra import compose, initialize_config_dir\n"
    f"with initialize_config_dir({str(ROOT / 'conf')!r}, version_base='1.3'):\n"
    "    compose('config', overrides=['training=gpt3/126m', 'cluster=bcm', '~data_preparation'])",
]

# Starts the process to measure, and is small: the peak of a process begins with that of its parent.
_BETWEEN = """
import os, sys, time
begun = time.monotonic()
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(pid, 0)
with open(sys.argv[1], "w") as told:
    print(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, time.monotonic() - begun, file=told)
"""


@dataclass(frozen=True)
class Cost:
    """CPU seconds (user and system), peak resident memory in MB and seconds of the clock of one process."""

    cpu: float
    memory: float
    wall: float


def measure(
    command: list[str],
    *,
    variables: Mapping[str, str] | None = None,
    expected: Collection[int] = (0,),
    cwd: Path | None = None,
) -> Cost:
    """Run a command with its output to a pipe, and take the kernel's account of it.

    Parameters
    ----------
    variables
        Environment variables to add to those of this process.
    expected
        Exit codes of a run that counts.
    cwd
        The directory that it runs in.
    """
    # Bytecode is written and used, as in any installed tool.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.NamedTemporaryFile("r") as report:
        between = [sys.executable, "-I", "-S", "-c", _BETWEEN, report.name, *command]
        result = subprocess.run(
            between,
            cwd=cwd,
            env={**inherited, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        status, cpu, memory, wall = report.read().split() or ["1"] * 4
    if os.waitstatus_to_exitcode(int(status)) not in expected:
        output = result.stdout.decode(errors="replace")
        raise SystemExit(f"{command} ended with status {status}:\n{output}")
    return Cost(float(cpu), float(memory) / 1024, float(wall))


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--runs", type=int, default=15, help="counted runs of each (default: 15)")
    runs = parser.parse_args().runs

    commands = {"hydra compose (floor)": FLOOR, "slipway dry run": DRY_RUN}
    for command in commands.values():
        measure(command)  # warms the caches and the bytecode
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            costs[name].append(measure(command))

    print(f"Medians of {runs} interleaved runs; Python {sys.version.split()[0]}, {os.cpu_count()} cores\n")
    print(f"{'':24}{'CPU [s]':>10}{'ratio':>8}{'min-max [s]':>16}{'memory [MB]':>14}")
    floor = statistics.median(cost.cpu for cost in costs["hydra compose (floor)"])
    for name, list_of_costs in costs.items():
        cpu = sorted(cost.cpu for cost in list_of_costs)
        memory = statistics.median(cost.memory for cost in list_of_costs)
        median = statistics.median(cpu)
        spread = f"{cpu[0]:.3f}-{cpu[-1]:.3f}"
        print(f"{name:24}{median:>10.3f}{median / floor:>8.2f}{spread:>16}{memory:>14.1f}")
    print("\nAim: at most 1.6 times the floor, at most 50 MB.")


if __name__ == "__main__":
    main()
