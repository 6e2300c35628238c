"""Launches joined into one curve, and the closing table."""

from __future__ import annotations

import json

import pytest
from monitor_samples import FakeScheduler, Runs, append, held_out, start, train, validation, whole_training

from launcher.errors import UserError
from launcher.monitor.curves import Curves, Points, choose_evenly, find_spikes, keep_finite, smooth
from launcher.monitor.summary import subtitle, summarize, ticks
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from slipway.common.node.events import parse_event


def join_launches(*launches: list[dict[str, object]]) -> Curves:
    curves = Curves()
    for launch in launches:
        parsed = [parse_event(json.dumps(event)) for event in launch]
        curves.add(event for event in parsed if event)
    return curves


def test_a_later_launch_overrides_what_it_repeats() -> None:
    first = [
        start(),
        *(train(step, loss=1.0) for step in range(1, 121)),
        validation(100, 1.0),
        validation(120, 1.0),
    ]
    second = [
        start(100, time=2000.0),
        *(train(step, time=1900.0 + step, loss=2.0) for step in range(101, 111)),
    ]
    curves = join_launches(first, second)
    assert list(curves.steps) == list(range(1, 111))
    assert list(curves.losses[98:102]) == [1.0, 1.0, 2.0, 2.0]
    assert curves.validations == [(100, 1.0)]
    assert curves.resumed == [100]
    assert curves.seconds == 60.0 + 10.0  # the time between the launches does not count


def test_steps_out_of_order_are_sorted_whenever_they_are_read() -> None:
    points = Points("d")
    for step, value in ((5, 1.0), (3, 2.0), (4, 3.0)):
        points.put(step, value)
    assert list(points.steps) == [3, 4, 5]
    points.put(5, 4.0)
    assert (list(points.steps), list(points.columns[0])) == ([3, 4, 5], [2.0, 3.0, 4.0])
    points.cut(4)
    points.put(4, 5.0)
    assert (list(points.steps), list(points.columns[0])) == ([3, 4], [2.0, 5.0])


def test_a_launch_without_steps_drops_no_points() -> None:
    curves = join_launches(whole_training(0, 50), [start(50, time=9000.0)], [])
    assert curves.steps[-1] == 50 and curves.resumed == []


def test_a_launch_from_step_zero_begins_a_new_curve() -> None:
    curves = join_launches(
        whole_training(0, 50), [start(0, time=9000.0), train(1, time=9001.0), train(2, time=9002.0)]
    )
    assert list(curves.steps) == [1, 2]
    assert curves.validations == [] and curves.resumed == []


def test_tokens_count_the_steps_between_points() -> None:
    every_tenth = [start(), *(train(step) for step in range(10, 101, 10))]
    bigger_batches = [start(100, tokens_per_step=4096), train(110), train(120)]
    curves = join_launches(every_tenth, bigger_batches)
    assert curves.tokens == 100 * 2048 + 20 * 4096
    assert curves.tokens_per_second == pytest.approx(4096.0)


def test_tokens_of_a_growing_batch_are_summed_over_its_steps() -> None:
    steps = [{**train(step), "tokens": tokens} for step, tokens in enumerate((512, 512, 1024, 2048), start=1)]
    assert join_launches([start(), *steps]).tokens == 4096


def test_smoothing() -> None:
    assert smooth([1.0, 5.0, 3.0], window=1) == [1.0, 5.0, 3.0]
    assert smooth([1.0, 5.0, 3.0, 3.0], window=3) == [1.0, 3.0, 3.0, 3.0]
    assert smooth([]) == []
    assert list(smooth([1.0, 3.0, 3.0, 3.0], window=3, at=[0, 3])) == [1.0, 3.0]
    steps, losses = keep_finite([1, 3, 4], [float("nan"), float("inf"), 1.0])
    assert (list(steps), list(losses)) == ([4], [1.0])


FALL = [7.6 - 0.1 * step for step in range(20)]


@pytest.mark.parametrize(
    ("losses", "spikes"),
    [
        ([], []),
        (FALL, []),
        ([*FALL, 5.6, 9.84, 5.6, 5.5], [21]),
        ([*FALL, 6.5, 8.2, 9.8, 8.8, 7.1, 5.6, 5.5], [22]),  # one spike of several steps, at its peak
        ([*FALL, 9.0, *[5.6] * 30, 8.0, 5.5], [20, 51]),
        ([*FALL, *[5.6, 6.0] * 20], []),  # the noise of batches
    ],
)
def test_spikes(losses: list[float], spikes: list[int]) -> None:
    assert find_spikes(losses) == spikes


