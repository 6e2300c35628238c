"""Checkpoints whose optimizer states are in shards: valid loads, refused loads, and the way out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.checkpoint import compatible, reshard, store
from slipway.trainer.checkpoint.choice import Choice
from slipway.trainer.checkpoint.marker import DP_RESHARDABLE, FULLY_RESHARDABLE, NOT_SHARDED
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.config.layout import Layout
from tests.trainer.ranks import Run
from tests.trainer.test_continuation import SHARDED
from tests.trainer.test_retention import BLANK_MARKER

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

PARAMS = "exp_manager.checkpoint_callback_params"
LAYOUT = Layout(world=2, tensor=1, pipeline=1, virtual=1, context=1, data=2, micro_batches=1)
SAVED = replace(
    BLANK_MARKER,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=1,
    context_parallel_size=1,
)


def refusal(saved_format: str, form: str, layout: Layout = LAYOUT, load_optimizer: bool = True) -> str | None:
    """Return why a checkpoint is refused, or None."""
    checkpoint = Checkpoint(Path("/runs/a/step=2"), replace(SAVED, optimizer=saved_format))
    try:
        compatible.check_optimizer(Choice(checkpoint, load_optimizer, False), form, layout)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("changes", [{"tensor": 2}, {"pipeline": 2}, {"virtual": 2}])
def test_other_shards_are_refused_with_the_reshard_step(changes: dict[str, int]) -> None:
    text = refusal(DP_RESHARDABLE, DP_RESHARDABLE, replace(LAYOUT, **changes))
    assert text
    (name,) = changes
    assert f"{name}_model_parallel_size=1, now 2" in text or f"model.{name}_pipeline_model" in text
    assert "python -m slipway.trainer.checkpoint.reshard /runs/a/step=2" in text
    assert "resume.load_optimizer=False" in text


def test_other_numbers_of_ranks_and_contexts_are_loaded() -> None:
    assert refusal(DP_RESHARDABLE, DP_RESHARDABLE, replace(LAYOUT, world=4, data=2, context=2)) is None
    assert refusal(FULLY_RESHARDABLE, DP_RESHARDABLE, replace(LAYOUT, tensor=2, pipeline=4)) is None
    assert refusal(NOT_SHARDED, NOT_SHARDED, replace(LAYOUT, tensor=2, pipeline=4)) is None
    # Earlier versions did not record it.
    assert refusal("", DP_RESHARDABLE, replace(LAYOUT, tensor=2)) is None


def test_whole_and_sharded_states_do_not_fit_and_the_weights_do() -> None:
    for saved_format, form in ((NOT_SHARDED, DP_RESHARDABLE), (DP_RESHARDABLE, NOT_SHARDED)):
        text = refusal(saved_format, form)
        assert text
        assert "resume.load_optimizer=False" in text
        assert refusal(saved_format, form, load_optimizer=False) is None
    text = refusal(DP_RESHARDABLE, FULLY_RESHARDABLE)
    assert text
    assert "buckets" in text


def test_training_continues_with_other_tensor_size_after_resharding(
    trainings: Any, pool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "saved"
    common = {**SHARDED, f"{PARAMS}.dirpath": str(directory), "trainer.limit_val_batches": 0}

    def run(name: str, until: int, changes: dict[str, Any], fault: str = "shard:all:0") -> Run:
        return Run(trainings, pool, name, {**common, "trainer.max_steps": until, **changes}, 2, fault=fault)

    tensor = {"model.tensor_model_parallel_size": 2}
    assert run("sharded", 2, {}).end() == [0, 0]
    (first,) = store.list_complete(directory)
    assert first.marker.optimizer == DP_RESHARDABLE
    # Each rank wrote a share.
    sizes = [size for name, size in first.marker.files.items() if name.endswith(".distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 0.8 * max(sizes)

    refused = run("sharded_tensor", 4, tensor)
    assert refused.end() == [2, 2], refused.output()
    assert f"python -m slipway.trainer.checkpoint.reshard {first.path}" in refused.output()
    buckets = {"model.optim.overlap_grad_sync": True, "model.optim.ddp_bucket_size": 4000}
    other = run("other_buckets", 4, buckets)
    assert other.end() == [2, 2], other.output()
    assert "are in other buckets than this training's" in other.output()
    assert store.list_complete(directory) == [first]

    assert reshard.main([str(directory)]) == 0
    copy = store.list_complete(directory)[-1]
    assert str(copy.path) in capsys.readouterr().out
    assert copy.marker.optimizer == FULLY_RESHARDABLE
    assert copy.marker.serial == first.marker.serial + 1
    assert store.find_damage(first) is None
    resharded = run("resharded_tensor", 4, tensor)
    assert resharded.end() == [0, 0], resharded.output()
    assert str(copy.path) in resharded.output()
    assert [line["step"] for line in resharded.lines("train")] == [3, 4]
    assert reshard.main([str(copy.path)]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_reshard_refuses_a_directory_without_a_whole_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reshard.main([str(tmp_path / "nothing")]) == 2
    assert "there is no such directory" in capsys.readouterr().err
    assert reshard.main([str(tmp_path)]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
