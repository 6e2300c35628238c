"""Waits between attempts that double, so that a service that fails is asked less and less often."""

import math

# 2.0 to the power of more may be no number.
_MOST_DOUBLINGS = 30


def double_wait(attempt: int, first: float, longest: float = math.inf) -> float:
    """Return the seconds to wait after an attempt, counted from 0: `first` at the least."""
    return max(first, min(longest, first * 2.0 ** min(attempt, _MOST_DOUBLINGS)))
