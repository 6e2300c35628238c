"""The table of keys, and the errors for configuration values."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import model_keys
from slipway.trainer.config.check import check_keys, find_unused, report_unused
from slipway.trainer.config.keys import KEYS, Implemented, status_of
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.report.provenance import overridden_keys

pytestmark = pytest.mark.trainer

COMPILED = {"model.compile_layers": True}
CALLBACK = "exp_manager.checkpoint_callback_params"


@pytest.fixture
def flat(configuration: Any, tmp_path: Path) -> dict[str, Any]:
    prefix = str(tmp_path / "text_document")
    return flatten(
        configuration({"exp_manager.explicit_log_dir": str(tmp_path), "model.data.data_prefix": [prefix]})
    )


def test_a_misspelt_key_is_refused_with_the_right_spelling(flat: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"model\.num_layer=4: unknown key; did you mean 'model\.num_layers'"):
        check_keys({**flat, "model.num_layer": 4})


def test_keys_without_effect_are_reported_with_the_reason(flat: dict[str, Any], tmp_path: Path) -> None:
    keys = find_unused({**flat, "model.fp8_margin": 0, "model.transformer_engine": True}, cuda=False)
    assert "FP8 is Transformer Engine's" in keys["model.fp8_margin"]
    assert "Transformer Engine" in keys["model.transformer_engine"]
    assert "model.num_layers" not in keys
    for overridden, notes in (
        ([], []),
        (["+training.model.fp8_margin=0", "training=gpt3/tiny"], ["fp8_margin"]),
    ):
        (tmp_path / "launcher.json").write_text(json.dumps({"overrides": overridden}))
        *own, others = report_unused(keys, overridden_keys(tmp_path), tmp_path / "log")
        assert [line.split(": ")[1] for line in own] == [f"model.{name}" for name in notes]
        assert others.startswith(f"{len(keys) - len(notes)} keys have no effect here: ")
    assert overridden_keys(tmp_path / "nowhere") == set()
    assert report_unused({}, (), tmp_path) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.optim.sched.last_epoch", 10, "valid here: -1 or null"),
        ("model.fp8_params", True, "weights are kept in bf16"),
        ("model.use_emha", True, "valid here: False"),
        ("model.fp32_residual_connection", True, "valid here: False"),
        ("model.low_freq_factor", 2, "valid here: 1"),
        ("model.activations_checkpoint_layers_per_pipeline", 1, "valid here: null or 0"),
        (f"{CALLBACK}.save_weights_only", True, "a training continues from all of its state"),
        (f"{CALLBACK}.every_n_epochs", 2, "every_n_train_steps says how often"),
        (f"{CALLBACK}.train_time_interval", "00:01:00:00", "every_n_train_steps says how often"),
        # In Python 1 == True.
        ("model.mcore_gpt", 1, "valid here: True"),
    ],
)
def test_unsupported_values_are_refused(flat: dict[str, Any], key: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_keys({**flat, key: value})
    assert str(error.value).startswith(f"{key}={value!r}")
    assert message in str(error.value)


def test_the_very_small_configuration_passes(flat: dict[str, Any]) -> None:
    check_keys(flat)
    settings = read_settings(flat)
    assert settings.optimization.lr == 0.01  # YAML 1.1 reads '1e-2' as text
    assert settings.tokens_per_step == 8 * 32


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.num_layers", "four", "expected a number"),
        ("model.num_layers", 2.5, "expected a whole number"),
        ("model.num_layers", 10**400, "expected a number"),
        ("model.num_layers", math.nan, "expected a number"),
        ("model.num_layers", {}, "expected a number"),
        ("model.seed", 2**63, "below 2^63"),
        ("model.tokenizer.vocab_file", "a\0b", "a non-empty string"),
        ("model.hidden_size", 33, "divisor of model.hidden_size=33"),
        ("model.num_query_groups", 3, "divisor of model.num_attention_heads=4"),
        ("model.hidden_dropout", 1.0, "below 1"),
        ("model.activation", "swigl", "did you mean 'swiglu'"),
        ("model.normalization", "batchnorm", "layernorm1p"),
        ("model.attention_backend", "flash", "one of auto, transformer_engine, sdpa, local"),
        ("model.compile_layers", "ture", "one of auto, True, False; did you mean 'True'?"),
        ("model.compile_layers", 1, "one of auto, True, False"),
        ("model.data.seq_length", 64, "the same as model.encoder_seq_length=32"),
        ("model.max_position_embeddings", 16, "at least"),
        ("model.data.splits_string", "90,10,0,0", "three weights"),
        ("model.data.data_prefix", [0.5, "/a", "/b"], "weights and prefixes in pairs"),
        ("model.data.data_prefix", [10**400, "/a"], "[weight, prefix,"),
        ("model.data.data_prefix", {}, "[weight, prefix,"),
        ("model.optim.sched.name", "WarmupAnneal", "did you mean 'WarmupAnnealing'"),
        ("model.optim.sched.warmup_ratio", 0.1, "null with model.optim.sched.warmup_steps=2"),
        ("model.optim.sched.constant_ratio", 1.5, "at most 1"),
        ("model.do_layer_norm_weight_decay", "yes", "True or False"),
        ("model.rampup_batch_size", [4, 2], "three whole numbers"),
        ("model.rampup_batch_size", [4, 2, 0], "three whole numbers"),
        ("model.rampup_batch_size", [4, 2.0, 10], "three whole numbers"),
        ("model.rampup_batch_size", [8, 2, 10], "below model.global_batch_size=8"),
        ("model.rampup_batch_size", [2, 4, 10], "lead from 2 to model.global_batch_size=8"),
        ("model.optim.sched.min_lr", 1.0, "at most"),
        ("model.optim.betas", [0.9], "two numbers"),
        *(
            (
                "trainer.precision",
                word,
                "expected bf16, or 32 where the GPU has no bf16, such as a V100 or T4",
            )
            for word in (16, "16", "16-mixed", "16-true", "fp16", "float16")
        ),
        ("trainer.precision", 64, "one of bf16"),
        ("trainer.accelerator", "tpu", "one of gpu, cuda, cpu, auto"),
        ("trainer.precision", "bf16", "megatron_amp_O2"),
        ("trainer.max_time", 1800, "days:hours:minutes:seconds"),
        ("trainer.max_time", "00:00:00:3²", "days:hours:minutes:seconds"),
        ("trainer.val_check_interval", 0.25, "whole number of steps"),
        ("trainer.limit_val_batches", 1.0, "whole number of global batches"),
        (f"{CALLBACK}.monitor", "val_los", "did you mean 'val_loss'"),
        (f"{CALLBACK}.mode", "mn", "did you mean 'min'"),
        (f"{CALLBACK}.save_top_k", -2, "at least -1"),
        (f"{CALLBACK}.every_n_train_steps", -1, "at least 0"),
        (f"{CALLBACK}.filename", "{stepp}", "did you mean 'step'"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_valid(
    flat: dict[str, Any], key: str, value: object, message: str
) -> None:
    with pytest.raises(UserError) as error:
        read_settings({**flat, key: value})
    assert message in str(error.value)
    assert key.rsplit(".", 1)[-1] in str(error.value) or "hidden_size" in str(error.value)


@pytest.mark.parametrize(("bias", "expected"), [(True, False), (False, True)])
def test_qkv_bias_means_nothing_beside_bias(flat: dict[str, Any], bias: bool, expected: bool) -> None:
    keys = {**flat, "model.qkv_bias": True, "model.bias": bias}
    check_keys(keys)
    shape = read_settings(keys).architecture
    assert shape.qkv_bias is expected
    assert ("qkv_bias" in model_keys(shape)) is expected


def test_openai_gelu_is_gelu_and_nothing_else(flat: dict[str, Any]) -> None:
    gelu = {**flat, "model.openai_gelu": True}
    assert read_settings({**gelu, "model.activation": "geglu"}).architecture.activation == "geglu"
    with pytest.raises(
        UserError, match=r"model\.openai_gelu=True: expected False, as model\.activation=swiglu"
    ):
        read_settings({**gelu, "model.activation": "swiglu"})


def test_a_checkpoint_follows_each_validation_unless_told_otherwise(flat: dict[str, Any]) -> None:
    interval = f"{CALLBACK}.every_n_train_steps"
    assert read_settings(flat).saving.every == read_settings(flat).val_interval == 4
    assert read_settings({**flat, interval: None}).saving.every == 4
    assert read_settings({**flat, interval: 0}).saving.every == 0
    assert read_settings({**flat, interval: 7}).saving.every == 7


def test_table_has_all_checkpoint_keys_of_nemo_and_lightning(flat: dict[str, Any]) -> None:
    """NeMo's CallbackParams has these fields, with these defaults."""
    nemo = {
        "filepath": None,
        "dirpath": None,
        "filename": None,
        "monitor": "val_loss",
        "verbose": True,
        "save_last": True,
        "save_top_k": 3,
        "save_weights_only": False,
        "mode": "min",
        "auto_insert_metric_name": True,
        "every_n_epochs": 1,
        "every_n_train_steps": None,
        "train_time_interval": None,
        "prefix": None,
        "postfix": ".nemo",
        "save_best_model": False,
        "always_save_nemo": False,
        "save_nemo_on_train_end": False,
        "model_parallel_size": None,
        "save_on_train_epoch_end": False,
        "async_save": False,
    }
    config = {**flat, **{f"{CALLBACK}.{name}": value for name, value in nemo.items()}}
    check_keys(config)
    del flat[f"{CALLBACK}.filename"]
    ours = read_settings(flat).saving
    assert ours.background
    assert read_settings(config).saving == replace(ours, background=False)


