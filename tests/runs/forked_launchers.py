"""Many `slipway launch` at once, as forks of one warmed-up process, so that each costs little.

``python -m tests.runs.forked_launchers SECONDS <jobs.json``, where a job is
``{"arguments": [...], "environment": {...}, "output": FILE}`` and SECONDS is how long each looks for a job
whose answer was lost. Prints their exit codes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

from launcher.cli import launch as warm  # noqa: F401
from launcher.cli.app import main as slipway
from launcher.launching import submission
from tests.forked_slipway import warm_up

# For more launchers it pays to compose once before.
_FEW = 4


def _run(job: dict[str, Any], seconds: float) -> int:
    os.environ.update(job["environment"])
    with open(job["output"], "wb", buffering=0) as output:  # noqa: PTH123
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        submission.BACKOFF = submission.Backoff(seconds)
        sys.argv = ["slipway", *job["arguments"]]
        code = slipway()
        sys.stdout.flush()
        sys.stderr.flush()
        return code


def main() -> None:
    """Fork the launchers and wait for all of them."""
    seconds = float(sys.argv[1])
    jobs = json.load(sys.stdin)
    if len(jobs) > _FEW:
        warm_up()
        gc.freeze()
    children = []
    for job in jobs:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = _run(job, seconds)
            finally:
                os._exit(code)
        children.append(pid)
    for pid in children:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
