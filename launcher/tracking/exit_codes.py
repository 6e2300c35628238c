"""What the verbs about a job exit with, so that scripts can tell how it is: one table for all of them.

``0`` is done; ``2`` is a mistake in what was asked for, as everywhere; ``130`` is Ctrl-C, which leaves jobs
alone. Of several jobs the worst counts: 1 before 3, 75, 4 and 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.schedulers.base import State
from supervisor.rules import EXIT_INTERRUPTED

DONE = 0
WENT_WRONG = 1
MISTAKE = 2
NOT_KNOWN = 3
UNDER_WAY = 4
INTERRUPTED = EXIT_INTERRUPTED  # the trainer's own: saved before its end, launch again to continue
WATCHING_ENDED = 130  # Ctrl-C

_WORST_FIRST = (WENT_WRONG, NOT_KNOWN, INTERRUPTED, UNDER_WAY, DONE)


def exit_code(state: State) -> int:
    """The exit code that stands for a job's state."""
    if state is State.UNKNOWN:
        return NOT_KNOWN
    if state.is_live:
        return UNDER_WAY
    if state is State.INTERRUPTED:
        return INTERRUPTED
    return DONE if state.is_good else WENT_WRONG


def worst(states: Iterable[State]) -> int:
    """The exit code that stands for several jobs: that of the worst; 0 for none."""
    return worst_code(exit_code(state) for state in states)


def worst_code(codes: Iterable[int]) -> int:
    """The worst of several jobs' exit codes; 0 for none."""
    found = set(codes)
    return next((code for code in _WORST_FIRST if code in found), DONE)
