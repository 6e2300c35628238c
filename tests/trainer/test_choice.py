"""The checkpoint that a launch starts from: an intervention is made once, however many launches follow."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from slipway.arithmetic.interventions import DEFAULTS
from slipway.common.errors import UserError
from slipway.trainer.checkpoint.choice import Choice, Chooser
from slipway.trainer.checkpoint.store import Checkpoint, begin, finish, sync_part
from slipway.trainer.config.resume import Resume, read_resume
from slipway.trainer.config.saving import Saving
from slipway.trainer.config.values import Values
from tests.trainer.test_retention import BLANK_MARKER

pytestmark = pytest.mark.trainer

CONTINUES = {"exp_manager.resume_if_exists": True}
AGAIN = Resume(checkpoint="m-step=1", data_generation=1)


@pytest.fixture
def saving(tmp_path: Path) -> Saving:
    return Saving(True, tmp_path, "m-{step}", every=1, background=True, keep=-1, monitor="step", mode="max")


def choose(saving: Saving, resume: Resume) -> Choice | None:
    return Chooser(saving, resume).choose()


def save(saving: Saving, step: int, resume: Resume | None = None) -> Checkpoint:
    unfinished = begin(saving.directory, f"m-step={step}")
    (unfinished / "__0_0.distcp").write_text("weights")
    record = {} if resume is None else resume.record()
    marker = replace(BLANK_MARKER, step=step, resume=record, files=sync_part(unfinished, 0))
    return finish(unfinished, f"m-step={step}", marker)


def test_a_training_continues_from_its_newest_checkpoint(saving: Saving) -> None:
    assert choose(saving, Resume()) is None
    # The first version's markers do not know of interventions.
    for resume in (None, Resume()):
        newest = save(saving, 2, resume)
        assert choose(saving, Resume()) == Choice(newest, load_optimizer=True, is_branch=False)


def test_training_goes_back_once(saving: Saving) -> None:
    first, _ = save(saving, 1), save(saving, 2)
    went_back = Choice(first, load_optimizer=True, is_branch=True)
    assert choose(saving, AGAIN) == went_back
    # It was killed before it saved: the next launch goes back as well, and then no more.
    assert choose(saving, AGAIN) == went_back
    later = save(saving, 2, AGAIN)
    assert later.path.name == "m-step=2-v1"
    assert choose(saving, AGAIN) == Choice(later, load_optimizer=True, is_branch=False)


def test_another_intervention_starts_from_the_result_of_the_one_before(saving: Saving) -> None:
    save(saving, 1)
    later = save(saving, 2, AGAIN)
    lower = Resume(lr_scale=0.5, load_optimizer=False)
    assert choose(saving, lower) == Choice(later, load_optimizer=False, is_branch=False)
    newest = save(saving, 3, lower)
    assert choose(saving, lower) == Choice(newest, load_optimizer=True, is_branch=False)
    # Back to the first once more, in another order of the data.
    once_more = replace(AGAIN, data_generation=2)
    choice = choose(saving, once_more)
    assert choice is not None
    assert choice.checkpoint.marker.step == 1
    assert choice.is_branch


def test_a_checkpoint_of_another_training_starts_this_one(saving: Saving, tmp_path: Path) -> None:
    other = save(replace(saving, directory=tmp_path / "other"), 7)
    choice = choose(saving, Resume(checkpoint=str(other.path)))
    assert choice == Choice(other, load_optimizer=True, is_branch=True)


def test_incomplete_checkpoint_is_refused_and_complete_ones_are_listed(saving: Saving) -> None:
    save(saving, 1)
    (save(saving, 20).path / "__0_0.distcp").write_text("torn")
    (saving.directory / "m-step=3").mkdir()
    for name, message in [
        ("m-step=2", "there is no such directory"),
        ("m-step=3", "no complete.json"),
        ("m-step=20", "__0_0.distcp is missing or has"),
    ]:
        with pytest.raises(UserError, match=f"resume.checkpoint={name}: ") as error:
            choose(saving, Resume(checkpoint=name))
        assert message in str(error.value)
        assert f"complete ones in {saving.directory} are m-step=1; did you mean 'm-step=1'?" in str(
            error.value
        )


def test_latest_points_at_the_newest_checkpoint(saving: Saving) -> None:
    save(saving, 1)
    newest = save(saving, 2)
    (saving.directory / "latest").unlink()
    choose(saving, AGAIN)
    assert (saving.directory / "latest").readlink() == Path(newest.path.name)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("checkpoint", "latest", "or null for the newest"),
        ("checkpoint", "/run/checkpoints/latest", "or null for the newest"),
        ("checkpoint", "checkpoints/m-step=1", "absolute path"),
        ("checkpoint", ".unfinished-m-step=1-0a", "name or the absolute path"),
        ("checkpoint", 3, "non-empty string"),
        ("load_optimizer", "no", "True or False"),
        ("load_optimizer", "moments", "masters for the fp32 weights"),
        ("lr_scale", 0, "above 0; resume.lr_freeze_steps"),
        ("lr_scale", -1, "at least 0"),
        ("data_generation", -1, "at least 0"),
        ("data_generation", 0.5, "whole number"),
        ("lr_freeze_steps", -1, "at least 0"),
        *(
            ("skip_samples", value, "such as [[640, 960]]")
            for value in ([640, 960], "640", [[640]], [[960, 640]], [[5, 5]], [[-1, 4]], [[0, 4], [3, 9]])
        ),
        *(("skip_samples", [[first, 960]], "ascending") for first in (True, 1.0, "1", 2**63)),
        *(
            ("data_weights", value, "such as [[640, [0.7, 0.3]]]")
            for value in (
                640,
                [[640]],
                [[640, 0.7]],
                [[0, [1, 1]]],
                [[9, [1]], [9, [2]]],
                [[9, [1]], [8, [2]]],
            )
        ),
        *(
            ("data_weights", [[640, weights]], "at least 0, and one above")
            for weights in ([], [0, 0], [1, -1], [1, "1"], [1, True], [1, float("inf")], [1, float("nan")])
        ),
    ],
)
def test_invalid_values_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=f"resume.{key}=") as error:
        read_resume(Values({f"resume.{key}": value, **CONTINUES}))
    assert message in str(error.value)


def test_resume_checkpoint_is_refused_for_a_start_at_step_0() -> None:
    with pytest.raises(UserError, match=r"resume_if_exists=False, which starts at step 0"):
        read_resume(Values({"resume.checkpoint": "m-step=1", "exp_manager.resume_if_exists": False}))


def test_the_node_may_be_left_out_or_null() -> None:
    assert read_resume(Values({})) == Resume()
    nothing = dict.fromkeys(asdict(Resume()))
    assert read_resume(Values({f"resume.{key}": value for key, value in nothing.items()})) == Resume()
    values = {
        "checkpoint": "m-step=1",
        "load_optimizer": "masters",
        "lr_scale": "5e-1",
        "lr_freeze_steps": 3,
        "data_generation": 1,
        "skip_samples": [[0, 4], [4, 9]],
        "data_weights": [[9, [1, 0.5]], [20, [0, 1]]],
    }
    resume = read_resume(Values({**{f"resume.{key}": value for key, value in values.items()}, **CONTINUES}))
    ranges, weights = ((0, 4), (4, 9)), ((9, (1, 0.5)), (20, (0, 1)))
    assert resume == Resume("m-step=1", "masters", 0.5, 3, 1, ranges, weights)
    # A marker holds it as JSON.
    assert resume.record() == json.loads(json.dumps(resume.record())) == {**values, "lr_scale": 0.5}


def test_the_defaults_are_those_with_which_markers_are_compared() -> None:
    assert Resume().record() == DEFAULTS
