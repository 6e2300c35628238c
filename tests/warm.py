"""Processes that train: with ``--warm`` forked from one that has imported torch and megatron-core before.

Importing them takes most of a launch of a very small model. From there on a fork is the launch: the same
entry with the same arguments and environment, and nothing made or joined before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import zygote
from tests import zygotes
from tests.fakes.programs import write_program

REPOSITORY = Path(__file__).resolve().parents[1]


class WarmProcess:
    """One forked process; it ends with whoever started it."""

    def __init__(self, socket: Path, order: dict[str, Any], files: tuple[int, int, int]) -> None:
        self._connection = zygote.connect(str(socket), order, files)
        self._answers = zygote.answers(self._connection)
        self.pid = int(next(self._answers))

    def wait(self) -> int:
        """Return the exit code, minus the signal's number after a signal."""
        try:
            return int(next(self._answers))
        finally:
            self._answers.close()
            self._connection.close()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class ColdProcess:
    """One started process."""

    def __init__(self, order: dict[str, Any], files: tuple[int, int, int]) -> None:
        module, *arguments = order["arguments"]
        self._process = subprocess.Popen(
            [*_starting(module), *arguments],
            env={**order["environment"], "PYTHONPATH": str(REPOSITORY)},
            cwd=order["directory"],
            stdin=files[0],
            stdout=files[1],
            stderr=files[2],
        )
        self.pid = self._process.pid

    def wait(self) -> int:
        """Return the exit code, minus the signal's number after a signal."""
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)


def _starting(module: str) -> list[str]:
    """Return the command that runs the ``main`` of a module with the words that follow."""
    # The stand-ins import megatron-core before the trainer prepares it for a CPU.
    shim = "from slipway.trainer import cpu_shim; cpu_shim.install()"
    main = f"from slipway.trainer import logs; import {module} as it; code = it.main(sys.argv[1:])"
    program = f"import sys; {shim}; {main}; logs.end_at_once(code or 0)"
    return [sys.executable, "-W", "ignore", "-c", program]


class WarmPool:
    """The process that forks; without its socket all are started."""

    def __init__(self, socket: Path | None) -> None:
        self._socket = socket
        self._started: list[ColdProcess] = []

    def start(
        self,
        arguments: list[str],
        environment: dict[str, str],
        output: Path,
        module: str = "slipway.trainer.pretrain",
        errors: Path | None = None,
    ) -> WarmProcess | ColdProcess:
        """Start the ``main`` of a module, as of ``python -m``.

        Its stdout goes into a file, and its stderr too, unless there is a file for `errors`.
        """
        order = {
            "arguments": ["tests.trainer.faults", module, *arguments],
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
            "directory": str(REPOSITORY),
        }
        paths = (output, errors or output)
        with Path(os.devnull).open() as nothing, paths[0].open("ab") as out, paths[1].open("ab") as err:
            files = (nothing.fileno(), out.fileno(), err.fileno())
            if self._socket:
                return WarmProcess(self._socket, order, files)
            self._started.append(ColdProcess(order, files))
            return self._started[-1]

    def close(self) -> None:
        """End what was started and has not ended, as after a failed test."""
        for process in self._started:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def write_interpreter(self, path: Path, module: str = "") -> Path:
        """Write a Python that has its ``-m slipway.trainer.pretrain`` forked; `module` stands in for that.

        So are conversions and evaluations, which jobs start as ``-u -m MODULE``, and the description of a
        machine for the checks of its GPUs.
        """
        if not self._socket:
            stand_in = f'*" -m slipway.trainer.pretrain "*) exec {shlex.join(_starting(module))} "$@" ;;'
            path_there = f'export PYTHONPATH="{REPOSITORY}"' if module else ""
            cases = f'case " $* " in {stand_in if module else ""} esac'
            return write_program(path, f'{path_there}\n{cases}\nexec "{sys.executable}" "$@"')
        client = f'"{sys.executable}" -ISE "{zygote.__file__}" client "{self._socket}"'
        stand_in = f"-m {module} " if module else ""
        case = f'*" -m slipway.trainer.pretrain "*) exec {client} {stand_in}"$@" ;;'
        packages = '*" -m slipway.trainer.conversion "* | *" -m slipway.trainer.evaluation "*)'
        case += f' {packages} module=$3; shift 3; exec {client} -m "$module.__main__" "$@" ;;'
        check = "benchmarks.gpu_check"
        case += f' *" -m {check} --describe "*) exec {client} -m {check}.__main__ --describe ;;'
        return write_program(path, f'case " $* " in {case} esac\nexec "{sys.executable}" "$@"')

    def journal(self, module: str) -> list[dict[str, Any]]:
        """Return which process of a module began and ended in which job."""
        if not self._socket:
            pytest.skip("only the process that forks writes down what it has forked: --warm")
        journal = self._socket.with_suffix(".jsonl")
        events = [json.loads(line) for line in journal.read_text().splitlines()]
        return [event for event in events if event["what"][0] == module]


@pytest.fixture(scope="session")
def pool() -> Iterator[WarmPool]:
    """Processes that start to train at once."""
    with contextlib.closing(WarmPool(zygotes.ranks() if zygotes.is_warm() else None)) as pool:
        yield pool


@pytest.fixture(scope="session")
def warm_python(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python for ``cluster.python`` whose ``-m slipway.trainer.pretrain`` starts at once."""
    return pool.write_interpreter(tmp_path_factory.mktemp("warm") / "python")
