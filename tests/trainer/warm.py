"""Processes that start to train at once: forked from one that has imported torch and megatron-core before.

Importing them takes most of a launch of a very small model. From there on a fork is the launch: the same
entry with the same arguments and environment, and nothing made or joined before it.

Run as a script, it reads one JSON object a line and answers with one line: an order to train is answered with
the process's id, an order to wait for an id with its exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


class WarmProcess:
    """One forked process."""

    def __init__(self, pool: WarmPool, pid: int) -> None:
        self._pool, self.pid = pool, pid

    def wait(self) -> int:
        """Return the exit code, minus the signal's number after a signal."""
        return int(self._pool.order({"wait": self.pid}))


class WarmPool:
    """The process that forks; it ends with the ``with`` block."""

    def __enter__(self) -> WarmPool:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.warm"],
            cwd=REPOSITORY,
            # One thread, so that there are none to lose in a fork.
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.communicate(timeout=60)

    def start(self, arguments: list[str], environment: dict[str, str], output: Path) -> WarmProcess:
        """Start ``python -m trainer.pretrain`` with its stdout and stderr in a file."""
        order = {"arguments": arguments, "environment": environment, "output": str(output)}
        return WarmProcess(self, int(self.order(order)))

    def order(self, order: dict[str, Any]) -> str:
        """Send one line and return the answer."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()


def _serve() -> None:
    from trainer import cpu_shim, logs

    logs.quiet()
    cpu_shim.install()
    for module in ("loop.header", "loop.run", "loop.saving", "loop.session", "report.events"):
        importlib.import_module(f"trainer.{module}")
    # Not iterated over: that would read ahead.
    while line := sys.stdin.readline():
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _train(order)
        print(pid, flush=True)


def _train(order: dict[str, Any]) -> None:
    from trainer import pretrain

    descriptor = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(order["environment"])
    code = 1
    try:
        sys.argv = ["pretrain", *order["arguments"]]
        code = pretrain.main(order["arguments"])
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
