"""The models of the keys of a T5's two stacks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml

from slipway.arithmetic.parameters import count_parameters
from tests.trainer.conftest import free_port
from tests.trainer.probing import run_probe
from tests.trainer.t5 import SEQ_LENGTH, SEQ_LENGTH_DEC, T5, both
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

PADDED = 304
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "relative": both(position_embedding_type="relative", relative_attention_num_buckets=8),
    "rope": both(position_embedding_type="rope", rotary_percentage=0.5),
    "rope_base": both(position_embedding_type="rope", rotary_percentage=0.5, rotary_base=100),
    # T5 1.1 (Raffel et al. 2019 and later): gated GELU, no biases, an output of its own.
    "v1.1": {
        **both(position_embedding_type="relative", normalization="rmsnorm", bias=False, activation="geglu"),
        "model.share_decoder_tokens_head_embeddings": False,
    },
    "relu": both(activation="relu", kv_channels=16, normalization="layernorm1p"),
    "unequal": {
        "model.decoder.num_layers": 3,
        "model.decoder.num_attention_heads": 2,
        "model.decoder.ffn_hidden_size": 48,
        "model.decoder.activation": "gelu",
    },
    "full": both(activations_checkpoint_granularity="full", activations_checkpoint_method="block"),
    "selective": both(activations_checkpoint_granularity="selective"),
    "bf16": {"trainer.precision": "bf16", "model.megatron_amp_O2": True},
}


@pytest.fixture(scope="module")
def base(configuration: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = str(tmp_path_factory.mktemp("probe"))
    return lambda changes: configuration(
        {**T5, "exp_manager.explicit_log_dir": directory, "model.data.data_impl": "mock", **changes}
    )


@pytest.fixture(scope="module")
def probe(base: Any, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("probe") / "probe.yaml"
    path.write_text(yaml.safe_dump(base({})))
    arguments = [str(path), str(free_port()), json.dumps(VARIANTS)]
    result: dict[str, Any] = run_probe(pool, "tests.trainer.probe_t5", arguments, path.parent)
    return result


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_starts_at_chance_and_learns(probe: dict[str, Any], name: str) -> None:
    numbers = probe[name]
    assert abs(numbers["loss"] - math.log(PADDED)) < 0.3
    assert numbers["after"] < numbers["loss"]
    assert numbers["grad_norm"] > 0
    assert numbers["without_gradient"] == []


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_has_as_many_parameters_as_the_checks_count(
    probe: dict[str, Any], base: Any, name: str
) -> None:
    node = base(VARIANTS[name])["model"]
    node["max_position_embeddings"] = SEQ_LENGTH
    assert probe[name]["parameters"] == count_parameters(node, PADDED, "t5")


@pytest.mark.parametrize("name", ["plain", "relative", "rope", "bf16"])
def test_the_encoder_is_seen_whole_and_the_decoder_backwards(probe: dict[str, Any], name: str) -> None:
    changed = probe[name]["changed"]
    every = list(range(SEQ_LENGTH_DEC))
    if name != "bf16":
        assert changed["encoder"] == every
    # In bf16 a small change may be none at a place, but never one where nothing may be seen.
    assert set(changed["decoder"]) <= set(every[SEQ_LENGTH_DEC // 2 :])
    assert changed["decoder"][0] == SEQ_LENGTH_DEC // 2


def test_no_two_layers_start_alike(probe: dict[str, Any]) -> None:
    assert probe["plain"]["alike"] == []


def test_recomputing_activations_changes_no_number(probe: dict[str, Any]) -> None:
    plain = probe["plain"]
    for name in ("full", "selective"):
        numbers = probe[name]
        assert (numbers["loss"], numbers["grad_norm"]) == pytest.approx((plain["loss"], plain["grad_norm"]))


def test_base_of_rotary_positions_changes_the_loss(probe: dict[str, Any]) -> None:
    # T5Model itself knows no base.
    assert probe["rope"]["loss"] != probe["rope_base"]["loss"]


def test_positions_and_outputs_have_their_weights(probe: dict[str, Any]) -> None:
    def has(name: str, part: str) -> bool:
        return any(part in weight for weight in probe[name]["names"])

    assert has("plain", "position_embeddings")
    assert has("plain", "output_layer.bias")
    assert not has("plain", "output_layer.weight")
    for name in ("relative", "rope", "v1.1"):
        assert not has(name, "position_embeddings")
    assert has("v1.1", "encoder_relative_pos_emb")
    assert has("v1.1", "decoder_relative_pos_emb")
    assert has("v1.1", "output_layer.weight")
    biases = [name for name in probe["v1.1"]["names"] if name.endswith("bias")]
    assert biases == []
