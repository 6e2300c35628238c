"""A data preparation whose phases are killed at random moments: run with a configuration, it prints JSON.

Each phase runs in a process forked from this one, which has imported all libraries: a kill costs
milliseconds. Whatever lies under a final name after a kill must be whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet
import tokenizers
import yaml
import zstandard

from slipway.corpus.__main__ import main
from tests.corpus.preparing import check_whole, results

TASKS = 3
KILLS_OF_EACH_PHASE = 11
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
LIBRARIES = (np, pyarrow, tokenizers, yaml, zstandard)


def start(arguments: list[str], out: Path, log: Path, kill_at: int | None = None) -> int:
    """Run a phase in a forked process; return its pid.

    It counts what it does to the files below `out`, and kills itself before the step `kill_at`.
    """
    pid = os.fork()
    if pid:
        return pid
    with log.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    steps, code = 0, 1

    def count(event: str, details: tuple[object, ...]) -> None:
        nonlocal steps
        if event in EVENTS and str(details[0]).startswith(str(out)):
            steps += 1
            if steps == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    with contextlib.suppress(BaseException):
        code = main(arguments)
    total = steps
    log.with_suffix(".steps").write_text(str(total))
    os._exit(code)


def measure(arguments: list[str], out: Path, log: Path) -> tuple[float, int]:
    """Run a phase to its end; return its duration in seconds and the number of its steps."""
    began = time.monotonic()
    _, status = os.waitpid(start(arguments, out, log), 0)
    assert status == 0, log.read_text()
    return time.monotonic() - began, int(log.with_suffix(".steps").read_text())


def phases(options: list[str]) -> list[list[str]]:
    tokenize = [["tokenize", *options, "--task", str(task), "--tasks", str(TASKS)] for task in range(TASKS)]
    return [["fetch", *options], *tokenize, ["merge", *options]]


def kill_repeatedly(options: list[str], out: Path, log: Path, kills: int) -> None:
    """Kill phases until there were as many kills, and enough of each phase; start anew when all is done."""
    measured = {phase[0]: measure(phase, out, log) for phase in phases(options)}
    expected = results(out)
    chance = random.Random(1234)
    count = Counter(dict.fromkeys(measured, 0))
    rounds = completed = 0
    while sum(count.values()) < kills or min(count.values()) < KILLS_OF_EACH_PHASE:
        shutil.rmtree(out)
        rounds += 1
        for phase in phases(options):
            seconds, steps = measured[phase[0]]
            while True:
                # At a moment or at a step: a random moment never falls between two renames.
                at_step = chance.random() < 0.5
                pid = start(phase, out, log, chance.randint(1, steps) if at_step else None)
                if not at_step:
                    time.sleep(chance.uniform(0, 1.2) * seconds)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                completed += check_whole(out) if out.exists() else 0
                if not os.WIFSIGNALED(status):
                    assert status == 0, log.read_text()
                    break
                count[phase[0]] += 1
        assert results(out) == expected, f"round {rounds}: {sorted(results(out))}"
    leftovers = [path.name for path in out.rglob("*") if "unfinished" in path.name]
    print(json.dumps({"kills": count, "rounds": rounds, "completed": completed, "leftovers": leftovers}))


if __name__ == "__main__":
    kill_repeatedly(sys.argv[4:], Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
