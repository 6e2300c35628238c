"""The models of the architecture keys, the optimizer's groups, and the CPU shim's guard."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.conftest import REPOSITORY, free_port
from tests.trainer.probing import run_probe
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

FULL = "model.activations_checkpoint_granularity"
LLAMA = {
    "model.activation": "fast-swiglu",
    "model.normalization": "rmsnorm",
    "model.position_embedding_type": "rope",
    "model.rotary_percentage": 0.5,
    "model.num_query_groups": 2,
    "model.bias": False,
    "model.share_embeddings_and_output_weights": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama": LLAMA,
    "improved": {"model.normalization": "layernorm1p", "model.use_scaled_init_method": False},
    "full": {FULL: "full", "model.activations_checkpoint_method": "uniform"},
    "selective": {FULL: "selective"},
    "kv_channels": {"model.kv_channels": 16, "model.activation": "squared-relu"},
    "deterministic": {"model.deterministic_mode": True},
    "unclipped": {"trainer.gradient_clip_val": 0.0},
    "bf16": {"trainer.precision": "bf16", "model.megatron_amp_O2": True},
}


@pytest.fixture(scope="module")
def probe(configuration: Any, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("probe")
    changes = {"exp_manager.explicit_log_dir": str(directory), "model.data.data_impl": "mock"}
    path = directory / "probe.yaml"
    path.write_text(yaml.safe_dump(configuration(changes)))
    arguments = [str(path), str(free_port()), json.dumps(VARIANTS)]
    result: dict[str, Any] = run_probe(pool, "tests.trainer.probe_models", arguments, directory)
    return result


def test_the_shim_stays_one_small_file() -> None:
    (shim,) = (Path(__file__).resolve().parents[2] / "slipway").rglob("*shim*.py")
    assert len(shim.read_text().splitlines()) < 150


def test_the_shim_changes_nothing_with_cuda() -> None:
    command = [sys.executable, "-m", "tests.trainer.probe_shim"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer == {"installed": False, "changed": False, "imported": False}


def test_shim_is_installed_without_cuda(probe: dict[str, Any]) -> None:
    assert probe["cpu"] is True


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_starts_at_chance_and_learns(probe: dict[str, Any], name: str) -> None:
    numbers = probe["variants"][name]
    assert abs(numbers["loss"] - math.log(304)) < 0.3
    assert numbers["after"] < numbers["loss"]
    assert numbers["grad_norm"] > 0


def test_deterministic_mode_changes_no_number_in_32_bits(probe: dict[str, Any]) -> None:
    plain, other = (probe["variants"][variant] for variant in ("plain", "deterministic"))
    assert [other[key] for key in ("loss", "grad_norm", "after")] == [
        plain[key] for key in ("loss", "grad_norm", "after")
    ]


def test_recomputing_activations_changes_no_number(probe: dict[str, Any]) -> None:
    plain = probe["variants"]["plain"]
    for name in ("full", "selective"):
        numbers = probe["variants"][name]
        assert (numbers["loss"], numbers["grad_norm"]) == pytest.approx((plain["loss"], plain["grad_norm"]))


def test_norm_is_reported_without_clipping(probe: dict[str, Any]) -> None:
    plain, unclipped = probe["variants"]["plain"], probe["variants"]["unclipped"]
    assert unclipped["grad_norm"] == pytest.approx(plain["grad_norm"])


def test_llama_has_its_parameters(probe: dict[str, Any]) -> None:
    numbers = probe["variants"]["llama"]
    assert not any(name.endswith("bias") for name in numbers["names"])
    assert not any("position_embeddings" in name for name in numbers["names"])
    assert any("output_layer" in name for name in numbers["names"])
    hidden, ffn, layers = 32, 128, 2
    # Two of four heads' keys and values; a gated unit has two input matrices.
    layer = hidden * hidden * 2 + hidden * 2 * 16 + 3 * hidden * ffn + 2 * hidden
    assert numbers["parameters"] == 2 * 304 * hidden + layers * layer + hidden


def test_biases_and_norms_are_not_decayed(probe: dict[str, Any]) -> None:
    # AdamW multiplies by 1 - lr * weight decay = 0.95.
    assert probe["decay"]["matrices"] == pytest.approx([0.95])
    assert probe["decay"]["vectors"] == [1.0]


def test_a_step_waits_for_the_norm_of_the_gradient_alone(probe: dict[str, Any]) -> None:
    assert probe["waits"] == [1, 1], "the norm, and the reduction of the step"


def test_a_gradient_that_is_not_finite_ends_the_training(probe: dict[str, Any]) -> None:
    assert probe["overflow"].startswith(
        ("the gradient norm of step 1 is inf", "the gradient norm of step 1 is nan")
    )


def test_a_fresh_layernorm1p_is_a_layer_norm(probe: dict[str, Any]) -> None:
    assert probe["norm"] < 1e-6


def test_layernorm1p_adds_one_in_32_bits(probe: dict[str, Any]) -> None:
    assert probe["small_scale"]


def test_tokens_of_another_tokenizer_are_refused(probe: dict[str, Any]) -> None:
    assert "ends at 9: were they made with another tokenizer?" in probe["foreign"]
