"""Run Enroot once, by enroot-py's runner, as a program: ``python -m launcher.images.enroot_call ARGS``.

The runner takes no environment and tells nothing meanwhile; and importing the package makes directories in
the user's cache. As a program it gets the environment that we want, and can be ended with all that it
started.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Hand the arguments to Enroot; what it says goes where it belongs."""
    signal.signal(signal.SIGTERM, _end)
    from enroot import run_enroot

    try:
        answer = run_enroot(sys.argv[1:])
    except RuntimeError as error:
        # It puts its own words before those of Enroot.
        said = str(error).partition("\nstderr: ")[2]
        print(said or error, file=sys.stderr)
        return 1
    print(answer)
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    """End Enroot and its helpers too: they are of this process's group, which has no others."""
    signal.signal(number, signal.SIG_IGN)
    if os.getpgrp() == os.getpid():
        os.killpg(0, number)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
