"""The process from which those of the cases are forked, with all modules that they need imported once.

    python -m benchmarks.torture.server

It reads lines of JSON, `["names", GROUP, WITH_PACKAGES]` or `["run", NAME, DIRECTORY]`, and answers each with
one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from benchmarks.torture.cases import BOUNDED, SECONDS, Outcome, try_case

# A process that allocates without an end, or waits for one, is ended.
_ADDRESSES = 8 << 30
_PATIENCE = 180.0
_ROOT = Path(__file__).resolve().parents[2]


class Server:
    """The running process, for those who have cases."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._orders: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout

    def names(self, group: str, *, with_packages: bool = False) -> list[str]:
        """Return the names of the cases of a group, or of all with an empty one."""
        names: list[str] = self._ask(["names", group, with_packages])
        return names

    def run(self, name: str, directory: Path, *, is_cleared: bool = False) -> Outcome:
        """Run a case in a process of its own; its files are written into the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        outcome = Outcome(**self._ask(["run", name, str(directory)]))
        if is_cleared:
            shutil.rmtree(directory)
        return outcome

    def _ask(self, order: list[object]) -> Any:
        print(json.dumps(order), file=self._orders, flush=True)
        return json.loads(self._answers.readline())


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """Start the process; it ends with the block."""
    command = [sys.executable, "-m", "benchmarks.torture.server"]
    with subprocess.Popen(
        command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Server(process)


def serve() -> None:
    """Fork a process for each order, one after the other."""
    from benchmarks.torture import catalog, exports

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cases = {case.name: case for case in catalog.cases()}
    for line in sys.stdin:
        order, name, argument = json.loads(line)
        if order == "names":
            chosen = catalog.cases() if argument else catalog.generated()
            names = [case.name for case in chosen if name in ("", case.group)]
            print(json.dumps(names), file=answers, flush=True)
            continue
        directory = argument
        result = Path(directory, "outcome.json")
        if cases[name].group == "export":
            exports.preload()
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
            if cases[name].group in BOUNDED:
                resource.setrlimit(resource.RLIMIT_CPU, (2 * SECONDS, 2 * SECONDS))
            try:
                outcome = try_case(cases[name], Path(directory))
            except BaseException:
                outcome = Outcome("surprise", traceback.format_exc())
            result.write_text(json.dumps(asdict(outcome)))
            os._exit(0)
        why = _wait(child)
        text = result.read_text() if result.exists() else json.dumps(asdict(Outcome("surprise", why)))
        print(text, file=answers, flush=True)


def _wait(child: int) -> str:
    """Wait for a process, but not for ever; return how it ended."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return f"its process ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"no end after {_PATIENCE:g} s"


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import numpy  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import sentencepiece  # noqa: F401
    import tokenizers  # noqa: F401

    import slipway.corpus.__main__
    import slipway.corpus.merging
    import slipway.corpus.tokenizing  # noqa: F401

    serve()
