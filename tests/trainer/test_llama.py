"""The effects of Llama's keys on a model: rotary positions, documents kept apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from tests.trainer.conftest import free_port
from tests.trainer.probing import run_probe
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="module")
def probe(configuration: Any, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("probe")
    changes = {"exp_manager.explicit_log_dir": str(directory), "model.data.data_impl": "mock"}
    path = directory / "probe.yaml"
    path.write_text(yaml.safe_dump(configuration(changes)))
    arguments = [str(path), str(free_port())]
    result: dict[str, Any] = run_probe(pool, "tests.trainer.probe_llama", arguments, directory)
    return result


def nemo_scaled(frequency: float, factor: float) -> float:
    """Scale as ``apply_rope_scaling`` of NeMo 2.4.1 by default: Llama 3.1's context of 8,192 tokens grows."""
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192:
        return frequency / factor
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / factor + smooth * frequency


def test_positions_are_scaled_as_nemo_scales_them(probe: dict[str, Any]) -> None:
    plain = [500000 ** (-2 * pair / 64) for pair in range(32)]
    assert probe["plain"] == pytest.approx(plain, rel=1e-5)
    for name, factor in (("scaled", 8), ("by four", 4)):
        expected = [nemo_scaled(frequency, factor) for frequency in plain]
        assert probe[name] == pytest.approx(expected, rel=1e-4)
    # All three ranges occur.
    ratios = [scaled / frequency for scaled, frequency in zip(probe["scaled"], plain, strict=True)]
    assert {round(min(ratios), 3), round(max(ratios), 3)} == {0.125, 1.0}
    assert any(0.13 < ratio < 0.99 for ratio in ratios)


def test_positions_are_interpolated_and_pairs_are_neighbours(probe: dict[str, Any]) -> None:
    assert probe["halved"] == pytest.approx(0.5)
    assert probe["interleaved"] is True


def test_documents_by_lengths_have_the_gradients_of_those_by_a_mask(probe: dict[str, Any]) -> None:
    by_mask, by_length = probe["lengths"]["norms"]
    assert probe["lengths"]["is_mask"] == [True, False]
    assert min(by_mask) > 1e-6
    assert by_length == pytest.approx(by_mask, rel=1e-5)


@pytest.mark.parametrize("backend", ["local", "sdpa"])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_document_does_not_see_the_one_before(probe: dict[str, Any], backend: str, position: str) -> None:
    distances = probe["documents"][f"{backend}, {position}"]
    assert distances["together"] > 1e-4
    assert distances["apart"] == 0
    # It is as it would be in a window of its own; rotary positions are the same up to rounding.
    assert distances["alone"] < 1e-5


def test_dropout_is_drawn_by_the_same_kernel_on_all_ranks(probe: dict[str, Any]) -> None:
    assert probe["always masked"] == [False, True]


def test_layers_share_one_mask_of_documents(probe: dict[str, Any]) -> None:
    assert probe["masks"] == {"plain": 1, "recomputed": 1}


def test_repeated_keys_and_values_are_those_of_each_heads_group(probe: dict[str, Any]) -> None:
    assert probe["groups"] < 1e-12
