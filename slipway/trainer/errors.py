"""A diverged loss, and a training's exit codes in addition to those of :mod:`slipway.common.errors`.

A user's mistake is one message and exit code 2. A diverged loss is exit code 3. Everything else is a bug or
a broken machine: it keeps its traceback and exits with 1. A training that was asked to stop is no error: it
has saved, and says with 75 that it is to be launched again. One that leaves at SIGTERM after that exits
with 143, as a shell would say it.
"""

EXIT_DIVERGED = 3
# EX_TEMPFAIL of sysexits.h: all is well, try again later.
EXIT_STOPPED = 75


class DivergedError(Exception):
    """The loss or its gradient is no longer a finite number; nothing after this step is worth keeping."""
