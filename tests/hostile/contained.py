"""Programs in forked processes with limits of time and memory, of which the outcome is recorded."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import resource
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

# The limits of one program. Time is its CPU's, as other tests run beside it; what waits uses none, and is
# ended by the second limit.
CPU_SECONDS = 20
WALL_SECONDS = 60
MEMORY = 2 << 30
# Imported once, by the process that the others are forked from.
_PRELOADED = [
    "slipway.corpus.sources",
    "slipway.corpus.tokenizers",
    "slipway.corpus.tokenizing",
    "slipway.corpus.merging",
    "slipway.corpus.readers",
    "pyarrow.parquet",
    "tokenizers",
    "zstandard",
    "slipway.trainer.conversion.convert",
    "slipway.trainer.conversion.check",
    "transformers",
    "sentencepiece",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOADED)


@dataclass(frozen=True)
class Outcome:
    """The end of a program: exit code, or minus a signal; output; the most memory that it took, in bytes."""

    code: int | None
    output: str
    memory: int

    @property
    def is_hung(self) -> bool:
        """Return True if a limit of time ended the program."""
        return self.code is None


def run_contained(
    module: str, arguments: list[str], scratch: Path, cpu: int = CPU_SECONDS, wall: int = WALL_SECONDS
) -> Outcome:
    """Run the ``main`` of a module in a process of its own; its output and memory go into a directory."""
    output, record = scratch / "output.txt", scratch / "record.json"
    record.unlink(missing_ok=True)
    output.touch()
    process = _context.Process(target=_run, args=(module, arguments, str(output), str(record), cpu))
    process.start()
    process.join(wall)
    if process.is_alive():
        process.kill()
        process.join()
        return Outcome(None, output.read_text(errors="replace"), 0)
    code = process.exitcode
    process.close()
    memory = json.loads(record.read_text()) if record.exists() else 0
    # A limit of CPU time ends a program by SIGKILL, as does the kernel for want of memory.
    return Outcome(None if code == -9 else code, output.read_text(errors="replace"), memory)


def _run(module: str, arguments: list[str], output: str, record: str, cpu: int) -> None:
    """Run a program in this process, which is forked, and end it."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    before = _resident_bytes()
    limit = _address_space() + 2 * MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    code = 1
    try:
        code = int(importlib.import_module(module).main(arguments))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(MemoryError):
        Path(record).write_text(json.dumps(max(0, _most_resident_bytes() - before)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
