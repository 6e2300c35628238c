"""Checkpoint names and the directory of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainer.checkpoint.naming import check_template, render
from trainer.checkpoint.store import MARKER, Marker, begin, finish, newest
from trainer.errors import UserError

pytestmark = pytest.mark.trainer

TEMPLATE = "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}"
MARKED = Marker(
    step=200,
    consumed_samples=3200,
    world_size=1,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    architecture={},
)


def test_a_name_in_nemos_style() -> None:
    values = {"val_loss": 4.3211, "step": 200, "consumed_samples": 3200}
    assert render(TEMPLATE, values) == "megatron_gpt--val_loss=4.32-step=200-consumed_samples=3200-last"
    without = render(TEMPLATE, {**values, "val_loss": None})
    assert without == "megatron_gpt--step=200-consumed_samples=3200-last"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("m-{stepp}", "did you mean 'step'"),
        ("a/{step}", "without '/'"),
        ("gpt", "{step}"),
        ("m-{step:z}", "m-{step:z}"),
        # A loss is no whole number: without this the name would fail after the last step.
        ("m-{val_loss:d}-{step}", "Unknown format code 'd'"),
    ],
)
def test_templates_that_cannot_be_filled_in(template: str, told: str) -> None:
    check_template(TEMPLATE)
    with pytest.raises(UserError, match=r"checkpoint_callback_params\.filename") as error:
        check_template(template)
    assert told in str(error.value)


def test_the_newest_complete_checkpoint_by_step(tmp_path: Path) -> None:
    for step in (200, 1000, 30):
        finish(begin(tmp_path, f"m-step={step}-last"), replace(MARKED, step=step))
    begin(tmp_path, "m-step=2000-last")
    torn = tmp_path / "m-step=3000-last"
    torn.mkdir()
    (torn / MARKER).write_text('{"step": 3000')
    found, skipped = newest(tmp_path)
    assert found is not None
    assert found.path.name == "m-step=1000-last"
    assert found.marker.step == 1000
    assert {path.name for path in skipped} == {".unfinished-m-step=2000-last", "m-step=3000-last"}
    assert (tmp_path / "latest").readlink() == Path("m-step=30-last")
    assert newest(tmp_path / "absent") == (None, [])


def test_a_taken_name_is_not_overwritten(tmp_path: Path) -> None:
    first = finish(begin(tmp_path, "m"), MARKED)
    second = finish(begin(tmp_path, "m"), MARKED)
    assert (first.name, second.name) == ("m", "m-v1")
    assert (tmp_path / "latest").readlink() == Path("m-v1")