def test_a_missing_value_is_named(flat: dict[str, Any]) -> None:
    del flat["model.num_layers"]
    with pytest.raises(UserError, match=r"model\.num_layers is missing"):
        read_settings(flat)


def test_the_time_limit_is_the_shorter_of_the_two(flat: dict[str, Any]) -> None:
    limits = {"trainer.max_time": "01:02:03:04", "exp_manager.max_time_per_run": "00:00:30:00"}
    assert read_settings({**flat, **limits}).max_seconds == 1800
    assert read_settings({**flat, "trainer.max_time": "01:02:03:04"}).max_seconds == 93784
    assert read_settings(flat).max_seconds is None


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"trainer.devices": 4}, 2, "but 2 were started"),
        ({"trainer.devices": 4, "trainer.num_nodes": None}, 6, "6 processes were started"),
        ({"trainer.devices": 3, "model.tensor_model_parallel_size": 2}, 3, "divisor of the 3 processes"),
        ({"trainer.devices": 8, "model.tensor_model_parallel_size": 8}, 8, "num_attention_heads=4"),
        ({"trainer.devices": 2, "model.global_batch_size": 6}, 2, "= 4"),
        (
            {**COMPILED, "model.tensor_model_parallel_size": 2, "trainer.devices": 2},
            2,
            "compile_layers=True: model.tensor_model_parallel_size=2: torch.compile cannot trace",
        ),
        ({**COMPILED, "model.context_parallel_size": 2, "trainer.devices": 2}, 2, "context_parallel_size=2"),
        ({**COMPILED, "model.transformer_engine": True}, 1, "Transformer Engine's own .* auto or False"),
        ({**COMPILED, "model.attention_backend": "local"}, 1, "only sdpa can be traced"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(
    flat: dict[str, Any], changes: dict[str, Any], world: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_layout(read_settings({**flat, **changes}), world)


def test_layers_are_compiled_on_a_cpu_whatever_a_gpu_would_use(flat: dict[str, Any]) -> None:
    stock = {"model.transformer_engine": True, "trainer.accelerator": "cpu"}
    assert make_layout(read_settings({**flat, **COMPILED, **stock}), 1)


def test_micro_batches_are_shared_among_copies(flat: dict[str, Any]) -> None:
    layout = make_layout(read_settings({**flat, "trainer.devices": 2}), 2)
    assert (layout.tensor, layout.data, layout.micro_batches) == (1, 2, 2)


class RecordingConfig(dict[str, Any]):
    """A flat configuration that remembers which keys were looked up."""

    def __init__(self, flat: dict[str, Any]) -> None:
        super().__init__(flat)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def test_the_settings_read_the_keys_that_the_table_calls_implemented_and_no_others(
    flat: dict[str, Any],
) -> None:
    node = "model.activations_checkpoint"
    more = {f"{node}_granularity": "full", f"{node}_method": "uniform", "trainer.precision": "bf16"}
    more |= {f"model.{name}": True for name in ("megatron_amp_O2", "transformer_engine", "fp8", "fp8_hybrid")}
    config = RecordingConfig({**flat, **more, "model.teacher": "/teacher"})
    read_settings(config)
    assert config.read == {key for key, status in KEYS.items() if isinstance(status, Implemented)}


def test_empty_node_is_accepted_and_empty_unknown_key_is_refused(flat: dict[str, Any]) -> None:
    assert flatten({"model": {"optim": {"sched": {}}, "seed": 1}, "run": {}}) == {
        "model.optim.sched": {},
        "model.seed": 1,
    }
    check_keys({**flat, "model.optim.sched": {}, "exp_manager.wandb_logger_kwargs": {}})
    with pytest.raises(UserError, match="unknown key"):
        check_keys({**flat, "model.optim": None})
    for key in ("model.optim.schde", "model.fsdp", "trainer.max_epochs"):
        with pytest.raises(UserError, match=rf"{key}=\{{\}}"):
            check_keys({**flat, key: {}})


def test_null_node_has_the_status_of_its_keys() -> None:
    node = "exp_manager.wandb_logger_kwargs"
    assert status_of(node) == status_of(f"{node}.project") is not None
    assert status_of("exp_manager.wandb_logger") is None
