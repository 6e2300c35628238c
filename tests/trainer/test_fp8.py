"""FP8 by NeMo's keys: the values that are read, and the shapes that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from launcher.config.compose import BatchComposer
from launcher.estimates.memory import bytes_per_parameter
from launcher.estimates.training import training_of
from slipway.common.errors import UserError
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.report.flops import device_peak
from tests.trainer.test_stock_sizes import launch_config

pytestmark = pytest.mark.trainer

TENSOR = "model.tensor_model_parallel_size"
FP8 = {
    "model.fp8": True,
    "model.fp8_hybrid": True,
    "model.transformer_engine": True,
    "trainer.precision": "bf16",
    "model.megatron_amp_O2": True,
    "trainer.devices": None,
    "model.kv_channels": 16,
}


@pytest.fixture
def settings(configuration: Callable[..., dict[str, Any]]) -> Callable[..., Settings]:
    def read(changes: dict[str, Any]) -> Settings:
        files = {"exp_manager.explicit_log_dir": "/absent", "model.data.data_impl": "mock"}
        return read_settings(flatten(configuration({**files, **FP8, **changes})))

    return read


def test_keys_are_those_of_nemo(settings: Callable[..., Settings]) -> None:
    fp8 = settings({}).fp8
    assert fp8 is not None
    assert (fp8.format, fp8.recipe, fp8.history, fp8.algorithm) == ("hybrid", "delayed", 1, "most_recent")
    keys = {"margin": 1, "amax_history_len": 1024, "amax_compute_algo": "max", "wgrad": False}
    fp8 = settings({f"model.fp8_{key}": value for key, value in keys.items()}).fp8
    assert fp8 is not None
    assert (fp8.margin, fp8.history, fp8.algorithm, fp8.wgrad) == (1, 1024, "max", False)
    assert settings({"model.fp8": False}).fp8 is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.fp8_hybrid": False}, "model.fp8=True: expected one of model.fp8_hybrid and model.fp8_e4m3"),
        ({"model.fp8_e4m3": True}, "to be True, not both"),
        ({"trainer.precision": 32}, "model.fp8=True: expected False, or trainer.precision=bf16"),
        ({"model.transformer_engine": False}, "model.fp8=True: expected False, or model.transformer_engine="),
        ({"model.fp8_recipe": "tensorwize"}, "did you mean 'tensorwise'"),
    ],
)
def test_missing_requirement_of_fp8_is_named(
    settings: Callable[..., Settings], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        settings(changes)


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"model.hidden_size": 40}, 1, "model.hidden_size=40: .*expected a multiple of 16, such as 32"),
        ({"model.ffn_hidden_size": 88}, 1, "model.ffn_hidden_size=88: .*a multiple of 16, such as 80"),
        (
            {"model.ffn_hidden_size": 112, TENSOR: 4},
            4,
            "model.ffn_hidden_size=112: .*/ 4 tensor ranks; expected a multiple of 64, such as 128",
        ),
        (
            {TENSOR: 4, "model.sequence_parallel": True, "model.micro_batch_size": 1},
            4,
            "model.encoder_seq_length=32: .*x micro batch 1 / 4 ranks; expected a multiple of 64, such as 64",
        ),
        (
            {TENSOR: 4, "model.kv_channels": 8},
            4,
            "model.kv_channels=8: .*x heads of a rank; expected a multiple of 16, such as 16",
        ),
        (
            {"model.fp8_recipe": "mxfp8", "model.hidden_size": 80},
            1,
            "model.hidden_size=80: .*model.fp8_recipe=mxfp8 the sides .*a multiple of 32, such as 64",
        ),
    ],
)
def test_a_shape_that_does_not_divide_is_refused_with_the_nearest(
    settings: Callable[..., Settings], changes: dict[str, Any], world: int, message: str
) -> None:
    assert make_layout(settings({}), 1)
    with pytest.raises(UserError, match=message):
        make_layout(settings(changes), world)


def test_peak_is_that_of_fp8(settings: Callable[..., Settings]) -> None:
    assert (settings({}).operands, settings({"model.fp8": False}).operands) == ("fp8", "bf16")
    name = "NVIDIA H100 80GB HBM3"
    half, narrow = device_peak(name, "bf16"), device_peak(name, "fp8")
    assert half is not None and narrow is not None
    assert narrow == pytest.approx(2 * half, rel=1e-3)


def test_the_estimate_of_memory_counts_the_copies_of_matrices() -> None:
    composer = BatchComposer(["engine=megatron"])
    fp8 = ["training.trainer.accelerator=gpu", "+training.model.fp8=True", "+training.model.fp8_hybrid=True"]
    sizes = []
    for overrides in ([], fp8):
        training = training_of(launch_config(composer, "gpt3/5b", *overrides), 1, "megatron")
        assert training is not None
        sizes.append(bytes_per_parameter(training).quantized)
    # A weight in 8 bits, and its transpose.
    assert sizes == [0, 2]
