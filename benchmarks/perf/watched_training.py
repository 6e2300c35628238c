"""The cost of the watch for a training: its steps with everything on, next to the same without a look.

    python benchmarks/perf/watched_training.py [--turns N] [--steps N] [--every SECONDS]

A small GPT trains on this machine under the supervisor, in turn without a look (none is due before the end)
and with looks, alerts, deliveries to a program and a dead man's switch. Looks come every second, fifteen
times as often as by default: the default costs a fifteenth of the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SLIPWAY = str(Path(sys.executable).with_name("slipway"))
TRAINING = [
    "training=gpt3/tiny",
    "cluster=local",
    "engine=megatron",
    "container=null",
    "training.trainer.num_nodes=1",
    "training.trainer.devices=1",
    "training.model.tensor_model_parallel_size=1",
    "training.model.data.data_impl=mock",
    "+training.model.override_vocab_size=512",
    "training.trainer.val_check_interval=1000000",
]
_WARM_UP = 20


def train(directory: Path, name: str, steps: int, *watch: str) -> list[float]:
    """Train, and return the seconds of the steps."""
    overrides = [f"training.run.name={name}", f"training.trainer.max_steps={steps}", *watch]
    command = [SLIPWAY, "launch", *TRAINING, *overrides, "--follow"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    lines = (directory / "results" / name / "newest" / "results" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["step_time"] for record in records if record["kind"] == "train"][_WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="trainings of each kind (default: 5)")
    parser.add_argument("--steps", type=int, default=400, help="of each training (default: 400)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks (default: 1)")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="slipway-bench-", dir="/tmp"))
    told = f"[/bin/cp,/dev/stdin,{directory}/told.json]"
    kinds = {
        "no look": ["watch.tell.every=1000000"],
        "all of it": [
            f"watch.tell.every={args.every:g}",
            f"watch.tell.command={told}",
            f"watch.tell.alive.file={directory}/alive",
            "watch.no_step.first=1",  # an alert, and its end
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    try:
        for turn in range(args.turns):
            for number, (name, watch) in enumerate(kinds.items()):
                times[name] += train(directory, f"t{turn}-{number}", args.steps, *watch)
    finally:
        shutil.rmtree(directory)
    print(f"{args.turns} trainings of {args.steps} steps each, in turn; {os.cpu_count()} cores; ms a step")
    print(f"{'':12}{'median':>10}{'mean':>10}")
    for name, seconds in times.items():
        print(f"{name:12}{1000 * statistics.median(seconds):>10.2f}{1000 * statistics.fmean(seconds):>10.2f}")
    off, on = (statistics.median(seconds) for seconds in times.values())
    default = 1 + (on / off - 1) * args.every / 15
    print(f"\nratio of the medians: {on / off:.4f} with a look every {args.every:g} s; by that {default:.4f}")
    print("with the default of 15 s. Aim: 1.005 by the default.")


if __name__ == "__main__":
    main()
