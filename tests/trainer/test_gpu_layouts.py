"""Megatron-LM's own assertions hold for a GPU's configuration of each stock size and of drawn layouts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from launcher.config.compose import BatchComposer
from slipway.trainer.config.load import flatten
from tests.trainer.conftest import config_with, free_port
from tests.trainer.megatron_rules import RULES
from tests.trainer.probing import run_probe
from tests.trainer.test_stock_sizes import SIZES, launch_config
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer
ALLOWED = [size for size in SIZES if size != "t5/41b"]


@pytest.fixture(scope="module")
def results(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory, composer = tmp_path_factory.mktemp("layouts"), BatchComposer(["engine=megatron"])
    base = {"exp_manager.explicit_log_dir": str(directory), "model.data.data_impl": "mock"}
    shape = {
        "model.hidden_size": 128,
        "model.num_attention_heads": 8,
        "model.encoder_seq_length": 256,
    }
    (directory / "base.yaml").write_text(yaml.safe_dump(config_with({**base, **shape})))
    sizes = {size: flatten(launch_config(composer, size)) for size in ALLOWED}
    (directory / "sizes.json").write_text(json.dumps(sizes, default=str))
    arguments = [str(directory / name) for name in ("base.yaml", "sizes.json")]
    result: dict[str, Any] = run_probe(
        pool, "tests.trainer.probe_layouts", [*arguments, str(free_port())], directory
    )
    return result


def test_every_stock_size_holds_the_rules(results: dict[str, Any]) -> None:
    assert results["sizes"] == {size: [] for size in ALLOWED}


def test_drawn_layouts_hold_the_rules(results: dict[str, Any]) -> None:
    assert results["drawn"] is None
    assert results["examples"] >= 200


def test_every_rule_applies_to_some_configuration(results: dict[str, Any]) -> None:
    assert [rule.source for rule in RULES if not results["applied"].get(rule.source)] == []


def test_keys_decide_the_requests_to_transformer_engine(results: dict[str, Any]) -> None:
    kernels = results["kernels"]
    # Without sequence parallelism there is nothing that tensor ranks would exchange so.
    assert kernels["asked"] == [True, False]
    (buffers,) = kernels["buffers"]
    # 256 tokens, micro batches of 2.
    assert (buffers["shape"], buffers["tp_size"]) == ([512, 128], 2)
    assert buffers["quantization_modes"] == ["none"]
    assert kernels["fused"] == [True, None]


def test_a_gpu_without_transformer_engine_is_an_error_unless_the_configuration_says_so(
    results: dict[str, Any],
) -> None:
    kernels = results["kernels"]
    assert "model.transformer_engine=True: it cannot be imported here" in kernels["lacks"]
    assert "No module named" in kernels["lacks"]
    assert kernels["without"] is None
    assert kernels["on a CPU"] is None


def test_two_stages_that_exchange_in_one_batch_break_a_rule(results: dict[str, Any]) -> None:
    assert "579: virtual stages that do not overlap need three" in results["swapped"]
