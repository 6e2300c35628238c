"""The lines that tell why a job ended: what its ranks left when they failed, then the ends of its logs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from supervisor.files import open_regular, read_text

# As much as the job's own script looks at.
TAIL_BYTES = 1 << 20
_LINE_ENDS = re.compile(r"[\r\n]")


@dataclass(frozen=True, slots=True, order=True)
class Left:
    """What a rank left when it failed, at `time` in Unix seconds; `line` is all of it."""

    time: float
    rank: int
    host: str
    error: str
    line: str


def evidence(logs: Iterable[Path], failures: Path | None = None, since: float = 0.0) -> list[str]:
    """Read them; what cannot be read says nothing.

    Parameters
    ----------
    failures
        The directory with one file for each rank that failed.
    since
        In Unix seconds: ranks that failed before are another job's.
    """
    lines = [left.line for left in left_by_ranks(failures, since)] if failures else []
    for log in logs:
        lines += _LINE_ENDS.split(_tail(log).replace("\0", " "))
    return lines


def left_by_ranks(failures: Path, since: float = 0.0, until: float = math.inf) -> list[Left]:
    """What ranks left that failed between two moments, the first to fail coming first."""
    found = filter(None, map(_left, failures.glob("globalrank-*.json")))
    return sorted(left for left in found if since <= left.time <= until)


def _left(path: Path) -> Left | None:
    try:
        line = read_text(path, TAIL_BYTES).partition("\n")[0]
        told = json.loads(line)
        return Left(float(told["time"]), int(told["rank"]), str(told["host"]), str(told["error"]), line)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _tail(path: Path) -> str:
    try:
        with open_regular(path) as stream:
            size = stream.seek(0, 2)
            stream.seek(max(size - TAIL_BYTES, 0))
            # Byte for byte, as grep sees it in the locale C.
            return stream.read(TAIL_BYTES).decode("latin-1")
    except OSError:
        return ""
