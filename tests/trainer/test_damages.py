"""Damaged checkpoints: each is found, and costs that checkpoint and nothing else."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from slipway.trainer.checkpoint.marker import MARKER
from tests.trainer.conftest import environment, free_port
from tests.trainer.probing import run_probe

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

PARAMS = "exp_manager.checkpoint_callback_params"
SEED = int(os.environ.get("SLIPWAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
TRAINING = {
    "trainer.max_steps": 12,
    "trainer.limit_val_batches": 0,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "model.num_layers": 1,
    "model.global_batch_size": 2,
    f"{PARAMS}.filename": "m-{step}",
    f"{PARAMS}.every_n_train_steps": 2,
    f"{PARAMS}.save_top_k": -1,
}
NAMES = [f"m-step={step}" for step in (2, 4, 6)]


def environments(world: int) -> tuple[dict[str, str], ...]:
    port = free_port()
    return tuple(environment(rank, world, port) for rank in range(world))


@pytest.mark.parametrize(("world", "count"), [(1, 160), (2, 40)])
def test_training_never_continues_from_a_damaged_checkpoint(
    trainings: Any, pool: Any, tmp_path: Path, world: int, count: int
) -> None:
    print(f"SLIPWAY_TEST_SEED={SEED}")
    changes = {**TRAINING, "model.tensor_model_parallel_size": world}
    outcome = trainings(f"pristine{world}", changes, world, ["--stop-after", "6"])
    assert outcome.codes == [0] * world, outcome.stderr
    work = {**changes, f"{PARAMS}.dirpath": str(tmp_path / "work")}
    options, _ = trainings.configure(f"damaged{world}", work, world)
    config = Path(options[1]) / f"{options[3]}.yaml"
    pristine = str(outcome.log_dir / "checkpoints")
    entries = run_probe(
        pool,
        "tests.trainer.probe_damages",
        [str(config), pristine, str(count), f"{SEED} {world}"],
        tmp_path,
        environments(world),
    )
    expected = {entry["name"]: entry for entry in entries[: len(NAMES)]}
    assert list(expected) == NAMES
    for entry in entries[len(NAMES) :]:
        damaged_count = len(entry["damages"])
        newest = NAMES[-1 - damaged_count]
        assert {key: entry[key] for key in ("name", "step", "losses")} == expected[newest], entry
        # With the marker of an older one it is no longer the newest, and what is older is not looked into.
        aside = [
            name
            for name, damage in zip(reversed(NAMES), entry["damages"], strict=False)
            if damage != f"swap_steps {MARKER}"
        ]
        assert entry["aside"] == sorted(aside), entry
        assert entry["left"] == sorted([*["damaged"][: len(aside)], *set(NAMES).difference(aside)]), entry
