"""The checkpoints that are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.trainer.checkpoint.marker import Marker
from slipway.trainer.checkpoint.retention import keep_best
from slipway.trainer.checkpoint.store import REMOVING, Checkpoint, begin, finish, list_complete, sync_part
from slipway.trainer.config.saving import Saving

pytestmark = pytest.mark.trainer

BLANK_MARKER = Marker(
    step=0,
    consumed_samples=0,
    world_size=1,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    architecture={},
    training="this",
)


@pytest.fixture
def saving(tmp_path: Path) -> Saving:
    return Saving(True, tmp_path, "{step}", every=1, background=False, keep=2, monitor="val_loss", mode="min")


def save(saving: Saving, step: int, loss: float | None = None, **more: Any) -> Checkpoint:
    """Write a checkpoint as a training of one rank does, and remove surplus ones."""
    unfinished = begin(saving.directory, f"step={step}")
    (unfinished / "__0_0.distcp").write_text("weights")
    metrics = {"step": float(step)} if loss is None else {"step": float(step), "val_loss": loss}
    marker = replace(BLANK_MARKER, step=step, metrics=metrics, files=sync_part(unfinished, 0), **more)
    checkpoint = finish(unfinished, f"step={step}", marker)
    keep_best(saving, checkpoint)
    return checkpoint


def steps(saving: Saving) -> list[int]:
    return [checkpoint.marker.step for checkpoint in list_complete(saving.directory)]


def test_the_best_are_kept_and_the_newest_besides(saving: Saving) -> None:
    for step, loss in enumerate([3.0, 2.0, 2.5, 2.8, 2.9], start=1):
        save(saving, step, loss)
    assert steps(saving) == [2, 3, 5]
    save(saving, 6, 1.0)
    assert steps(saving) == [2, 6]


def test_highest_value_is_best_in_mode_max(saving: Saving) -> None:
    most = replace(saving, mode="max", monitor="step", keep=3)
    for step in range(1, 6):
        save(most, step)
    assert steps(most) == [3, 4, 5]


def test_unvalidated_checkpoint_ranks_last_and_later_step_wins_among_equals(saving: Saving) -> None:
    for step, loss in [(1, None), (2, 9.0), (3, None), (4, None), (5, 9.0), (6, 9.0), (7, None)]:
        save(saving, step, loss)
    assert steps(saving) == [5, 6, 7]


@pytest.mark.parametrize(("keep", "remaining"), [(-1, [1, 2, 3]), (0, [3]), (1, [3])])
def test_all_or_only_the_newest_are_kept(saving: Saving, keep: int, remaining: list[int]) -> None:
    for step in (1, 2, 3):
        save(replace(saving, keep=keep), step)
    assert steps(saving) == remaining


def test_files_of_others_are_kept(saving: Saving) -> None:
    (saving.directory / "step=0").mkdir()
    (saving.directory / "notes.txt").touch()
    (saving.directory / "weights-of-another-program").mkdir()
    earlier = save(saving, 9, training="an earlier one, with resume_if_exists=False")
    evaluated = save(saving, 1)
    (evaluated.path / "evaluation").mkdir()
    (evaluated.path / "evaluation" / "result.json").touch()
    for step in (2, 3, 4):
        save(saving, step, 1.0)
    names = {path.name for path in saving.directory.iterdir() if not path.is_symlink()}
    assert names == {
        "step=0",
        "notes.txt",
        "weights-of-another-program",
        earlier.path.name,
        "step=1",
        "step=3",
        "step=4",
    }


def test_a_damaged_checkpoint_is_none_of_the_best_and_stays(
    saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = save(saving, 1, 1.0)
    (damaged.path / "__0_0.distcp").write_text("wei")
    with caplog.at_level("WARNING", logger="trainer"):
        for step, loss in enumerate([2.0, 3.0, 4.0, 5.0], start=2):
            save(saving, step, loss)
    # Two that can be loaded, and the newest.
    assert steps(saving) == [1, 2, 3, 5]
    assert f"not counting checkpoint {damaged.path}: __0_0.distcp is missing or" in caplog.text


def test_a_checkpoint_that_cannot_be_removed_ends_no_training(
    saving: Saving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with caplog.at_level("WARNING", logger="trainer"):
        for step in (1, 2, 3):
            save(saving, step)
    assert steps(saving) == [2, 3]
    assert "Device or resource busy" in caplog.text


def test_a_checkpoint_that_cannot_be_renamed_ends_no_training(
    saving: Saving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target.name.startswith(REMOVING):
            raise OSError(2, "No such file or directory")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with caplog.at_level("WARNING", logger="trainer"):
        for step in (1, 2, 3):
            save(saving, step)
    assert steps(saving) == [1, 2, 3]
    assert "cannot remove" in caplog.text
