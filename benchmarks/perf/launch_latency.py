"""What a dry run costs, next to a process that only imports Hydra and composes the same tree.

    python benchmarks/perf/launch_latency.py [--runs N]

The two run in turn, so that a noisy machine slows both; quote the ratio of the medians. CPU seconds and peak
memory are the kernel's own account of each finished process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
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


@dataclass(frozen=True)
class Cost:
    """CPU seconds (user and system) and peak resident memory in MB of one process."""

    cpu: float
    memory: float


def measure(
    command: list[str], *, variables: Mapping[str, str] | None = None, expected: Collection[int] = (0,)
) -> Cost:
    """Run a command with its output to a pipe, and take the kernel's account of it.

    Parameters
    ----------
    variables
        Of the environment, beside those that there are.
    expected
        Exit codes of a run that counts.
    """
    reader, writer = os.pipe()
    # Bytecode is written and used, as in any installed tool.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    pid = os.posix_spawn(
        command[0],
        command,
        {**inherited, **(variables or {})},
        file_actions=[
            *((os.POSIX_SPAWN_DUP2, writer, stream) for stream in (1, 2)),
            (os.POSIX_SPAWN_CLOSE, reader),
        ],
    )
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    _, status, usage = os.wait4(pid, 0)
    if os.waitstatus_to_exitcode(status) not in expected:
        raise SystemExit(f"{command} ended with status {status}:\n{said.decode(errors='replace')}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


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
    print("\nAim: at most 1.5 times the floor, at most 50 MB.")


if __name__ == "__main__":
    main()