def test_a_single_outlier_is_no_part_of_the_smoothed_curve() -> None:
    assert smooth([*[6.0] * 10, 10.6, *[6.0] * 10], window=5) == [6.0] * 21


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 300, [0, 50, 100, 150, 200, 250, 300]),
        (4.2, 8.9, [5, 6, 7, 8]),
        (5, 5, [5]),
        (0, 7, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 8 if low == 0 else 6) == expected


def test_thinning_keeps_the_ends() -> None:
    thinned = choose_evenly(1000, 50)
    assert len(thinned) == 50 and thinned[0] == 0 and thinned[-1] == 999
    assert list(choose_evenly(3, 50)) == [0, 1, 2]


def test_summary(runs: Runs, scheduler: FakeScheduler) -> None:
    append(runs.launch(), whole_training(0, 180))
    append(runs.launch(number=2), whole_training(150, 300))
    scheduler.set("12", JobStatus(State.COMPLETED, None, "n[1-2]", "00:01:15", 0))
    summary, curves = summarize(runs.base / "gpt3_tiny")
    assert (summary.world, summary.tensor, summary.data, summary.step, summary.max_steps) == (
        4,
        2,
        2,
        300,
        300,
    )
    assert summary.tokens == 300 * 2048 and summary.state == "COMPLETED" and summary.job_id == "12"
    assert summary.below_entropy is True
    rows = dict(summary.rows())
    assert rows["below entropy"] == "yes, by 1.7353 nats"
    assert rows["held-out loss"] == "7.5885 → 4.3647"
    assert rows["tasks"] == "2 nodes × 2 tasks = 4"
    assert len(curves.steps) == 300
    assert json.loads(json.dumps(summary.to_json(), allow_nan=False))["launches"] == 2


def test_a_model_that_learned_nothing_is_not_below_the_entropy(runs: Runs, scheduler: FakeScheduler) -> None:
    append(runs.launch(), [start(), held_out(6.1), train(1, loss=float("nan")), validation(1, 9.0)])
    summary, _ = summarize(runs.base / "gpt3_tiny")
    assert (
        summary.below_entropy is False and dict(summary.rows())["below entropy"] == "no, above by 2.9000 nats"
    )
    assert summary.to_json()["last_loss"] == "nan" and summary.state == "UNKNOWN"


def test_summary_names_all_parallel_sizes(runs: Runs, scheduler: FakeScheduler) -> None:
    sizes = {"tensor": 1, "pipeline": 2, "virtual": 2, "context": 1, "data": 1}
    append(runs.launch(nodes=1, tasks_per_node=2), [start(**sizes), train(1)])
    summary, _ = summarize(runs.base / "gpt3_tiny")
    rows = dict(summary.rows())
    assert rows["parallel"] == "tensor 1 × pipeline 2 × virtual 2 × data 1"
    assert rows["tasks"] == "1 node × 2 tasks = 2"
    assert subtitle(summary).split("  ·  ")[1:3] == [
        "1 node × 2 tasks",
        "tensor 1 × pipeline 2 × virtual 2 × data 1",
    ]


def test_the_entropy_of_a_t5_counts_sentinels(runs: Runs, scheduler: FakeScheduler) -> None:
    append(runs.launch(), [start(), held_out(5.4, has_sentinels=True), train(1), validation(1, 5.0)])
    summary, _ = summarize(runs.base / "gpt3_tiny")
    entropy = dict(summary.rows())["unigram entropy"]
    assert entropy == "5.4000 nats of the held-out targets, sentinels included"


def test_summary_of_a_run_without_validation(runs: Runs, scheduler: FakeScheduler) -> None:
    append(runs.launch(), [start(), train(1), train(2)])
    summary, _ = summarize(runs.base / "gpt3_tiny")
    rows = dict(summary.rows())
    assert summary.below_entropy is None and rows["below entropy"] == rows["held-out loss"] == "-"


def test_summary_needs_a_training_step(runs: Runs, scheduler: FakeScheduler) -> None:
    runs.launch()
    with pytest.raises(UserError, match="no training step yet"):
        summarize(runs.base / "gpt3_tiny")
