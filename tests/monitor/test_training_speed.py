"""The speed of a rung, the rank that explains a drop, and the search for a slow node."""

from __future__ import annotations

from typing import Any

import pytest
from monitor_samples import Runs, append

from launcher.jobs.launches import Launch, read_launch
from launcher.monitor.training_speed import TrainingSpeed, find_cause, measure_speed
from launcher.ramp import bisect, drop_ramp
from tests.job_marks import leave_marks


def measure(runs: Runs, *events: dict[str, Any]) -> TrainingSpeed | None:
    directory = runs.launch()
    leave_marks(directory, "11", started=1, nodes="n1,n2")
    append(directory, events)
    launch: Launch = read_launch(directory.parents[1], 1)
    return measure_speed(launch)


def train(step: int, speed: float | None, tokens: int = 1000) -> dict[str, Any]:
    return {"kind": "train", "time": 1, "step": step, "loss": 1, "tokens_per_second": speed, "tokens": tokens}


def phases(step: int, **spreads: tuple[float, int]) -> dict[str, Any]:
    by_phase = {
        name: {"max": spread + 1, "spread": spread, "slowest_rank": rank}
        for name, (spread, rank) in spreads.items()
    }
    return {
        "kind": "phases",
        "time": 1,
        "step": step,
        "first_step": step,
        "last_step": step,
        "phases": by_phase,
    }


START = {"kind": "start", "time": 1, "step": 0}


def test_speed_is_the_median_after_the_first_step_of_the_last_start(runs: Runs) -> None:
    steps = [train(1, 1.0), train(2, 400.0), train(3, 500.0), train(4, 40.0)]
    speed = measure(runs, START, train(1, 9e9), train(2, 9e9), START, *steps)
    assert speed is not None
    assert (speed.per_gpu, speed.step_seconds, speed.hosts) == (100.0, 2.5, ("n1", "n2"))


@pytest.mark.parametrize(
    "events", [[], [START], [START, train(1, 5.0)], [START, train(1, 5.0), train(2, None)]]
)
def test_speed_of_too_few_steps_is_unknown(runs: Runs, events: list[dict[str, Any]]) -> None:
    assert measure(runs, *events) is None


def test_rank_that_the_others_wait_for_explains_a_drop(runs: Runs) -> None:
    """Its node is furthest behind over all steps; waiting in a reduction blames nobody."""
    slow = [
        phases(1, data=(99.0, 0)),
        phases(2, forward_backward=(0.8, 2), reduction=(9.0, 0), data=(0.5, 1)),
        phases(3, forward_backward=(0.9, 3), reduction=(9.0, 1)),
        {**phases(3), "phases": [1]},
        {**phases(3), "phases": {"data": {"spread": "wide"}}},
        phases(4, forward_backward=(1.0, 3)),
    ]
    speed = measure(runs, START, train(1, 1.0), train(2, 500.0), *slow)
    assert speed is not None and speed.slowest is not None
    assert str(speed.slowest) == (
        "rank 3 on n2 takes 900 ms longer than the fastest rank for forward_backward"
    )
    for seconds, cause in (
        (1.0, speed.slowest),  # 0.9 of the second that a step takes longer
        (0.1, None),  # 0.9 of 1.9 seconds
        (9.0, None),  # it is faster
        (None, None),
    ):
        assert find_cause(speed, TrainingSpeed(200.0, seconds, ("n1",), None)) is cause


@pytest.mark.parametrize("slow", [None, *range(4, 16)])
@pytest.mark.parametrize("least", [1, 2, 4])
def test_bisection_finds_each_node_in_few_jobs(slow: int | None, least: int) -> None:
    nodes, jobs = [f"n{index}" for index in range(16)], list[list[str]]()

    def is_slow(some: Any) -> bool:
        jobs.append(list(some))
        return f"n{slow}" in some

    cleared = nodes[: max(least, 2)]
    suspects = [node for node in nodes if node not in cleared]
    sizes = [size for size in range(1, 17) if size % least == 0]
    left, is_sure = bisect(suspects, cleared, sizes, is_slow)
    assert is_sure is (slow is not None)
    assert slow is None or left == [f"n{slow}"]
    assert len(jobs) <= 5, "ceil(log2(14)) + 1"
    assert all(len(job) == len(set(job)) and len(job) % least == 0 for job in jobs)


def test_bisection_stops_where_no_job_fits() -> None:
    assert bisect(["n1", "n2"], [], [2], lambda _: True) == (["n1", "n2"], True)
    assert bisect(["n1", "n2"], [], [4], lambda _: True) == (["n1", "n2"], False)


@pytest.mark.parametrize(
    "words",
    ["--ramp 1,2", "--ramp=1,2", "--ramp 1 --ramp-drop 5", "--ramp-d=5 --ramp=1", "--ramp 1 --ramp-dro 3"],
)
def test_command_of_the_launch_has_no_ramp(words: str) -> None:
    command = ["slipway", "launch", "a=1", *words.split(), "--no-check", "x", "--", "--ramp"]
    assert drop_ramp(command) == ["slipway", "launch", "a=1", "--no-check", "x", "--", "--ramp"]
