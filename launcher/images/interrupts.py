"""Being told to end: as with Ctrl-C, what was begun is cleaned up first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Slurm ends a job's processes with the first, a lost connection with the second.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_OF_SIGNALS = 128


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Let a request to end raise `SystemExit` meanwhile, with the exit code that a shell gives it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals arrive elsewhere
        return
    # One that is ignored, as `nohup` does, stays so.
    handled = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    # The cleaning up is not to be interrupted by a second one.
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(_OF_SIGNALS + number)
