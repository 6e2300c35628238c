"""The splits of a training that an earlier version began, and what a checkpoint says of its training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipway import __version__
from slipway.arithmetic.indexed import FIRST_SPLIT_RULE, SPLIT_RULE
from slipway.trainer.checkpoint.marker import MARKER, read_marker
from slipway.trainer.checkpoint.store import split_rule
from slipway.trainer.config.load import flatten, load_config
from slipway.trainer.config.settings import read_settings

pytestmark = pytest.mark.trainer

# Of 40 documents the rule of earlier versions trains on 14, and megatron-core's on 13.
THIRDS = {"model.data.splits_string": "1,1,1", "trainer.max_steps": 2, "trainer.val_check_interval": 2}
NEW = ("split_rule", "version", "slipway", "configuration", "checksums", "checksum")


@pytest.fixture(scope="module")
def begun(trainings: Any) -> Any:
    """Return a training of two steps."""
    outcome = trainings("thirds", THIRDS)
    assert outcome.codes == [0], outcome.stderr
    return outcome


def checkpoint_of(log_dir: Path) -> Path:
    return (log_dir / "checkpoints" / "latest").resolve()


def test_a_checkpoint_says_how_it_came_about(begun: Any, trainings: Any) -> None:
    marker = read_marker(checkpoint_of(begun.log_dir))
    assert marker is not None
    assert (marker.version, marker.slipway, marker.split_rule) == (1, __version__, SPLIT_RULE)
    assert marker.configuration == flatten(load_config(trainings.root, "thirds"))
    assert read_settings(marker.configuration).optimization.lr == 0.01


def test_a_new_training_divides_as_megatron_core(begun: Any) -> None:
    assert "tokens in 13 documents" in begun.stdout[0]
    assert "an earlier version" not in begun.stdout[0]


def test_a_training_goes_on_with_the_splits_that_it_began_with(begun: Any, trainings: Any) -> None:
    """Continue checkpoints of an earlier version, which say nothing of the rule: twice, by its own too."""
    path = checkpoint_of(begun.log_dir) / MARKER
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in NEW}))
    for steps in (3, 4):
        outcome = trainings("thirds", {**THIRDS, "trainer.max_steps": steps})
        assert outcome.codes == [0], outcome.stderr
        assert "tokens in 14 documents" in outcome.stdout[0]
        assert "as an earlier version rounded them" in outcome.stdout[0]
        marker = read_marker(checkpoint_of(begun.log_dir))
        assert marker is not None
        assert (marker.step, marker.split_rule, marker.version) == (steps, FIRST_SPLIT_RULE, 1)
        # The first checkpoint does not say how long the training was to be.
        assert ("trainer.max_steps=4, planned were 3" in outcome.stdout[0]) is (steps == 4)
    assert "model.optim.sched.max_steps=3 keeps it" in outcome.stdout[0]
    anew = trainings("thirds", {**THIRDS, "exp_manager.resume_if_exists": False})
    assert "tokens in 13 documents" in anew.stdout[0]


def test_the_rule_is_that_of_the_first_place_with_a_checkpoint(tmp_path: Path) -> None:
    old = tmp_path / "old" / "m-step=1"
    old.mkdir(parents=True)
    (old / MARKER).write_text(
        '{"step": 1, "consumed_samples": 8, "world_size": 1, "tensor_model_parallel_size": 1, '
        '"pipeline_model_parallel_size": 1, "architecture": {}}'
    )
    assert split_rule() == split_rule(tmp_path / "none", tmp_path) == SPLIT_RULE
    assert split_rule(old) == split_rule(old.parent) == split_rule(tmp_path / "none", old) == FIRST_SPLIT_RULE


def test_a_split_without_a_window_is_refused_with_the_way_out(trainings: Any) -> None:
    short = trainings("short_validation", {"model.data.splits_string": "100,0,0"})
    assert short.codes == [2]
    assert "the validation split of" in short.stderr[0]
    assert "trainer.limit_val_batches=0 trains without validation" in short.stderr[0]
