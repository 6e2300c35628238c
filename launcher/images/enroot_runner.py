"""A program that runs Enroot once through enroot-py: ``python -m launcher.images.enroot_runner ARGUMENTS``.

enroot-py takes no environment and reports nothing meanwhile, and importing it makes directories in the
user's cache. A separate process gets the environment that an import needs, and can be ended with all that
it started.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run Enroot with the arguments; print its output, or its errors."""
    signal.signal(signal.SIGTERM, _end_group)
    from enroot import run_enroot

    try:
        print(run_enroot(sys.argv[1:]))
    except RuntimeError as error:
        # enroot-py puts its own words before Enroot's.
        print(str(error).partition("\nstderr: ")[2] or error, file=sys.stderr)
        return 1
    return 0


def _end_group(number: int, frame: FrameType | None) -> None:
    """End Enroot and its helpers too: this process's group has no others."""
    signal.signal(number, signal.SIG_IGN)
    if os.getpgrp() == os.getpid():
        os.killpg(0, number)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
