"""NeMo's schedules: at points recorded from NeMo itself, and at some worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.config.optimization import read_optimization
from slipway.trainer.config.values import Values
from slipway.trainer.optim.schedule import Schedule, make_schedule, remark

pytestmark = pytest.mark.trainer

# Written by tests/nemo/record_schedules.py; tests/nemo compares it with NeMo again.
RECORDED = json.loads((Path(__file__).parent / "data" / "nemo_schedules.json").read_text())


def schedule_of(lr: float, steps: int, lr_scale: float = 1.0, **sched: Any) -> Schedule:
    """Return the schedule of a configuration's ``model.optim`` in a training of so many steps."""
    flat = {"model.optim.lr": lr, **{f"model.optim.sched.{name}": value for name, value in sched.items()}}
    return make_schedule(read_optimization(Values(flat), steps), lr_scale)


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: json.dumps(record["sched"]))
def test_rates_equal_those_of_nemo(record: dict[str, Any]) -> None:
    """They are equal to the last bit: the same operations in the same order.

    The cosine is an exception: its last bit may differ between the mathematics libraries of two machines.
    Multiplied by half the range and rounded again, that is less than two ulps of the highest rate.
    """
    schedule, rates = (
        schedule_of(record["lr"], record["max_steps"], **record["sched"]),
        record["rates"],
    )
    assert len(rates) >= 1000
    tolerance = 2 * math.ulp(record["lr"]) if record["sched"]["name"] == "CosineAnnealing" else 0.0
    far = [(step, rate) for step, rate in enumerate(rates) if not abs(schedule(step) - rate) <= tolerance]
    assert far == []


def test_recording_has_warm_ups_and_constant_ends_of_either_kind() -> None:
    names = {frozenset(record["sched"]) - {"min_lr", "last_epoch"} for record in RECORDED}
    cosine = [set(), {"warmup_steps", "constant_steps"}, {"warmup_ratio", "constant_ratio"}, {"warmup_ratio"}]
    line = [set(), {"warmup_ratio"}, {"warmup_steps"}]
    assert {frozenset({"name", *keys}) for keys in (*cosine, *line, {"constant_steps"})} == names


def test_warm_up_starts_above_zero_without_constant_steps() -> None:
    schedule = schedule_of(1.0, 14, name="CosineAnnealing", min_lr=0.1, warmup_steps=4, constant_steps=0)
    assert [schedule(step) for step in (0, 1, 4)] == pytest.approx([1 / 5, 2 / 5, 1.0])
    assert schedule(5) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.1)))
    assert schedule(9) == pytest.approx(0.55)
    assert [schedule(step) for step in (14, 15, 1000)] == pytest.approx([0.1, 0.1, 0.1])


def test_constant_steps_begin_with_rate_zero_and_end_with_the_lowest() -> None:
    schedule = schedule_of(1.0, 20, name="CosineAnnealing", min_lr=0.1, warmup_steps=4, constant_steps=6)
    assert [schedule(step) for step in (0, 1, 4)] == pytest.approx([0.0, 0.25, 1.0])
    assert schedule(9) == pytest.approx(0.55)
    assert [schedule(step) for step in (14, 15, 20, 21)] == pytest.approx([0.1] * 4)


def test_a_run_shorter_than_its_warm_up_only_warms_up() -> None:
    # gpt3/126m with trainer.max_steps=5
    schedule = schedule_of(
        6e-4, 5, name="CosineAnnealing", min_lr=6e-5, warmup_steps=636, constant_steps=100000
    )
    assert [schedule(step) for step in range(5)] == pytest.approx([6e-4 * step / 636 for step in range(5)])


def test_rate_starts_highest_without_warm_up() -> None:
    assert (
        schedule_of(1.0, 10, name="CosineAnnealing", min_lr=0.0, warmup_steps=0, constant_steps=0)(0) == 1.0
    )
    assert schedule_of(1.0, 10, name="WarmupAnnealing", min_lr=0.0, warmup_steps=0)(0) == 1.0


