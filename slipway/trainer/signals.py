"""Signals that ask a training to stop: SIGUSR1 and SIGTERM. Imports no torch: it is there before torch is.

====================  ==================================================================================
a signal comes        this process
====================  ==================================================================================
before the first step has nothing to save, and leaves at once: after SIGUSR1 with exit code 75, after
                      SIGTERM with 1, because srun sends it to all ranks when one fails, and the
                      job's exit code is the highest of all ranks'
while it trains       finishes its step, saves and leaves with 75: the loop asks :meth:`StopSignals.requested`
SIGTERM after that    leaves at once with 143, unsaved; a further SIGUSR1
                      asks for nothing new: a user and Slurm may both have it save before its end
after its end         leaves at once with the exit code that it has by then
====================  ==================================================================================

Python runs a handler between two of its instructions, which never comes for a process that is stuck in a
collective. So the handler does nothing. What C does when the signal comes, writing its number into a pipe,
wakes a thread of our own, and that decides.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
from typing import NoReturn

from slipway.common.errors import EXIT_FAILURE
from slipway.trainer.errors import EXIT_STOPPED

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# Slurm may deliver one signal twice: to the task itself, and through srun. So soon, it is no second one.
ECHO_SECONDS = 1.0


class _Stage(enum.Enum):
    STARTING = "starting"
    TRAINING = "training"
    ENDED = "ended"


class StopSignals:
    """The signals that this process got.

    Parameters
    ----------
    rank
        Named in the message of leaving at once.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stage = _Stage.STARTING
        self._code = EXIT_STOPPED
        self._first: signal.Signals | None = None
        self._first_time = 0.0
        self._lock = threading.Lock()

    def install(self) -> None:
        """Start to listen; call it in the main thread, before anything that takes long."""
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write, False)
        for number in STOP_SIGNALS:
            signal.signal(number, _do_nothing)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_ignore)
        threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True).start()

    def requested(self) -> signal.Signals | None:
        """Return the signal that asked this process to stop, if one did."""
        return self._first

    def mark_training(self) -> None:
        """From now on there is something to save: a signal is left to the loop."""
        with self._lock:
            self._stage = _Stage.TRAINING

    def mark_ended(self, code: int) -> None:
        """Record that the work is done: a later signal ends the process with `code`."""
        with self._lock:
            self._stage, self._code = _Stage.ENDED, code

    def _watch(self, pipe: int) -> None:
        while True:
            for number in os.read(pipe, 64):
                if number in STOP_SIGNALS:
                    self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        with self._lock:
            if self._stage is _Stage.ENDED:
                os._exit(self._code)
            if self._stage is _Stage.STARTING:
                self._leave_early(number)
            now = time.monotonic()
            if self._first is None:
                self._first, self._first_time = number, now
            elif number != signal.SIGUSR1 and now - self._first_time > ECHO_SECONDS:
                self._leave(128 + number, f"{number.name} after {self._first.name}: leaving at once, unsaved")

    def _leave_early(self, number: signal.Signals) -> NoReturn:
        code = EXIT_FAILURE if number == signal.SIGTERM else EXIT_STOPPED
        if self._rank != 0:
            os._exit(code)
        self._leave(code, f"{number.name} before the first step: nothing to save")

    def _leave(self, code: int, why: str) -> NoReturn:
        # Not through logging: its lock may be held by the thread that is stuck.
        os.write(2, f"rank {self._rank}: {why}\n".encode())
        os._exit(code)


def _do_nothing(number: int, frame: object) -> None:
    """Handle a signal by doing nothing: with a handler, C writes its number into the pipe."""


def _ignore() -> None:
    """Leave signals to the parent: a forked process shares its pipe, and has its work to finish."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
