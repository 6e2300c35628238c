"""The failures of nodes over many runs, and their rates by node-day of use: functions of marks, no scheduler.

A failure is an end of a job at which a node was named: as the one at fault (`excluded`), or as the one whose
rank failed first (`host`), unless the rule of the end is no machine's; and a line of a run's
``excluded_nodes.tsv``, such as of a node that was sick before the tasks began.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.jobs.launches import Launch
from slipway.common.node.excluded import ExcludedNode, is_node_name, read_lines_of_run
from slipway.common.node.marks import JobAttempt

_DAY = 86400.0
# The interval of a rate, and the chance of an innocent node among all to be marked.
COVERAGE, _CHANCE = 0.90, 0.05
# Ends that somebody asked for, and mistakes of the program or its configuration, on whatever node they show.
_NOT_OF_NODES = (
    *("done", "saved", "left", "cancelled", "ended_by_user", "deadline", "preempted", "time_limit", "lost"),
    *(
        "failed",
        "mistake",
        "diverged",
        "setup",
        "import_error",
        "gpu_out_of_memory",
        "disk_full",
        "container",
    ),
    *("port_taken", "unknown"),
)


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A failure: the time in Unix seconds, None if unknown; `rule` is None for a line without an end."""

    node: str
    job: str
    run: str
    time: float | None
    rule: str | None
    why: str

    @property
    def reason(self) -> str:
        """The failure in a word, or the reason of its line."""
        return self.rule or self.why


@dataclass(slots=True)
class NodeRecord:
    """A node's use and failures. `is_above` is True if it fails more often than the others, beyond chance."""

    node: str
    seconds: float = 0.0
    failures: list[NodeFailure] = field(default_factory=list)
    is_above: bool = False

    @property
    def days(self) -> float:
        return self.seconds / _DAY

    @property
    def rate(self) -> float | None:
        """The failures by node-day; None if the node's use is unknown."""
        return len(self.failures) / self.days if self.seconds else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the rate."""
        if not self.seconds:
            return None
        low, high = poisson_interval(len(self.failures))
        return low / self.days, high / self.days

    @property
    def last(self) -> float | None:
        return max((failure.time for failure in self.failures if failure.time is not None), default=None)

    @property
    def reasons(self) -> Counter[str]:
        return Counter(failure.reason for failure in self.failures)

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "days": round(self.days, 4),
            "failures": len(self.failures),
            "rate": self.rate,
            "interval": self.interval,
            "above_others": self.is_above,
            "last": self.last,
            "reasons": [
                {"run": failure.run, "job": failure.job, "time": failure.time}
                | {"rule": failure.rule, "why": failure.why}
                for failure in self.failures
            ],
        }


def count_node_failures(launches: Iterable[Launch], since: float) -> list[NodeRecord]:
    """Return a record of each node that the launches used or failed on after a time, the worst first."""
    records: dict[str, NodeRecord] = {}
    lines: dict[Path, Sequence[ExcludedNode]] = {}
    seen: set[tuple[str, str, Path]] = set()
    now = time.time()
    began: dict[tuple[Path, str], float | None] = {}
    for launch in launches:
        run_dir = launch.paths.run_dir
        lines.setdefault(run_dir, read_lines_of_run(run_dir))
        for attempt in launch.attempts:
            began[run_dir, attempt.job_id] = attempt.ended or attempt.started
            used = _used_seconds(launch, attempt, since, now)
            for node in _names(attempt.nodes):
                records.setdefault(node, NodeRecord(node)).seconds += used
            for failure in _failures_of(attempt, launch.manifest.run):
                seen.add((failure.node, failure.job, run_dir))
                if failure.time is None or failure.time >= since:
                    records.setdefault(failure.node, NodeRecord(failure.node)).failures.append(failure)
    for run_dir, entries in lines.items():
        for entry in entries:
            moment = began.get((run_dir, entry.job)) or min(float(entry.until), now)
            if (entry.node, entry.job, run_dir) not in seen and moment >= since:
                failure = NodeFailure(entry.node, entry.job, run_dir.name, moment, None, entry.why)
                records.setdefault(entry.node, NodeRecord(entry.node)).failures.append(failure)
    mark_worse(list(records.values()))
    return sorted(records.values(), key=_badness)


def _badness(record: NodeRecord) -> tuple[bool, float, float, str]:
    interval = record.interval
    low = interval[0] if interval is not None else math.inf if record.failures else 0.0
    return not record.is_above, -low, -record.seconds, record.node


def _names(hosts: str | None) -> list[str]:
    """Return the names in a list of nodes that others may have written."""
    return [name for name in (hosts or "").split(",") if is_node_name(name)]


def _used_seconds(launch: Launch, attempt: JobAttempt, since: float, now: float) -> float:
    """Return the seconds that an attempt ran after a time; without its end, until its log changed last."""
    if attempt.started is None:
        return 0.0
    ended = attempt.ended
    if ended is None:
        ended = attempt.started
        with contextlib.suppress(OSError):
            ended = launch.paths.log(attempt.job_id).stat().st_mtime
    return max(0.0, min(ended, now) - max(attempt.started, since))


def _failures_of(attempt: JobAttempt, run: str) -> Iterator[NodeFailure]:
    """Yield the failures of the nodes that the end of an attempt names."""
    if not attempt.rule or attempt.rule in _NOT_OF_NODES:
        return
    hosts = _names(attempt.excluded) or _names(attempt.host)
    for node in dict.fromkeys(hosts):
        moment = attempt.ended or attempt.started
        yield NodeFailure(node, attempt.job_id, run, moment, attempt.rule, attempt.why or "")


# --- statistics


def poisson_interval(failures: int, coverage: float = COVERAGE) -> tuple[float, float]:
    """Return the exact interval of the mean of a Poisson variable that had this value.

    Garwood 1936 (Biometrika 28:437): the means at which as few, or as many, have half of the rest as chance.
    """
    tail = (1 - coverage) / 2
    most = failures + 10 * math.sqrt(failures + 1) + 10

    def solve(count: int, chance: float) -> float:
        low, high = 0.0, most  # P(X <= count) falls as the mean rises
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _at_most(count, middle) > chance else (low, middle)
        return low

    return (solve(failures - 1, 1 - tail) if failures else 0.0), solve(failures, tail)


def _at_most(count: int, mean: float) -> float:
    if mean <= 0:
        return 1.0
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))


def mark_worse(records: Sequence[NodeRecord]) -> None:
    """Mark the nodes that fail more often by their use than all others together do, beyond chance.

    Przyborowski and Wilenski 1940 (Biometrika 31:313): with equal rates a node's part of all failures is
    binomial, with its part of the use. The chance is divided among the nodes (Bonferroni).
    """
    used = [record for record in records if record.seconds]
    total, seconds = sum(len(record.failures) for record in used), sum(record.seconds for record in used)
    for record in used if len(used) > 1 else ():
        chance = _at_least(len(record.failures), total, record.seconds / seconds)
        record.is_above = bool(record.failures) and chance < _CHANCE / len(used)


def _at_least(count: int, total: int, part: float) -> float:
    """Return the chance that of `total` events, each with the chance `part`, at least so many happen."""

    def chance_of(k: int) -> float:
        ways = math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        return math.exp(ways + k * math.log(part) + (total - k) * math.log1p(-part))

    return math.fsum(map(chance_of, range(count, total + 1)))
