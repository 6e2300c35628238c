"""The valid and the invalid keys of a T5's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.config.check import check_keys, table_for
from slipway.trainer.config.keys import KEYS, T5_KEYS, Implemented, Refused, status_of
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from tests.trainer.conftest import REMOVED
from tests.trainer.t5 import T5, both
from tests.trainer.test_keys import RecordingConfig

pytestmark = pytest.mark.trainer


@pytest.fixture
def flat(configuration: Any, tmp_path: Path) -> dict[str, Any]:
    files = {
        "exp_manager.explicit_log_dir": str(tmp_path),
        "model.data.data_prefix": [str(tmp_path / "text")],
    }
    return flatten(configuration({**T5, **files}))


def test_two_stacks_make_a_t5(flat: dict[str, Any]) -> None:
    check_keys(flat)
    settings = read_settings({**flat, "model.decoder.num_layers": 3})
    assert table_for(flat) is T5_KEYS
    assert settings.encoder is not None
    assert (settings.encoder.num_layers, settings.architecture.num_layers) == (2, 3)
    assert (settings.seq_length, settings.architecture.seq_length) == (32, 12)
    assert settings.tokens_per_step == 8 * 32, "what the encoder reads"


def test_configuration_without_encoder_and_decoder_is_a_gpt(configuration: Any, tmp_path: Path) -> None:
    gpt = flatten(configuration({"exp_manager.explicit_log_dir": str(tmp_path)}))
    assert table_for(gpt) is KEYS
    assert read_settings({**gpt, "model.data.data_impl": "mock"}).encoder is None
    with pytest.raises(UserError, match=r"model\.seq_length=32: a T5's key, but without model\.encoder"):
        check_keys({**gpt, "model.seq_length": 32})
    with pytest.raises(UserError, match=r"mcore_gpt=True: expected a GPT or a T5, but there"):
        check_keys({**gpt, "model.mcore_gpt": True, "model.encoder.num_layers": 2})


def test_the_settings_read_what_the_table_calls_implemented(flat: dict[str, Any]) -> None:
    more = both(
        activations_checkpoint_granularity="full",
        activations_checkpoint_method="uniform",
        layernorm_zero_centered_gamma=False,
    )
    more |= {f"model.{name}": True for name in ("megatron_amp_O2", "transformer_engine", "fp8", "fp8_hybrid")}
    config = RecordingConfig({**flat, **more, "trainer.precision": "bf16"})
    read_settings(config)
    implemented = {key for key, status in T5_KEYS.items() if isinstance(status, Implemented)}
    assert implemented <= config.read
    # A key that the table refuses is only ever read with a value that asks for nothing.
    other_keys = {
        key for key in config.read if not isinstance(status_of(key, T5_KEYS), Implemented | Refused)
    }
    assert other_keys == {"model.mcore_gpt"}, "which would make it a GPT"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "model.num_layers",
            2,
            r"make this a T5: model\.encoder\.num_layers and model\.dec",
        ),
        ("model.encoder_seq_length", 32, "a GPT's key"),
        ("model.data.eod_mask_loss", True, "a GPT's key"),
        ("model.encoder.num_layer", 2, r"did you mean 'model\.encoder\.num_layers'"),
        ("model.encoder.arch", "perceiver", "valid here: transformer"),
        ("model.decoder.relative_position_bias_self_attention_only", False, "valid here: True"),
        ("model.share_token_embeddings", False, "valid here: True"),
        ("model.pipeline_model_parallel_size", 2, "no pipeline for a T5.*valid here: 1"),
        ("model.context_parallel_size", 2, "valid here: 1"),
        ("model.data.dataset_type", "ul2", "valid here: t5"),
        ("model.data.permutation", True, "spans stay in their order"),
        ("model.data.short_seq_prob", 0.1, "valid here: 0"),
        ("model.override_vocab_size", 400, "the sentinels follow"),
    ],
)
def test_unsupported_values_are_refused(flat: dict[str, Any], key: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        check_keys({**flat, key: value})
    assert str(error.value).startswith(f"{key}={value!r}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.data.seq_length": 64}, r"data\.seq_length=64: expected the same as model\.seq_length=32"),
        ({"model.max_position_embeddings": 16}, r"at least model\.seq_length=32"),
        ({"model.data.seq_length_dec": 64, "model.max_position_embeddings": 32}, r"seq_length_dec=64"),
        (
            {"model.decoder.hidden_size": 64},
            r"model\.decoder\.hidden_size=64: expected the same as",
        ),
        ({"model.decoder.position_embedding_type": "rope"}, r"expected the same as model\.encoder\.position"),
        (
            {**both(position_embedding_type="relative"), "model.decoder.num_attention_heads": 2},
            r"model\.decoder\.num_attention_heads=2: expected the same",
        ),
        (
            {**both(position_embedding_type="rope"), "model.decoder.kv_channels": 16},
            r"model\.decoder\.kv_channels=16: expected the same",
        ),
        (both(position_embedding_type="alibi"), "one of learned_absolute, rope, relative"),
        (
            both(
                position_embedding_type="relative",
                activations_checkpoint_granularity="full",
                activations_checkpoint_method="block",
            ),
            "recomputes nothing with",
        ),
        (
            {"model.tensor_model_parallel_size": 8},
            r"encoder\.num_attention_heads=4: expected a multiple",
        ),
        (
            {
                "model.tensor_model_parallel_size": 2,
                "model.sequence_parallel": True,
                "model.data.seq_length_dec": 13,
            },
            r"model\.data\.seq_length_dec=13: expected a multiple of model\.tensor_model_parallel_size=2",
        ),
        ({"model.data.masked_lm_prob": 0.0}, "above 0"),
        ({"model.data.mean_ngram_size": 0.5}, "at least 1"),
        ({"model.decoder.num_layers": REMOVED}, r"model\.decoder\.num_layers is missing"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_valid(
    flat: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    config = {key: value for key, value in {**flat, **changes}.items() if value != REMOVED}
    with pytest.raises(UserError, match=message):
        read_settings(config)


def test_stock_keys_that_recompute_no_layer_are_accepted(flat: dict[str, Any]) -> None:
    stock = both(
        activations_checkpoint_granularity="full",
        activations_checkpoint_method="block",
        activations_checkpoint_num_layers=0,
    )
    settings = read_settings({**flat, **stock})
    assert settings.encoder is not None
    assert settings.encoder.recompute is settings.architecture.recompute is None
