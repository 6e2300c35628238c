"""Slurm's time limits."""

from __future__ import annotations

import pytest

from launcher.config.compose import compose
from launcher.slurm.notations import format_days, format_time_limit, margin_of, parse_time_limit

MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30 * MINUTE),
        ("30:15", 30 * MINUTE + 15),
        ("4:00:00", 4 * HOUR),
        ("04:05:06", 4 * HOUR + 5 * MINUTE + 6),
        ("1-2", DAY + 2 * HOUR),
        ("1-2:30", DAY + 2 * HOUR + 30 * MINUTE),
        ("0-01:30:00", HOUR + 30 * MINUTE),
        ("6-12:00:00", 6 * DAY + 12 * HOUR),
        ("100-00:00:00", 100 * DAY),
        ("90:90", 91 * MINUTE + 30),
        ("0", None),
        ("UNLIMITED", None),
        ("infinite", None),
        ("-1", None),
    ],
)
def test_all_time_formats_of_slurm_are_read(text: str, seconds: int | None) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize(
    "text", ["banana", "", "1-", "-5", "1:2:3:4", "1-2-3", "1:", "1.5", "1d", " 30", "٣"]
)
def test_times_that_slurm_would_not_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a time limit; valid: MINUTES"):
        parse_time_limit(text)


def test_times_are_formatted() -> None:
    assert format_days(5 * DAY + 23 * HOUR + 30 * MINUTE) == "05:23:30:00"
    assert format_time_limit(6 * DAY + HOUR) == "6-01:00:00"
    assert format_time_limit(90) == "00:01:30"
    assert [margin_of(seconds) for seconds in (DAY, 3 * HOUR, HOUR, 30 * MINUTE)] == [1800, 1800, 600, 300]


@pytest.mark.parametrize(
    ("limit", "max_time"),
    [
        ("6-00:00:00", "05:23:30:00"),
        ("30", "00:00:25:00"),
        ("UNLIMITED", None),
        ("null", None),
        ("2:00:00", "00:01:40:00"),
    ],
)
def test_the_training_ends_before_its_job(limit: str, max_time: str | None) -> None:
    training = compose([f"training.run.time_limit={limit}"]).config.training
    assert training is not None
    assert training.trainer["max_time"] == max_time


def test_max_time_of_the_user_stays() -> None:
    training = compose(["training.trainer.max_time='00:01:00:00'"]).config.training
    assert training is not None
    assert training.trainer["max_time"] == "00:01:00:00"
