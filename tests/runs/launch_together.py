"""Launchers of one run that start at the same moment.

``python -m tests.runs.launch_together COUNT OVERRIDE ...``

Each drafts its launch, so that all of them want the same number, and then waits for the others.
"""

from __future__ import annotations

import os
import sys

from benchmarks.soak.warm_launcher import warm_up
from launcher.drafting import Request, draft
from launcher.launching import launch
from tests.shipped_files import compose_shipped_files_once


def main() -> int:
    """Fork the launchers, start them together, and return how many failed."""
    count, overrides = int(sys.argv[1]), sys.argv[2:]
    compose_shipped_files_once()
    warm_up()
    ready_out, ready_in = os.pipe()
    start_out, start_in = os.pipe()
    children = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            request = Request(overrides, ["slipway", "launch", f"launcher={number}"])
            launch_draft = draft(request)
            os.write(ready_in, b"x")
            os.read(start_out, 1)
            launch(launch_draft, request)
            os._exit(0)
        children.append(pid)
    for _ in children:
        os.read(ready_out, 1)
    os.write(start_in, b"x" * count)
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in children)


if __name__ == "__main__":
    sys.exit(main())
