"""The speed of a short training per GPU, and the rank that the others wait for, by its phases."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from statistics import median, mode
from typing import Any, NamedTuple

from launcher.jobs.launches import Launch
from launcher.monitor.readers import all_events
from slipway.common.files import read_text
from slipway.common.node.events import Start, Train

# Ranks wait for the slowest one there: a long reduction blames nobody.
_WAITING = ("reduction",)
# A rank explains a slow step if it alone takes this part of the added time.
_EXPLAINS = 0.5
_METRICS_BYTES = 64 << 20


class SlowRank(NamedTuple):
    """The rank that takes the longest for a phase; `seconds` are those of a step that the fastest waits."""

    phase: str
    rank: int
    host: str
    seconds: float

    def __str__(self) -> str:
        waits = f"{self.seconds * 1000:.0f} ms longer than the fastest rank"
        return f"rank {self.rank} on {self.host} takes {waits} for {self.phase}"


class TrainingSpeed(NamedTuple):
    """Medians over the steps after the first: tokens per second of a GPU, and the seconds of a step."""

    per_gpu: float
    step_seconds: float | None
    hosts: tuple[str, ...]
    slowest: SlowRank | None


def measure_speed(launch: Launch) -> TrainingSpeed | None:
    """Return the speed of the last start of a launch; None without two steps that have one."""
    steps: list[Train] = []
    for event in all_events(launch):
        if isinstance(event, Start):
            steps.clear()
        elif isinstance(event, Train):
            steps.append(event)
    speeds = [(step.tokens_per_second, step.tokens) for step in steps[1:] if step.tokens_per_second]
    if not speeds:
        return None
    seconds = [tokens / speed for speed, tokens in speeds if tokens]
    attempts, gpus = launch.attempts, launch.nodes * launch.manifest.tasks_per_node
    hosts = tuple((attempts[-1].nodes or "").split(",")) if attempts else ()
    per_gpu = median(speed for speed, _ in speeds) / gpus
    return TrainingSpeed(per_gpu, median(seconds) if seconds else None, hosts, _find_slowest(launch, hosts))


def find_cause(now: TrainingSpeed, before: TrainingSpeed) -> SlowRank | None:
    """Return the slowest rank if its phase is most of the time that a step takes longer than before."""
    if now.slowest is None or now.step_seconds is None or before.step_seconds is None:
        return None
    added = now.step_seconds - before.step_seconds
    return now.slowest if now.slowest.seconds >= _EXPLAINS * added > 0 else None


def _find_slowest(launch: Launch, hosts: tuple[str, ...]) -> SlowRank | None:
    """Return the slowest rank of the phase in which one node is the furthest behind; our trainer's alone."""
    behind: defaultdict[tuple[str, int], float] = defaultdict(float)
    ranks: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    steps = 0
    for record in _phase_records(launch):
        # Anybody may have written the file.
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            spreads = [
                (phase, values["slowest_rank"], float(values["spread"]))
                for phase, values in record["phases"].items()
                if phase not in _WAITING
            ]
            steps += 1
            for phase, rank, seconds in spreads:
                place = phase, rank // launch.manifest.tasks_per_node
                if place[1] < len(hosts):
                    behind[place] += seconds
                    ranks[place].append(rank)
    if not behind:
        return None
    worst = max(behind, key=behind.__getitem__)
    return SlowRank(worst[0], mode(ranks[worst]), hosts[worst[1]], behind[worst] / steps)


def _phase_records(launch: Launch) -> Iterator[dict[str, Any]]:
    """Yield the records of phases since the trainer's last start, without that of the first step."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        text = read_text(launch.paths.metrics, _METRICS_BYTES, errors="replace")
        for line in text[max(text.rfind('{"kind": "start"'), 0) :].splitlines():
            if line.startswith('{"kind": "phases"') and (record := json.loads(line))["first_step"] > 1:
                yield record
