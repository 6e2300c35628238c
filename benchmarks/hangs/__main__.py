"""Hangs of each kind, two at a time, each recorded in a line of JSON.

    python -m benchmarks.hangs [--hangs N] [--first SEED]     hangs of the seeds SEED, SEED + 1, ...

Interrupted, it goes on: seeds that are on record are not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.soak.boot import short_parent
from launcher.sandbox import STATE_FILE
from launcher.sandbox.lifecycle import Sandbox, down, up
from launcher.sandbox.options import SandboxOptions
from slipway.supervisor.hang_probe import find_ranks
from slipway.watch.alerts import read_alerts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("script.py")
# In words, and whose tasks hang: the script's by itself, or what runs is stopped from outside.
KINDS = {
    "stop": "Stop a rank with SIGSTOP",
    "skip": "A rank skips a collective",
    "loader": "A rank's loader sleeps",
    "lock": "A rank loops in C, with the interpreter's lock",
    "mount": "A rank waits in the kernel (state D)",
    "node": "Stop the slurmd of a node, and a rank on it",
    "train": "Stop a rank of our trainer with SIGSTOP",
    "slow": "A step takes 25 s, without output",
}
LANES = ("n[1-2]", "n[3-4]")
Row = dict[str, Any]

_WATCH = ["watch.tell.every=1", "env_vars.OMP_NUM_THREADS='1'", "cluster=sandbox"]
_TRAINING = [
    *("training=gpt3/tiny", "training.trainer.num_nodes=2", "training.trainer.devices=2"),
    *("training.trainer.max_steps=100000", "training.trainer.limit_val_batches=0"),
    *("training.model.num_layers=1", "training.model.hidden_size=32", "training.model.encoder_seq_length=32"),
    *("training.model.max_position_embeddings=32", "training.model.data.data_impl=mock"),
    *("training.model.micro_batch_size=1", "training.model.global_batch_size=4"),
    *("+training.model.override_vocab_size=512", f"cluster.python={sys.executable}"),
    "watch.no_step={reaction: restart, least: 5, pause: 5}",
]


class Trial:
    """A run that hangs; all random choices are drawn from its seed."""

    def __init__(self, seed: int, lane: str, sandbox: Sandbox, directory: Path) -> None:
        chance = random.Random(seed)
        self.seed, self.kind = seed, list(KINDS)[seed % len(KINDS)]
        self.rank, self.step = chance.randrange(4), chance.randrange(10, 60)
        self.name = f"{self.kind}_{seed}"
        self.run = directory / "results" / self.name
        self._lane, self._sandbox, self._directory = lane, sandbox, directory
        self._moment = directory / f"{self.name}.hang"

    def do(self) -> Row:
        """Launch the run, let it hang, and return the row of its alert."""
        own = [f"cluster.nodelist='{self._lane}'", *_WATCH]
        if self.kind == "train":
            self._launch(*own, *_TRAINING, f"training.run.name={self.name}")
        else:
            words = [self.kind, f"'{self.rank}'", f"'{self.step}'", str(self._moment)]
            self._launch(
                *own,
                *("stages=[command]", f"command.run.name={self.name}", "command.nodes=2"),
                f"command.argv=[{sys.executable},{SCRIPT},{','.join(words)}]",
                *("command.tasks_per_node=2", "watch.no_step={reaction: restart, first: 10, pause: 60}"),
            )
        stopped = self._stop() if self.kind in ("stop", "node", "train") else []
        try:
            mark = self._until("ends", self._end_mark)
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        row = {"seed": self.seed, "kind": self.kind, "rank": self.rank, "why": mark["why"]}
        row["verdict"] = mark["verdict"]
        if self.kind == "slow":
            is_quiet = not read_alerts(self.run)
            return row | {"right": mark["verdict"] == "done" and is_quiet}
        nodes = self._sandbox_nodes()
        named = rf"rank {self.rank} on {nodes[self.rank // 2]} |\b{nodes[self.rank // 2]} does not answer"
        began = float(self._moment.read_text())
        alerts = [alert.first for alert in read_alerts(self.run)]
        seconds = next(first.time for first in alerts if first.detector == "no_step") - began
        is_right = mark["rule"] == "hang" and bool(re.search(named, mark["why"]))
        return row | {"right": is_right, "seconds": round(seconds, 1)}

    def _launch(self, *overrides: str) -> None:
        command = [str(ROOT / ".venv/bin/slipway"), "launch", *overrides]
        environment = {**os.environ, "SLURM_CONF": self._sandbox.environment()["SLURM_CONF"]}
        done = subprocess.run(command, cwd=self._directory, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])

    def _stop(self) -> list[int]:
        """Stop a rank, and its node's slurmd, once it has done its steps; return the stopped processes."""
        log = self.run / "newest"
        word = (
            f"step +{10 + self.step // 10}/" if self.kind == "train" else f"^number {self.step // 10 * 10}$"
        )
        texts = lambda: "".join(path.read_text() for path in log.glob("log-*.out"))  # noqa: E731
        self._until("trains", lambda: re.search(word, texts(), re.M))
        tag = json.loads((log / "supervisor.json").read_text())["tag"]
        pids = [each.pid for each in find_ranks(tag) if each.rank == self.rank]
        if self.kind == "node":
            state = json.loads((self._sandbox.options.directory / STATE_FILE).read_text())
            pids.append(state["daemons"][self._sandbox_nodes()[self.rank // 2]]["pid"])
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self._moment.write_text(str(time.time()))
        return pids

    def _sandbox_nodes(self) -> list[str]:
        return ["n1", "n2"] if self._lane == LANES[0] else ["n3", "n4"]

    def _end_mark(self) -> Row | None:
        marks = list(self.run.glob("newest/marks/*.ended.json"))
        content = json.loads(marks[0].read_text()) if marks else {}
        return content if content.get("rule") else None

    def _until(self, what: str, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + 240
        while not (result := condition()):
            if time.monotonic() > end:
                raise RuntimeError(f"seed {self.seed} ({self.kind}) never {what}")
            time.sleep(0.3)
        return result


def table(rows: Sequence[Row]) -> str:
    """Return the table by kind, in Markdown."""
    lines = ["| hang | runs | right | seconds, median | longest | wrong seeds |", "|---|---|---|---|---|---|"]
    for kind, words in KINDS.items():
        own = [row for row in rows if row["kind"] == kind]
        seconds = [row["seconds"] for row in own if "seconds" in row] or [float("nan")]
        wrong = [str(row["seed"]) for row in own if not row["right"]]
        numbers = f"{statistics.median(seconds):.0f} | {max(seconds):.0f}" if kind != "slow" else " | "
        cells = [words, str(len(own)), str(len(own) - len(wrong)), numbers, ", ".join(wrong) or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def boot(directory: Path) -> Sandbox:
    """Boot four nodes; Slurm takes a silent slurmd for dead after five minutes, as it does by default."""
    sandbox = up(SandboxOptions(directory=directory / "s", nodes=4, cloud_nodes=0))
    environment = {**os.environ, **sandbox.environment()}
    conf = Path(environment["SLURM_CONF"])
    conf.write_text(re.sub("(?m)^SlurmdTimeout=.*", "SlurmdTimeout=300", conf.read_text()))
    subprocess.run(["scontrol", "reconfigure"], env=environment, check=True)
    return sandbox


def main() -> int:
    """Make the hangs, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hangs", description=__doc__.splitlines()[0])
    parser.add_argument("--hangs", type=int, default=100, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of their seeds")
    parser.add_argument("--record", type=Path, default=ROOT / "results" / "hangs.jsonl")
    args = parser.parse_args()
    path: Path = args.record
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    seeds = range(args.first, args.first + args.hangs)
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in seeds:
        if seed not in {row["seed"] for row in rows}:
            work.put(seed)
    directory, lock = Path(tempfile.mkdtemp(prefix="hangs-", dir=short_parent())), threading.Lock()

    def do(lane: str, sandbox: Sandbox) -> None:
        while not work.empty():
            seed = work.get()
            try:
                row = Trial(seed, lane, sandbox, directory).do()
            except (RuntimeError, StopIteration, OSError) as error:
                row = {
                    "seed": seed,
                    "kind": list(KINDS)[seed % len(KINDS)],
                    "right": False,
                    "why": repr(error),
                }
            with lock, path.open("a") as stream:
                rows.append(row)
                stream.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)

    try:
        sandbox = boot(directory)
        threads = [threading.Thread(target=do, args=(lane, sandbox), daemon=True) for lane in LANES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        down(directory / "s")
        shutil.rmtree(directory, ignore_errors=True)
    chosen = [row for row in rows if row["seed"] in seeds]
    print(table(chosen))
    return 0 if all(row["right"] for row in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
