"""A batch that grows: trainings that are continued on the way, and one that cannot be divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import SEQ_LENGTH, environment, free_port
from tests.warm import WarmPool

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

CHANGES = {
    "trainer.max_steps": 10,
    "trainer.val_check_interval": 5,
    "trainer.limit_val_batches": 1,
    "model.hidden_dropout": 0.1,
    "model.micro_batch_size": 2,
    "model.global_batch_size": 8,
    # A third of 20 samples an increment: 4 from 7 consumed samples on, 6 from 14, 8 from 20.
    "model.rampup_batch_size": [2, 2, 20],
}
BATCHES = [2, 2, 2, 2, 4, 4, 6, 8, 8, 8]


class Runs:
    """Trainings of one process, forked from the pool."""

    def __init__(self, trainings: Any, pool: WarmPool) -> None:
        self._trainings, self._pool = trainings, pool

    def __call__(self, name: str, changes: dict[str, Any], *arguments: str) -> tuple[int, str, Path]:
        """Launch; return the exit code, the output, and the log directory."""
        options, log_dir = self._trainings.configure(name, {**CHANGES, **changes}, 1)
        output = log_dir.with_name(f"{name}.out")
        process = self._pool.start([*options, *arguments], environment(0, 1, free_port()), output)
        return process.wait(), output.read_text(), log_dir


@pytest.fixture(scope="module")
def runs(trainings: Any, pool: WarmPool) -> Runs:
    return Runs(trainings, pool)


def steps(log_dir: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (log_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def test_run_continued_within_its_ramp_equals_an_uninterrupted_one(runs: Runs) -> None:
    code, output, whole = runs("ramp", {})
    assert code == 0, output
    assert "growing from 2 by 2 over the first 20 samples" in output
    assert [step["global_batch"] for step in steps(whole)] == BATCHES
    assert [step["consumed_samples"] for step in steps(whole)] == [sum(BATCHES[: n + 1]) for n in range(10)]
    for step in steps(whole):
        assert step["tokens"] == step["global_batch"] * SEQ_LENGTH
        assert step["tokens_per_second"] * step["step_time"] == pytest.approx(step["tokens"])

    for arguments in (["--stop-after", "5"], []):
        code, output, parts = runs("ramp_in_parts", {}, *arguments)
        assert code == 0, output
        assert "resuming from" in output or arguments
    values = ("step", "loss", "grad_norm", "lr", "consumed_samples", "global_batch")
    expected = [[step[value] for value in values] for step in steps(whole)]
    assert [[step[value] for value in values] for step in steps(parts)] == expected


def test_a_ramp_that_cannot_be_divided_is_refused_before_the_first_step(runs: Runs) -> None:
    code, output, log_dir = runs("ramp_odd", {"model.micro_batch_size": 4})
    assert code == 2
    assert "model.rampup_batch_size=[2, 2, 20]: the first batch, 2, is not a multiple of" in output
    assert not (log_dir / "metrics.jsonl").exists() or steps(log_dir) == []
