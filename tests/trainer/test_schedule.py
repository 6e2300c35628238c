"""NeMo's CosineAnnealing at points worked out by hand from its formula."""

from __future__ import annotations

import math

import pytest

from trainer.optim.schedule import CosineAnnealing

pytestmark = pytest.mark.trainer


def test_without_constant_steps_the_warm_up_starts_above_zero() -> None:
    schedule = CosineAnnealing(max_lr=1.0, min_lr=0.1, warmup=4, constant=0, total=14)
    assert [schedule(step) for step in (0, 1, 4)] == pytest.approx([1 / 5, 2 / 5, 1.0])
    assert schedule(5) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.1)))
    assert schedule(9) == pytest.approx(0.55)
    assert [schedule(step) for step in (14, 15, 1000)] == pytest.approx([0.1, 0.1, 0.1])


def test_with_constant_steps_the_first_step_has_rate_zero_and_the_last_ones_the_lowest() -> None:
    schedule = CosineAnnealing(max_lr=1.0, min_lr=0.1, warmup=4, constant=6, total=20)
    assert [schedule(step) for step in (0, 1, 4)] == pytest.approx([0.0, 0.25, 1.0])
    assert schedule(9) == pytest.approx(0.55)
    assert [schedule(step) for step in (14, 15, 20, 21)] == pytest.approx([0.1] * 4)


def test_a_run_shorter_than_its_warm_up_only_warms_up() -> None:
    # gpt3/126m with trainer.max_steps=5
    schedule = CosineAnnealing(max_lr=6e-4, min_lr=6e-5, warmup=636, constant=100000, total=5)
    assert [schedule(step) for step in range(5)] == pytest.approx([6e-4 * step / 636 for step in range(5)])


def test_without_warm_up_it_starts_at_the_highest_rate() -> None:
    assert CosineAnnealing(max_lr=1.0, min_lr=0.0, warmup=0, constant=0, total=10)(0) == 1.0
