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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.jobs.launches import Launch
from launcher.slurm.notations import expand_hostlist
from slipway.common.node.excluded import is_node_name, read_lines_of_run
from slipway.common.node.marks import JobAttempt

_DAY = 86400.0
# The interval of a rate, and the chance of an innocent node among all to be marked.
_COVERAGE, _CHANCE = 0.90, 0.05
# Ends that somebody asked for, and mistakes of the program or its configuration, on whatever node they show.
_NOT_OF_NODES = (
    *("done", "saved", "left", "cancelled", "ended_by_user", "deadline", "preempted", "time_limit", "lost"),
    *("failed", "mistake", "diverged", "setup", "import_error", "gpu_out_of_memory", "out_of_memory"),
    *("disk_full", "container", "port_taken", "rejected", "unknown"),
)


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A failure, at a time in Unix seconds; `rule` is None for a line of a file without an end."""

    run: str
    job: str
    time: float
    rule: str | None
    why: str


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
    def rate(self) -> tuple[float, float, float] | None:
        """The failures by node-day, and its interval; None if the node's use is unknown."""
        counts = len(self.failures), *poisson_interval(len(self.failures))
        return (counts[0] / self.days, counts[1] / self.days, counts[2] / self.days) if self.seconds else None

    @property
    def last(self) -> float | None:
        return max((failure.time for failure in self.failures), default=None)

    @property
    def reasons(self) -> Counter[str]:
        return Counter(failure.rule or failure.why for failure in self.failures)

    def to_json(self) -> dict[str, Any]:
        rate, *interval = self.rate or (None,)
        return {
            "node": self.node,
            "days": round(self.days, 4),
            "failures": len(self.failures),
            "rate": rate,
            "interval": interval or None,
            "above_others": self.is_above,
            "last": self.last,
            "reasons": list(map(asdict, self.failures)),
        }


def count_node_failures(launches: Iterable[Launch], since: float) -> list[NodeRecord]:
    """Return a record of each node that the launches used or failed on after a time, the worst first."""
    records: dict[str, NodeRecord] = {}
    failures: list[tuple[str, NodeFailure]] = []
    # By run, node and job: an end and a line of the file may be of one failure.
    named: set[tuple[Path, str, str]] = set()
    ends: dict[tuple[Path, str], float | None] = {}
    now = time.time()
    for launch in launches:
        run_dir = launch.paths.run_dir
        for attempt in launch.starts:
            job, ended = attempt.job_id, attempt.ended or attempt.started
            ends[run_dir, job] = ended
            used = _used_seconds(launch, attempt, since, now)
            for node in _names(attempt.nodes):
                records.setdefault(node, NodeRecord(node)).seconds += used
            for node in _find_blamed(attempt):
                why = attempt.why or ""
                failures.append((node, NodeFailure(run_dir.name, job, ended or 0.0, attempt.rule, why)))
                named.add((run_dir, node, job))
    for run_dir in {run_dir for run_dir, _ in ends}:
        for entry in read_lines_of_run(run_dir):
            moment = ends.get((run_dir, entry.job)) or min(float(entry.until), now)
            if (run_dir, entry.node, entry.job) not in named:
                named.add((run_dir, entry.node, entry.job))
                line = NodeFailure(run_dir.name, entry.job, moment, None, entry.why)
                failures.append((entry.node, line))
    for node, failure in failures:
        if failure.time >= since:
            records.setdefault(node, NodeRecord(node)).failures.append(failure)
    mark_worse(list(records.values()))

    def badness(record: NodeRecord) -> tuple[bool, float, float]:
        low = record.rate[1] if record.rate is not None else math.inf if record.failures else 0.0
        return record.is_above, low, record.seconds

    return sorted(records.values(), key=badness, reverse=True)


def _names(hosts: str | None) -> list[str]:
    """Return the names in a list of nodes that others may have written."""
    names = expand_hostlist(hosts or "") or (hosts or "").split(",")
    return sorted(name for name in names if is_node_name(name))


def _used_seconds(launch: Launch, attempt: JobAttempt, since: float, now: float) -> float:
    """Return the seconds that an attempt ran after a time; without its end, until its log changed last."""
    started, ended = attempt.started, attempt.ended
    with contextlib.suppress(OSError):
        ended = launch.paths.log(attempt.job_id).stat().st_mtime if ended is None else ended
    return 0.0 if started is None or ended is None else max(0.0, min(ended, now) - max(started, since))


def _find_blamed(attempt: JobAttempt) -> Iterator[str]:
    """Yield the nodes that the end of an attempt names as those that failed."""
    if attempt.rule and attempt.rule not in _NOT_OF_NODES:
        yield from _names(attempt.excluded) or _names(attempt.host)


# --- statistics


def poisson_interval(failures: int) -> tuple[float, float]:
    """Return the exact interval of the mean of a Poisson variable that had this value.

    Garwood 1936 (Biometrika 28:437): the means at which as few, or as many, have half of the rest as chance.
    """
    tail = (1 - _COVERAGE) / 2

    def solve(count: int, chance: float) -> float:
        low, high = 0.0, failures + 10 * math.sqrt(failures + 1) + 10
        for _ in range(60):  # P(X <= count) falls as the mean rises
            mean = (low + high) / 2
            below = (math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))
            low, high = (mean, high) if math.fsum(below) > chance else (low, mean)
        return low

    return (solve(failures - 1, 1 - tail) if failures else 0.0), solve(failures, tail)


def mark_worse(records: Sequence[NodeRecord]) -> None:
    """Mark the nodes that fail more often by their use than all others together do, beyond chance.

    Przyborowski and Wilenski 1940 (Biometrika 31:313): with equal rates a node's part of all failures is
    binomial, with its part of the use. The chance is divided among the nodes (Bonferroni).
    """
    used = [record for record in records if record.seconds]
    total, seconds = sum(len(record.failures) for record in used), sum(record.seconds for record in used)

    def chance_of(k: int, part: float) -> float:
        ways = math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        return math.exp(ways + k * math.log(part) + (total - k) * math.log1p(-part))

    for record in used if len(used) > 1 else ():
        least, part = len(record.failures), record.seconds / seconds
        if least > part * total:  # else it fails no more often than all do
            chance = math.fsum(chance_of(k, part) for k in range(least, total + 1))
            record.is_above = chance < _CHANCE / len(used)
