"""The cost of the reading verbs on a run of a million steps and on a tree of a thousand runs, and `cancel`.

    python benchmarks/perf/reading.py [--steps N] [--log-megabytes N] [--jobs N] [--cancelled N] [--runs N]

The long run has ended. It has the metrics that our trainer writes, some 400 bytes a step, with a resume at
three quarters that does 1,000 steps again, and a log of a gigabyte without an error: 1.5 GB of the temporary
directory. The floors read the same files and do nothing with them that a reader could leave out.

The tree is of real jobs on a throw-away Slurm, four fifths of them waiting, the others completed, each with
the metrics of 200 steps. `cancel` ends jobs that wait, next to one `scancel` of as many.

The commands run in turn, so that a noisy machine slows all of them; quote ratios of medians. CPU seconds and
peak memory are the kernel's own account of each process and its children.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from launch_latency import Cost, measure
from rich.console import Console
from rich.table import Table
from rich.text import Text
from status import SLIPWAY, calls, has_accounting, launch, metrics

from launcher.runs.manifest import Manifest, write_manifest
from launcher.runs.provenance import format_now, host, user
from launcher.sandbox.lifecycle import down, up
from launcher.sandbox.options import SandboxOptions

RUN = "gpt3_126m"
_REPEATED = 1000
LOADS = "import json, sys\nfor line in open(sys.argv[1], 'rb'): json.loads(line)"
IMPORTS = "import matplotlib.figure, matplotlib.backends.backend_agg, plotext, launcher.cli.app"


def steps_of(first: int, last: int, start_time: float) -> Iterator[str]:
    """Yield the lines of an attempt, from the step after `first` on."""
    start = {
        "kind": "start",
        "time": start_time,
        "step": first,
        "max_steps": last,
        "consumed_samples": 256 * first,
    }
    sizes = {"world_size": 8, "tensor": 2, "pipeline": 1, "virtual": 1, "context": 1, "data": 4}
    work = {"parameters": 126_000_000, "tokens_per_step": 524288, "model_flops_per_sample": 1.7e12}
    yield json.dumps({**start, **sizes, **work, "peak_flops_per_gpu": 989e12, "resumed_from": None})
    held_out = {"kind": "data", "time": start_time, "split": "validation", "tokens": 512000}
    yield json.dumps({**held_out, "unigram_entropy": 7.3196558035786525, "has_sentinels": False})
    noise = random.Random(first)
    for step in range(first + 1, last + 1):
        now, seconds = start_time + (step - first) * 0.51234, 0.5 + noise.random() / 10
        speed, loss = 524288 / seconds, 2.3 + 8.0 / (1 + step / 500) + noise.gauss(0, 0.05)
        yield json.dumps(
            {
                "kind": "train",
                "time": now,
                "step": step,
                "loss": loss,
                "lr": 0.0003 * (1 - step / last / 1.1),
                "grad_norm": 1.0 + noise.random(),
                "consumed_samples": step * 256,
                "global_batch": 256,
                "tokens": 524288,
                "step_time": seconds,
                "tokens_per_second": speed,
                "tflops_per_gpu": speed / 3000,
                "mfu": speed / 3e6,
                "data_wait": noise.random() / 1e3,
                "memory_bytes": 40_301_735_936,
            }
        )
        if step % 2000 == 0:
            yield json.dumps({"kind": "validation", "time": now, "step": step, "val_loss": loss + 0.1})
    if last == start["max_steps"]:
        yield json.dumps(
            {"kind": "end", "time": start_time + (last - first), "step": last, "reason": "max_steps"}
        )


def long_run(base: Path, steps: int, log_bytes: int) -> Path:
    """Write the run's files as a launcher, a job's script and a trainer do; return its launch directory."""
    directory = base / RUN / "launches" / "1"
    (directory / "results").mkdir(parents=True)
    (directory / "marks").mkdir()
    end_time, cut_step = time.time(), steps * 3 // 4
    attempts = itertools.chain(
        itertools.takewhile(
            lambda line: f'"step": {cut_step + 1},' not in line, steps_of(0, steps, end_time - 9e5)
        ),
        steps_of(max(cut_step - _REPEATED, 0), steps, end_time - 4e5),
    )
    with (directory / "results" / "metrics.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in attempts)
    manifest = Manifest(
        run=RUN,
        launch=1,
        tag="20261121-000000-abcdef",
        stage="training",
        engine="megatron",
        scheduler="local",
        job_name="train",
        nodes=1,
        tasks_per_node=8,
        time_limit="1-00:00:00",
        command=["slipway", "launch"],
        overrides=["training=gpt3/126m", "cluster=local"],
        choices={"training": "gpt3/126m"},
        created=format_now(),
        version="0",
        user=user(),
        host=host(),
        job_id="17",
    )
    write_manifest(directory, manifest)
    for name, mark in (
        ("started", {"started": end_time - 9e5, "nodes": "n1"}),
        ("ended", {"ended": end_time, "exit_code": 0}),
    ):
        (directory / "marks" / f"17.0.{name}.json").write_text(json.dumps({"job_id": "17", **mark}))
    write_log(directory / "log-train_17.out", log_bytes)
    return directory


def write_log(path: Path, size: int) -> None:
    """Write lines as a trainer's rank 0 logs its steps, until there are so many bytes."""
    message = "loss 2.3456 | lr 2.999e-04 | grad norm 1.234 | 1.02 M tokens/s"
    lines = [f"[2026-11-22 19:20:58] INFO step {step:>8} | {message}\n" for step in range(10_000)]
    block = "".join(lines).encode()
    with path.open("wb") as stream:
        for _ in range(max(size // len(block), 1)):
            stream.write(block)


def in_turn(commands: Mapping[str, Sequence[str]], runs: int) -> dict[str, list[Cost]]:
    """Measure commands in turn, after each has run once."""
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        for name, command in commands.items():
            cost = measure(list(command), expected=range(5))  # a verb may report that a run failed
            if turn:
                costs[name].append(cost)
    return costs


def table(title: str, costs: Mapping[str, Sequence[Cost]], floor: str) -> Table:
    """Return the medians, and the CPU seconds as a multiple of a floor's."""
    result = Table(title=title, title_justify="left")
    for column in ("", "CPU [s]", "min-max [s]", "ratio", "wall [s]", "memory [MB]"):
        result.add_column(Text(column), justify="right" if column else "left", no_wrap=True)
    base = statistics.median(cost.cpu for cost in costs[floor])
    for name, runs in costs.items():
        cpu = sorted(cost.cpu for cost in runs)
        wall, memory = (statistics.median(getattr(cost, key) for cost in runs) for key in ("wall", "memory"))
        median = statistics.median(cpu)
        spread = f"{cpu[0]:.2f}-{cpu[-1]:.2f}"
        result.add_row(name, f"{median:.2f}", spread, f"{median / base:.2f}", f"{wall:.1f}", f"{memory:.0f}")
    return result


def read_long_run(base: Path, args: argparse.Namespace) -> Table:
    """Measure the verbs on the long run."""
    directory = long_run(base, args.steps, args.log_megabytes * 1_000_000)
    metrics_path, log_path = directory / "results" / "metrics.jsonl", directory / "log-train_17.out"
    floor = "json.loads of each line of the metrics"
    base_option = ["--base-results-dir", str(base)]
    commands = {
        "cat of metrics and log": [str(shutil.which("cat")), str(metrics_path), str(log_path)],
        floor: [sys.executable, "-c", LOADS, str(metrics_path)],
        "imports of slipway, matplotlib, plotext": [sys.executable, "-c", IMPORTS],
        "slipway status": [SLIPWAY, "status", RUN, *base_option],
        "slipway plot": [SLIPWAY, "plot", RUN, *base_option],
        "slipway plot --json": [SLIPWAY, "plot", RUN, "--json", *base_option],
        "slipway verify": [SLIPWAY, "verify", RUN, *base_option],
        "slipway follow": [SLIPWAY, "follow", RUN, *base_option],
    }
    sizes = [path.stat().st_size / 1e6 for path in (metrics_path, log_path)]
    title = f"{args.steps:,} steps: {sizes[0]:.0f} MB of metrics, {sizes[1]:.0f} MB of log"
    return table(title, in_turn(commands, args.runs), floor)


def read_tree(base: Path, args: argparse.Namespace, environment: Mapping[str, str], template: Path) -> Table:
    """Measure `status` of all runs, and the verbs on one of them."""
    jobs = [launch(base, number, environment, template) for number in range(args.jobs)]
    while len(list(base.glob("*/launches/1/marks/*.ended.json"))) < len(jobs[::5]):
        time.sleep(0.2)
    run, base_option = "gpt3_126m_005", ["--base-results-dir", str(base)]
    floor = "bare squeue"
    commands = {
        floor: [str(shutil.which("squeue")), f"--jobs={','.join(jobs)}", "--states=all"],
        "slipway status": [SLIPWAY, "status", *base_option],
        "slipway plot of one": [SLIPWAY, "plot", run, "--no-terminal", *base_option],
        "slipway verify of one": [SLIPWAY, "verify", run, *base_option],
        "slipway follow of one": [SLIPWAY, "follow", run, *base_option],
    }
    return table(f"a tree of {len(jobs)} runs", in_turn(commands, args.runs), floor)


def cancel_many(
    base: Path, args: argparse.Namespace, environment: Mapping[str, str], template: Path
) -> tuple[Table, str]:
    """Measure `cancel` next to `scancel` of as many jobs; return the table and the Slurm commands."""
    fresh = _fresh_jobs(base, args.cancelled, environment, template)
    floor, ours = "bare scancel", "slipway cancel"
    costs: dict[str, list[Cost]] = {floor: [], ours: []}
    for _ in range(args.runs):
        costs[floor].append(measure([str(shutil.which("scancel")), *fresh()[1]]))
        costs[ours].append(measure(_cancel(*fresh())))
    slurm_calls = calls(_cancel(*fresh()), base, environment)
    return table(f"cancel of {args.cancelled} jobs that wait", costs, floor), slurm_calls


def _cancel(tree: Path, jobs: Sequence[str]) -> list[str]:
    return [SLIPWAY, "cancel", *(str(run) for run in sorted(tree.iterdir())), "--base-results-dir", str(tree)]


def _fresh_jobs(
    base: Path, count: int, environment: Mapping[str, str], template: Path
) -> Callable[[], tuple[Path, list[str]]]:
    trees = itertools.count()

    def submit() -> tuple[Path, list[str]]:
        tree = base / str(next(trees))
        numbers = itertools.islice((number for number in itertools.count() if number % 5), count)
        return tree, [launch(tree, number, environment, template) for number in numbers]

    return submit


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the long run (default: 1,000,000)")
    parser.add_argument("--log-megabytes", type=int, default=1040, help="of its log (default: 1040)")
    parser.add_argument("--jobs", type=int, default=1000, help="runs of the tree (default: 1000)")
    parser.add_argument("--cancelled", type=int, default=480, help="jobs to cancel (default: 480)")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (default: 5)")
    args = parser.parse_args()
    console = Console(width=110)
    directory = Path(tempfile.mkdtemp(prefix="slipway-bench-", dir="/tmp"))
    os.environ["SLIPWAY_CACHE_DIR"] = str(directory / "cache")
    try:
        console.print(f"medians of {args.runs} interleaved runs", end="; ")
        console.print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores")
        console.print(read_long_run(directory / "long", args))
        shutil.rmtree(directory / "long")
        on_slurm(directory, args, console)
    finally:
        shutil.rmtree(directory)
    console.print("Aim: about twice the floor, less than 100 MB above the imports, a few Slurm commands.")


def on_slurm(directory: Path, args: argparse.Namespace, console: Console) -> None:
    """Measure the commands that need jobs."""
    template = directory / "metrics.jsonl"
    template.write_text(metrics(200))
    sandbox = up(SandboxOptions(directory=directory / "sandbox", nodes=4, accounting=has_accounting()))
    try:
        environment = {**sandbox.environment(), "SLIPWAY_CACHE_DIR": str(directory / "cache")}
        os.environ.update(environment)  # measure() passes it on
        console.print(read_tree(directory / "tree", args, environment, template))
        cancel_table, slurm_calls = cancel_many(directory / "cancelled", args, environment, template)
        console.print(cancel_table)
        console.print(f"Slurm commands of slipway cancel: {slurm_calls}.")
    finally:
        down(directory / "sandbox")


if __name__ == "__main__":
    main()