def test_rate_is_constant_where_nemo_would_divide_by_zero() -> None:
    schedule = schedule_of(1.0, 10, name="CosineAnnealing", min_lr=0.25, warmup_steps=0, constant_steps=10)
    assert [schedule(step) for step in (0, 5, 10, 11)] == [0.25] * 4


def test_warmup_annealing_falls_in_a_straight_line() -> None:
    schedule = schedule_of(1.0, 14, name="WarmupAnnealing", min_lr=0.5, warmup_steps=4)
    assert [schedule(step) for step in (0, 3, 4)] == pytest.approx([0.2, 0.8, 1.0])
    assert [schedule(step) for step in (5, 9, 14, 15, 99)] == pytest.approx([0.95, 0.75, 0.5, 0.5, 0.5])
    # Within its warm-up at the last step, and past both at once after it.
    short = schedule_of(1.0, 2, name="WarmupAnnealing", min_lr=0.5, warmup_steps=4)
    assert [short(step) for step in (2, 4, 5)] == pytest.approx([0.6, 1.0, 0.5])


def test_a_ratio_is_a_share_of_the_schedules_steps_rounded_down() -> None:
    sched = {"warmup_ratio": 0.015, "constant_ratio": 0.25, "min_lr": 0.0}
    optimization = read_optimization(
        Values({"model.optim.lr": 1.0, **{f"model.optim.sched.{key}": sched[key] for key in sched}}), 1010
    )
    assert (optimization.warmup_steps, optimization.constant_steps, optimization.schedule_steps) == (
        15,
        252,
        1010,
    )


def test_a_schedule_that_ends_elsewhere_than_the_training() -> None:
    assert schedule_of(1.0, 10, name="WarmupAnnealing", max_steps=20)(10) == 0.5
    assert schedule_of(1.0, 10, name="WarmupAnnealing")(10) == 0.0


def test_whole_schedule_is_scaled() -> None:
    plain, half = schedule_of(1e-3, 100, warmup_steps=10), schedule_of(1e-3, 100, 0.5, warmup_steps=10)
    assert [half(step) for step in range(120)] == [plain(step) / 2 for step in range(120)]


@pytest.mark.parametrize(
    ("sched", "message"),
    [
        (
            {"warmup_steps": 5, "warmup_ratio": 0.1},
            r"sched\.warmup_ratio=0\.1: expected null with .*steps=5",
        ),
        ({"constant_steps": 5, "constant_ratio": 0.1}, r"sched\.constant_ratio=0\.1: expected null with"),
        ({"warmup_ratio": 1.01}, "at most 1"),
        ({"warmup_ratio": -0.1}, "at least 0"),
        ({"name": "WarmupAnnealing", "constant_steps": 5}, r"sched\.constant_steps=5: expected null or 0"),
        (
            {"name": "WarmupAnnealing", "constant_ratio": 0.5},
            r"sched\.constant_ratio=0\.5: expected null or 0",
        ),
        ({"min_lr": 2.0}, r"sched\.min_lr=2: expected at most model\.optim\.lr=1"),
        ({"name": "PolynomialDecayAnnealing"}, "one of CosineAnnealing, WarmupAnnealing"),
    ],
)
def test_invalid_schedules_are_refused(sched: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        schedule_of(1.0, 100, **sched)


def test_a_schedule_without_room_to_fall_is_remarked() -> None:
    def remark_of(max_steps: int) -> str | None:
        flat = {f"model.optim.sched.{part}_steps": 5 for part in ("warmup", "constant")}
        return remark(read_optimization(Values({"model.optim.lr": 1.0, **flat}), max_steps))

    assert remark_of(11) is None
    assert remark_of(10) == (
        "warm-up (5) and constant steps (5) fill the 10 steps of the schedule: "
        "the learning rate does not fall in between"
    )
