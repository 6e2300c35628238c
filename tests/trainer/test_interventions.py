"""Going back to an earlier checkpoint, and going on otherwise than before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipway.trainer.checkpoint.tensor_files import TensorFiles
from tests.trainer.ranks import Run

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

PARAMS = "exp_manager.checkpoint_callback_params"
COMMON = {
    "trainer.max_steps": 6,
    "trainer.limit_val_batches": 0,
    "model.optim.sched.max_steps": 8,
    "model.hidden_dropout": 0.1,
    f"{PARAMS}.filename": "m-{step}",
    f"{PARAMS}.every_n_train_steps": 2,
    f"{PARAMS}.save_top_k": -1,
}


def start(trainings: Any, pool: Any, name: str, directory: Path, changes: dict[str, Any]) -> Run:
    return Run(trainings, pool, name, {**COMMON, f"{PARAMS}.dirpath": str(directory), **changes}, 1)


def numbers(run: Run) -> dict[int, tuple[float, float, float]]:
    assert run.end() == [0], run.output()
    return {line["step"]: (line["loss"], line["grad_norm"], line["lr"]) for line in run.lines("train")}


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, the weights and the optimizer's states."""
    with TensorFiles(checkpoint) as files:
        return {name: files.read(name) for name in files.tensors()}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.name.startswith("m-")}


def test_training_goes_back_to_an_earlier_checkpoint_and_continues(
    trainings: Any, pool: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "saved"
    base = numbers(start(trainings, pool, "went_on", directory, {}))
    assert names(directory) == {"m-step=2", "m-step=4", "m-step=6"}

    # With nothing else changed it does the same once more, to the last bit, and leaves what was saved before.
    back = {"resume.checkpoint": "m-step=2", f"{PARAMS}.save_top_k": 1}
    assert numbers(start(trainings, pool, "back", directory, back)) == {
        step: base[step] for step in (3, 4, 5, 6)
    }
    assert names(directory) == {"m-step=2", "m-step=4", "m-step=6", "m-step=6-v1"}
    # Launched again it does not go back once more.
    again = start(trainings, pool, "back_again", directory, {**back, "trainer.max_steps": 7})
    assert set(numbers(again)) == {7}
    assert again.lines("start")[0]["resumed_from"] == str(directory / "m-step=6-v1")
    assert names(directory) == {"m-step=2", "m-step=4", "m-step=6", "m-step=7"}

    from_there = {"resume.checkpoint": str(directory / "m-step=2"), "trainer.max_steps": 4}
    fresh, other = (
        start(trainings, pool, name, tmp_path / name, {**from_there, **changes})
        for name, changes in {
            "fresh_optimizer": {"resume.load_optimizer": False},
            "other_data": {
                "resume.lr_scale": 0.5,
                "resume.data_generation": 1,
                "resume.skip_samples": [[16, 24], [27, 29]],
            },
        }.items()
    )
    values = numbers(fresh)
    # The weights are those of the checkpoint; the first update after it is already another.
    assert values[3] == base[3]
    assert values[4] != base[4]
    assert "the optimizer starts anew at step 2" in fresh.output()
    values = numbers(other)
    assert [values[step][2] for step in (3, 4)] == [0.5 * base[step][2] for step in (3, 4)]
    assert values[3][0] != base[3][0]
    assert [line["consumed_samples"] for line in other.lines("train")] == [34, 42]


def test_the_rate_is_0_for_a_while_and_an_intervention_is_undone(
    trainings: Any, pool: Any, tmp_path: Path
) -> None:
    precision = {"trainer.precision": "bf16", "model.megatron_amp_O2": True}
    directory = tmp_path / "saved"
    base = numbers(start(trainings, pool, "undisturbed", directory, precision))
    third_way = {
        **precision,
        "resume.checkpoint": "m-step=2",
        "resume.lr_freeze_steps": 3,
        "resume.load_optimizer": "masters",
    }
    values = {}
    # The steps with the rate 0 are counted from the intervention, over launches.
    for last in (3, 6):
        run = start(trainings, pool, f"third_way_{last}", directory, {**third_way, "trainer.max_steps": last})
        values |= numbers(run)
        assert "the learning rate is 0 up to step 5" in run.output()
    rates = {step: rate for step, (_, _, rate) in values.items()}
    assert rates == {3: 0.0, 4: 0.0, 5: 0.0, 6: base[6][2]}
    # The model sees the batches that it saw before.
    assert values[3][0] == base[3][0]
    before, frozen = tensors(directory / "m-step=2"), tensors(directory / "m-step=4-v1")
    moments = {name for name in before if "exp_avg" in name}
    assert moments and moments < set(before)
    for name, tensor in before.items():
        assert torch.equal(tensor, frozen[name]) == (name not in moments), name
    undone = start(trainings, pool, "undone", directory, {**precision, "resume.checkpoint": "m-step=2"})
    assert numbers(undone) == {step: base[step] for step in (3, 4, 5, 6)}


def test_a_checkpoint_that_is_not_there_is_refused(trainings: Any, pool: Any, tmp_path: Path) -> None:
    run = start(trainings, pool, "nowhere", tmp_path, {"resume.checkpoint": "m-step=3"})
    assert run.end() == [2]
    assert f"resume.checkpoint=m-step=3: {tmp_path / 'm-step=3'} is not a complete checkpoint" in run.output()
