"""The exit codes of the verbs about a job, so that scripts can tell its state: one table for all verbs.

``0`` is done; ``2`` is a mistake in the command line, as everywhere; ``130`` is Ctrl-C, which leaves jobs
alone. For several jobs the worst counts: 1 before 3, 75, 4 and 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from supervisor.rules import EXIT_INTERRUPTED

DONE = 0
WENT_WRONG = 1
MISTAKE = 2
NOT_KNOWN = 3
UNDER_WAY = 4
INTERRUPTED = EXIT_INTERRUPTED  # the trainer's own: saved before its end, launch again to continue
WATCHING_ENDED = 130  # Ctrl-C

_WORST_FIRST = (WENT_WRONG, NOT_KNOWN, INTERRUPTED, UNDER_WAY, DONE)


def worst_code(codes: Iterable[int]) -> int:
    """Return the worst exit code of several jobs; 0 for none."""
    present = set(codes)
    return next((code for code in _WORST_FIRST if code in present), DONE)
