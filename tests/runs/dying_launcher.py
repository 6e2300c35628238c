"""A launcher that is killed before its Nth step.

``python -m tests.runs.dying_launcher FIRST LAST OVERRIDE ...``

A step is whatever changes the world: a file opened for writing, a directory made, a name changed, a process
started. The Nth run is named ``kN``; the numbers of those that were killed are printed. They are forks of one
warmed-up process, so that a hundred of them take seconds.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any

from launcher.drafting import Request, draft
from launcher.launching import launch
from tests.forked_slipway import warm_up

_STEPS = {"os.mkdir", "os.rename", "os.symlink", "os.chmod", "subprocess.Popen", "os.posix_spawn"}
_WRITES = os.O_WRONLY | os.O_RDWR
# Files of the copied code are all alike, so the first few stand for the rest.
_CODE_FILES = 3


class Steps:
    """Count the steps of this process, and kill it before the chosen one."""

    def __init__(self, fatal: int) -> None:
        self._fatal = fatal
        self._count = 0
        self._code_files = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_step(event, arguments):
            return
        self._count += 1
        if self._count == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_step(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = arguments
            if not flags & _WRITES or str(path).startswith("/dev/"):
                return False
        elif event not in _STEPS:
            return False
        if "/code/" in str(arguments[:2]):
            self._code_files += 1
            return self._code_files <= _CODE_FILES
        return True


def _request(number: int, overrides: list[str]) -> Request:
    return Request([*overrides, f"data_preparation.run.name=k{number}"], ["slipway", "launch"])


def _launch(number: int, overrides: list[str]) -> None:
    request = _request(number, overrides)
    launch_draft = draft(request)
    sys.addaudithook(Steps(number))
    launch(launch_draft, request)


def main() -> None:
    """Fork launchers until one gets through all of its steps."""
    first, last, overrides = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    warm_up()  # no step of a launch, and most of the time of each
    draft(_request(0, overrides))
    gc.freeze()
    for number in range(first, last + 1):
        pid = os.fork()
        if pid == 0:
            _launch(number, overrides)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))
        print(number, flush=True)


if __name__ == "__main__":
    main()
