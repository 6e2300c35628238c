"""The phases of a step: exclusive times, compared over the ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.trainer.conftest import Trainings
from trainer.report.phases import PHASES, PhaseTimer, compare

pytestmark = pytest.mark.trainer

# Longer than any phase of so small a model, and than what a busy machine adds to most of them.
DELAY_MS = 150


@pytest.fixture(scope="module")
def slowed(trainings: Trainings) -> Any:
    """Return a training of two ranks; rank 1 sleeps before each forward pass."""
    changes = {
        "trainer.max_steps": 7,
        "trainer.val_check_interval": 5,
        "trainer.limit_val_batches": 1,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": 5,
    }
    outcome = trainings("slowed", changes, world=2, sabotage=f"slow:1:{DELAY_MS}")
    assert outcome.codes == [0, 0], outcome.stderr
    return outcome


def test_slow_rank_shows_in_its_phase_and_waiting_in_that_of_the_other(slowed: Any) -> None:
    lines = slowed.lines("phases")
    steps = [step for line in lines for step in range(line["first_step"], line["last_step"] + 1)]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines] == [3, 4, 5, 6, 7, 7]
    for line in lines:
        assert line["phases"]["forward_backward"]["max"] >= DELAY_MS / 1000
    middle = sorted(line["phases"]["forward_backward"]["spread"] for line in lines)[len(lines) // 2]
    assert middle > DELAY_MS / 2000
    slowest = [(line["phases"]["forward_backward"], line["phases"]["reduction"]) for line in lines[1:-1]]
    ranks = [(forward["slowest_rank"], reduction["slowest_rank"]) for forward, reduction in slowest]
    assert ranks.count((1, 0)) > len(ranks) / 2


def test_validation_and_save_count_to_the_step_after_them(slowed: Any) -> None:
    *lines, last = slowed.lines("phases")
    assert {"data", "forward_backward", "reduction", "optimizer"} <= set(lines[0]["phases"])
    assert not {"validation", "save"} & {name for line in lines for name in line["phases"]}
    assert {"validation", "save"} <= set(last["phases"])


def test_phase_inside_another_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    timer = PhaseTimer(torch.device("cpu"), completed=4)
    batches = timer.items("data", iter([1, 2]))
    for _ in range(2):
        with timer.phase("forward_backward"):
            now += 1
            next(batches)
            timer.timed("reduction", lambda: None)()
            with timer.phase("reduction"):
                now += 4
            now += 2
        now += 100
        timer.end_step()
    assert timer.take()[0] == range(5, 6)
    timer.end()
    steps, seconds = timer.take()
    assert steps == range(6, 7)
    assert dict(zip(PHASES, seconds, strict=True)) == {
        **dict.fromkeys(PHASES, 0.0),
        "forward_backward": 3.0,
        "reduction": 4.0,
    }


def test_comparison_names_the_slowest_rank() -> None:
    ranks = [[0.0] * 6, [0.5, 0, 0, 0, 0, 0], [0.25, 0, 0, 0, 0, 0]]
    assert compare(ranks) == {"data": {"max": 0.5, "spread": 0.5, "slowest_rank": 1}}
