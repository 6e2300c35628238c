"""Processes that start to train at once: forked from one that has imported torch and megatron-core before.

Importing them takes most of a launch of a very small model. From there on a fork is the launch: the same
entry with the same arguments and environment, and nothing made or joined before it.

Run as a script, it reads one JSON object a line and answers with one line: an order to train is answered with
the process's id, an order to wait for an id with its exit code.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.trainer.sabotage import sabotage

REPOSITORY = Path(__file__).resolve().parents[2]

# Of linux/prctl.h.
_PR_SET_PDEATHSIG = 1


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
        try:
            self._server.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            # It waits for a process that does not end; what it forked ends with it.
            self._server.kill()
            self._server.communicate()

    def start(
        self,
        arguments: list[str],
        environment: dict[str, str],
        output: Path,
        module: str = "trainer.pretrain",
        errors: Path | None = None,
    ) -> WarmProcess:
        """Start the ``main`` of a module, as of ``python -m``.

        Its stdout goes into a file, and its stderr too, unless there is a file for `errors`.
        """
        order = {
            "arguments": arguments,
            "environment": environment,
            "outputs": [str(output), str(errors or output)],
            "module": module,
        }
        return WarmProcess(self, int(self.order(order)))

    def order(self, order: dict[str, Any]) -> str:
        """Send one line and return the answer."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()


# What a training imports until its end; torch._dynamo, dearer than all the others, comes with an optimizer.
_IMPORTED = (
    "torch._dynamo",
    "trainer.pretrain",
    "trainer.config.check",
    "trainer.loop.startup_report",
    "trainer.loop.run",
    "trainer.loop.saving",
    "trainer.loop.session",
    "tensorboard.summary.writer.event_file_writer",
)


def _serve() -> None:
    from trainer import cpu_shim, logs

    logs.quiet()
    cpu_shim.install()
    for module in _IMPORTED:
        importlib.import_module(module)
    # The forks' collector leaves alone what it would only find alive, and would copy by looking.
    gc.collect()
    gc.freeze()
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
    # Nothing is left when the tests are over, however they end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, output in enumerate(order["outputs"], start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(order["environment"])
    code = 1
    sabotage()
    try:
        sys.argv = [order["module"], *order["arguments"]]
        code = importlib.import_module(order["module"]).main(order["arguments"])
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
