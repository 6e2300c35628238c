"""Checkpoint names and the directory of checkpoints."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from slipway.arithmetic.indexed import FIRST_SPLIT_RULE
from slipway.common.errors import UserError
from slipway.trainer.checkpoint.marker import MARKER, Marker, read_marker
from slipway.trainer.checkpoint.naming import check_template, render
from slipway.trainer.checkpoint.store import Checkpoint, begin, find_newest, finish, list_leftovers, sync_part

pytestmark = pytest.mark.trainer

TEMPLATE = "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}"
BLANK_MARKER = Marker(
    step=200,
    consumed_samples=3200,
    world_size=1,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    architecture={},
)


def save(directory: Path, name: str, step: int = 200) -> Checkpoint:
    unfinished = begin(directory, name)
    (unfinished / "__0_0.distcp").write_text("weights")
    return finish(unfinished, name, replace(BLANK_MARKER, step=step, files=sync_part(unfinished, 0)))


def test_checkpoint_name_follows_nemos_style() -> None:
    values = {"val_loss": 4.3211, "step": 200, "consumed_samples": 3200}
    assert render(TEMPLATE, values) == "megatron_gpt--val_loss=4.32-step=200-consumed_samples=3200"
    without = render(TEMPLATE, {**values, "val_loss": None})
    assert without == "megatron_gpt--step=200-consumed_samples=3200"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("m-{stepp}", "did you mean 'step'"),
        ("a/{step}", "without '/'"),
        ("gpt", "{step}"),
        ("m-{step:z}", "m-{step:z}"),
        # A loss is no whole number: without this the name would fail after the last step.
        ("m-{val_loss:d}-{step}", "Unknown format code 'd'"),
        (".m-{step}", "without a dot in front"),
        ("latest", "{step}"),
    ],
)
def test_invalid_templates_are_refused(template: str, message: str) -> None:
    check_template(TEMPLATE)
    with pytest.raises(UserError, match=r"checkpoint_callback_params\.filename") as error:
        check_template(template)
    assert message in str(error.value)


def test_the_newest_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    """The highest step, name or time does not count: a training may start afresh, and clocks differ."""
    for step in (1000, 30, 200):
        checkpoint = save(tmp_path, f"m-step={step}", step)
    os.utime(tmp_path / "m-step=30", (2e9, 2e9))
    assert find_newest(tmp_path) == (checkpoint, {})
    assert checkpoint.path.name == "m-step=200"
    assert (tmp_path / "latest").readlink() == Path("m-step=200")
    assert find_newest(tmp_path / "absent") == (None, {})


def test_a_directory_that_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that found no checkpoint would start afresh."""
    save(tmp_path, "m")

    def scandir(path: Path) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match="Stale file handle"):
        find_newest(tmp_path)


def test_newest_checkpoint_is_found_among_twelve_of_one_name(tmp_path: Path) -> None:
    names = [save(tmp_path, "m").path.name for _ in range(12)]
    assert names == ["m", *(f"m-v{version}" for version in range(1, 12))]
    checkpoint, _ = find_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.path.name == "m-v11"
    assert (tmp_path / "latest").readlink() == Path("m-v11")


def test_incomplete_checkpoint_is_skipped_with_the_reason(tmp_path: Path) -> None:
    good = save(tmp_path, "m-step=1")
    for name, content in [
        ("cut", '{"step": 3000'),
        ("other", "[1]"),
        ("short", '{"step": 1}'),
        ("none", None),
    ]:
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / MARKER).write_text(content)
    (begin(tmp_path, "m-step=2") / MARKER).write_text((good.path / MARKER).read_text())
    (save(tmp_path, "m-step=3").path / "__0_0.distcp").write_text("weigh")
    (save(tmp_path, "m-step=4").path / "__0_0.distcp").unlink()
    (tmp_path / ".snapshot").mkdir()
    checkpoint, skipped = find_newest(tmp_path)
    assert checkpoint == good
    reasons = {path.name.split("-step=2-")[0]: reason for path, reason in skipped.items()}
    changed = f"__0_0.distcp is missing or has another size than {MARKER} says"
    unmarked = dict.fromkeys(("none", ".unfinished-m"), f"no {MARKER}")
    unreadable = dict.fromkeys(("cut", "other", "short"), f"{MARKER} cannot be read")
    assert reasons == {**unmarked, **unreadable, "m-step=3": changed, "m-step=4": changed}


def test_no_two_saves_write_into_one_directory(tmp_path: Path) -> None:
    first, second = begin(tmp_path, "m"), begin(tmp_path, "m")
    assert first != second
    assert list_leftovers(tmp_path) == sorted([first, second])


def test_a_link_that_cannot_be_set_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "latest").mkdir()
    with caplog.at_level("WARNING", logger="trainer"):
        checkpoint = save(tmp_path, "m")
    assert find_newest(tmp_path)[0] == checkpoint
    assert f"the link {tmp_path / 'latest'} cannot be set: Is a directory" in caplog.text


def test_each_rank_syncs_what_it_wrote(tmp_path: Path) -> None:
    for name in ("__0_0.distcp", "__1_0.distcp", "__10_0.distcp", "common.pt", ".metadata"):
        (tmp_path / name).write_text(name)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "__1_1.distcp").touch()
    assert sync_part(tmp_path, 0) == {"__0_0.distcp": 12, "common.pt": 9, ".metadata": 9}
    assert sync_part(tmp_path, 1) == {"__1_0.distcp": 12, "part/__1_1.distcp": 0}
    assert sync_part(tmp_path, 10) == {"__10_0.distcp": 13}


def test_a_marker_of_another_version_is_read(tmp_path: Path) -> None:
    old = '{"step": 5, "consumed_samples": 40, "world_size": 1, "tensor_model_parallel_size": 1, '
    old += '"pipeline_model_parallel_size": 1, "architecture": {}'
    (tmp_path / MARKER).write_text(old + "}")
    earlier = replace(
        BLANK_MARKER, step=5, consumed_samples=40, split_rule=FIRST_SPLIT_RULE, version=0, slipway=""
    )
    assert read_marker(tmp_path) == earlier
    (tmp_path / MARKER).write_text(old + ', "weather": "fine", "serial": 3}')
    assert read_marker(tmp_path) == replace(earlier, serial=3)
