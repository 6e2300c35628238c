"""The documents of a step, computed: of a T5, of mock data, and far into a growing batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.data.audit import audit, samples_of_step
from slipway.trainer.data.training_data import denoised_lengths, find_indices, make_order, open_training
from tests.trainer import indexed_files
from tests.trainer.t5 import SEQ_LENGTH, T5

pytestmark = pytest.mark.trainer

Configuration = Callable[[dict[str, Any]], dict[str, Any]]


def read(configuration: Configuration, changes: dict[str, Any]) -> Settings:
    return read_settings(flatten(configuration({"exp_manager.explicit_log_dir": "/nowhere", **changes})))


def test_documents_of_a_t5_are_the_sources_of_its_spans(configuration: Configuration, tmp_path: Path) -> None:
    documents = [[(31 * number + place) % 97 for place in range(number % 40)] for number in range(60)]
    indexed_files.write(tmp_path / "data", [[document] for document in documents], "uint16")
    settings = read(configuration, {**T5, "model.data.data_prefix": [str(tmp_path / "data")]})
    lengths = denoised_lengths(settings)
    assert lengths is not None and lengths.raw > SEQ_LENGTH - 8
    source = open_training(settings.data, find_indices(settings.data, heldout=False), lengths.raw)
    order = make_order(source, settings.seed, settings.resume)
    answer = audit(settings, 3, with_tokens=True)
    assert [sample["sample"] for sample in answer["samples"]] == list(range(16, 24))
    for sample in answer["samples"]:
        pieces = sample["pieces"]
        expected = source.window(order.window(sample["sample"]))[: lengths.raw].tolist()
        assert [token for piece in pieces for token in piece["ids"]] == expected
        for piece in pieces:
            assert documents[piece["document"]][piece["first"] : piece["end"]] == piece["ids"]


def test_mock_data_have_samples_without_documents(configuration: Configuration) -> None:
    answer = audit(read(configuration, {"model.data.data_impl": "mock"}), 2)
    assert [(sample["sample"], sample["pieces"]) for sample in answer["samples"]] == [
        (number, []) for number in range(8, 16)
    ]


@pytest.mark.parametrize("ramp", [None, [2, 2, 20], [4, 4, 1]])
def test_samples_follow_one_another_over_all_steps(
    configuration: Configuration, ramp: list[int] | None
) -> None:
    changes = {"model.data.data_impl": "mock", "model.rampup_batch_size": ramp, "trainer.max_steps": 10**9}
    settings, consumed = read(configuration, changes), 0
    states = {}
    for step in range(1, 30):
        samples = samples_of_step(settings, step)
        assert samples == range(consumed, consumed + settings.batch_after(consumed))
        states[step - 1] = consumed
        consumed = samples.stop
        # From any state before it is the same.
        for after, samples_before in states.items():
            assert samples_of_step(settings, step, after, samples_before) == samples
    last = samples_of_step(settings, 10**9)
    assert last.stop == consumed + (10**9 - 29) * 8
    for step, after in ((0, 0), (10**9 + 1, 0), (5, 5)):
        with pytest.raises(UserError, match=f"--step {step}: expected"):
            samples_of_step(settings, step, after, 0)
