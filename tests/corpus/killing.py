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

from corpus.__main__ import main
from tests.corpus.preparing import check_whole, results

TASKS = 3
LIBRARIES = (np, pyarrow, tokenizers, yaml, zstandard)


def start(arguments: list[str], log: Path) -> int:
    """Run a phase in a forked process; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    with log.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    code = 1
    with contextlib.suppress(BaseException):
        code = main(arguments)
    os._exit(code)


def seconds_of(arguments: list[str], log: Path) -> float:
    """Run a phase to its end; return its duration."""
    began = time.monotonic()
    _, status = os.waitpid(start(arguments, log), 0)
    assert status == 0, log.read_text()
    return time.monotonic() - began


def phases(options: list[str]) -> list[list[str]]:
    tokenize = [["tokenize", *options, "--task", str(task), "--tasks", str(TASKS)] for task in range(TASKS)]
    return [["fetch", *options], *tokenize, ["merge", *options]]


def killed(options: list[str], out: Path, log: Path, kills: int) -> None:
    """Kill phases until there were as many kills; start anew when all is done."""
    expected: dict[str, str] = {}
    duration: dict[str, float] = {}
    for phase in phases(options):
        duration[phase[0]] = max(duration.get(phase[0], 0.0), seconds_of(phase, log))
    expected = results(out)
    chance = random.Random(1234)
    count: Counter[str] = Counter()
    rounds = completed = 0
    while sum(count.values()) < kills:
        shutil.rmtree(out)
        rounds += 1
        for phase in phases(options):
            while True:
                pid = start(phase, log)
                # The later a kill, the more of the phase is done; some phases are left to end.
                time.sleep(chance.uniform(0, 1.2) * duration[phase[0]])
                pid_done, status = os.waitpid(pid, os.WNOHANG)
                if not pid_done:
                    os.kill(pid, signal.SIGKILL)
                    _, status = os.waitpid(pid, 0)
                completed += check_whole(out) if out.exists() else 0
                if not os.WIFSIGNALED(status):
                    assert status == 0, log.read_text()
                    break
                count[phase[0]] += 1
        assert results(out) == expected, f"round {rounds}"
    leftovers = [path.name for path in out.rglob("*") if "unfinished" in path.name]
    print(json.dumps({"kills": count, "rounds": rounds, "completed": completed, "leftovers": leftovers}))


if __name__ == "__main__":
    killed(sys.argv[4:], Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
