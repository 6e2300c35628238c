"""The evidence of why a job ended: records of failed ranks, then the ends of its logs.

Text of a log is anybody's: it is matched, and nothing of it is passed on but numbers and the names of this
job's own nodes.
"""

import json
import math
import os
import re
from contextlib import suppress
from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple

from slipway.common.files import AnyPath, open_regular, read_int, read_text, unix_time

# Bytes of each log; the cause of a job's end is at the log's end.
TAIL_BYTES = 1 << 20
# Characters of a line that are kept, half of them at its end: a pattern may take long with the whole.
_LINE = 1 << 12
_LINE_ENDS = re.compile(r"[\r\n]")
_LEFT = re.compile(r"globalrank-[^/]*\.json")
_RANK = re.compile(r"[Rr]ank\"?:? ?([0-9]{1,7})(?:[^0-9]|$)")
# A rank's own report, or srun's word for a task that failed.
_FAILED = re.compile(r"\{\"time\": .*\"rank\": [0-9]+|srun: error: [^ ]+: tasks? [0-9]")
_FAILED_RANK = re.compile(r"(?:\"rank\": |: tasks? )([0-9]{1,9})")
_WORDS = 200  # characters of a program's last words
_LEFT_RECORD = re.compile(r"\{\"time\": .*\"rank\": [0-9]+")
_BEGIN = re.compile(r"Job [0-9_]+: run ")
_NOT_STARTED = re.compile(r"slurmstepd[^:]*: error: execve\(\): (.+): ([^:]+)$")
_ERROR = re.compile(
    r"\b(\w*error|\w*exception|fatal|cannot|could not|not found|no such|denied|invalid|unable|refused)\b",
    re.IGNORECASE,
)
_NO_ERROR = re.compile(r"\s|\{|srun: |slurmstepd[^:]*: |Job [0-9_]+: |.*\b\w*warn", re.IGNORECASE)
_LABEL = re.compile(r"^(?:[0-9]+: |\[rank[0-9]+\]: ?)?(?:[^ ]*task\.sh: line [0-9]+: )?(?:error: )?")
# Our trainer's, a progress bar's, and Megatron-LM's.
_STEP = re.compile(
    r"(?:^|: )step +([0-9]{1,15})/[0-9]+ \||\| *([0-9]{1,15})/[0-9]+ \[|iteration +([0-9]{1,15})/"
)


class Left(NamedTuple):
    """The record that a rank left in the file `path` when it failed, at `time` in Unix seconds.

    `host` is its node if the record names it, and `line` all of the record in one line.
    """

    time: float
    rank: int
    host: Optional[str]
    error: str
    line: str
    path: str


def evidence(logs: Iterable[AnyPath], failures: Optional[AnyPath] = None, since: float = 0.0) -> List[str]:
    """Read the lines; what cannot be read says nothing.

    Parameters
    ----------
    failures
        The directory with one file for each rank that failed.
    since
        In Unix seconds: ranks that failed before are another job's.
    """
    lines = [left.line for left in read_rank_failures(failures, since)] if failures else []
    for log in logs:
        lines += _cut_earlier_starts(_LINE_ENDS.split(_tail(log).replace("\0", " ")))
    return [line if len(line) <= _LINE else line[: _LINE // 2] + line[-_LINE // 2 :] for line in lines]


def _cut_earlier_starts(lines: List[str]) -> List[str]:
    """Return the lines since the last start of the job's tasks; all where it is not in sight."""
    begin = max((number for number, line in enumerate(lines) if _BEGIN.match(line)), default=0)
    return lines[begin:]


def read_rank_failures(failures: AnyPath, since: float = 0.0, until: float = math.inf) -> List[Left]:
    """Read what ranks left that failed between two moments, the first to fail coming first."""
    try:
        names = [name for name in os.listdir(failures) if _LEFT.fullmatch(name)]
    except (OSError, ValueError):
        return []
    all_left = filter(None, (_left(os.path.join(os.fspath(failures), name)) for name in names))
    return sorted((left for left in all_left if since <= left.time <= until), key=lambda left: left[:2])


def find_first_failure(
    lines: Iterable[str], hosts: Sequence[str], tasks_per_node: int
) -> Tuple[Optional[int], Optional[str]]:
    """Return the rank that failed first and its node, each ``None`` if the lines do not name it."""
    line = next(filter(_FAILED.match, lines), "")
    rank = _FAILED_RANK.search(line)
    return int(rank[1]) if rank else None, next(iter(find_hosts(line, hosts, tasks_per_node)), None)


def quote_error(lines: Sequence[str], host: Optional[str] = None) -> Optional[str]:
    """Return a failed program's own word for its end: a rank's record, else the last line with an error.

    It is shown, and decides nothing. slurmstepd reports a program that srun did not find.
    """
    for line in filter(_LEFT_RECORD.match, lines):
        with suppress(ValueError, LookupError, RecursionError):  # it may be cut short
            return str(json.loads(line)["error"]).splitlines()[0][:_WORDS]
    for line in reversed(lines):
        if _BEGIN.match(line):
            return None
        not_started = _NOT_STARTED.match(line)
        if not_started:
            program, why = not_started.groups()
            return f"srun could not start {program}{f' on {host}' if host else ''}: {why}"[:_WORDS]
        if _ERROR.search(line) and not _NO_ERROR.match(line):
            words = _LABEL.sub("", line).strip()
            return words.encode("latin-1", "replace").decode("utf-8", "replace")[:_WORDS]
    return None


def find_last_step(lines: Sequence[str]) -> Optional[int]:
    """Return the last step that the lines log; ``None`` if they log none."""
    for line in reversed(lines):
        steps = _STEP.findall(line)
        if steps:
            return int("".join(steps[-1]))
    return None


def find_hosts(line: str, hosts: Sequence[str], tasks_per_node: int) -> Tuple[str, ...]:
    """Return the first of the hosts that a line names, else that of the rank that it names."""
    names = "|".join(map(re.escape, sorted(hosts, key=len, reverse=True)))
    named = re.search(f"(?:^|[^A-Za-z0-9_.-])({names})(?:[^A-Za-z0-9_-]|$)", line) if names else None
    if named:
        return (named[1],)
    rank = _RANK.search(line)
    node = int(rank[1]) // tasks_per_node if rank else len(hosts)  # srun deals ranks out node by node
    return (hosts[node],) if node < len(hosts) else ()


def _left(path: str) -> Optional[Left]:
    try:
        text = read_text(path, TAIL_BYTES).strip()
        content = json.loads(text)
        time, rank = unix_time(content["time"]), read_int(content["rank"], 0)
        host, error = content.get("host"), str(content["error"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if time is None or rank is None:
        return None
    return Left(time, rank, None if host is None else str(host), error, text.replace("\n", " "), path)


def _tail(path: AnyPath) -> str:
    try:
        with open_regular(path) as stream:
            size = stream.seek(0, 2)
            stream.seek(max(size - TAIL_BYTES, 0))
            # Byte for byte: the patterns are of ASCII, and a log may hold anything.
            return stream.read(TAIL_BYTES).decode("latin-1")
    except OSError:
        return ""
