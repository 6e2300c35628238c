"""Steps of the optimizer against torch's AdamW, and the growing batch against megatron-core's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from slipway.common.errors import UserError
from slipway.trainer.config.rampup import Rampup
from tests.trainer.conftest import free_port
from tests.trainer.probing import run_probe
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

OPTIM = "model.optim"
# `plain` clips the first step's gradient alone, as its limit is 1; the norms are in the probe.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unclipped": {"trainer.gradient_clip_val": 0.0},
    "other numbers": {
        "trainer.gradient_clip_val": 0.0,
        f"{OPTIM}.betas": [0.8, 0.98],
        f"{OPTIM}.eps": "1e-5",
        f"{OPTIM}.weight_decay": 0.3,
    },
    "all decayed": {"trainer.gradient_clip_val": None, "model.do_layer_norm_weight_decay": True},
    "bf16": {
        "trainer.gradient_clip_val": 0.0,
        "trainer.precision": "bf16",
        "model.megatron_amp_O2": True,
    },
}
# Start, increment, samples, end. The quotients of the third and fourth are not whole.
RAMPS = [(16, 16, 1000, 64), (32, 32, 5000, 256), (3, 3, 1000, 24), (7, 1, 999, 10), (1, 1, 10, 8)]


@pytest.fixture(scope="module")
def probe(configuration: Any, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("probe")
    changes = {"exp_manager.explicit_log_dir": str(directory), "model.data.data_impl": "mock"}
    path = directory / "probe.yaml"
    path.write_text(yaml.safe_dump(configuration(changes)))
    arguments = [str(path), str(free_port()), json.dumps(VARIANTS), json.dumps(RAMPS)]
    result: dict[str, Any] = run_probe(pool, "tests.trainer.probe_optimization", arguments, directory)
    return result


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "plain"])
def test_step_equals_that_of_torchs_adamw(probe: dict[str, Any], name: str) -> None:
    """They are equal to the last bit, as megatron-core's optimizer is torch's here."""
    steps = probe["steps"][name]
    assert steps["differing"] == []
    assert steps["norms"] == pytest.approx(steps["expected"], rel=1e-6)


def test_the_gradient_is_clipped_by_its_global_norm(probe: dict[str, Any]) -> None:
    """megatron-core and torch round the factor differently, by some units of fp32's last place."""
    steps = probe["steps"]["plain"]
    assert steps["norms"][0] > 100 > 1 > steps["norms"][1] > 0.1
    assert steps["norms"] == pytest.approx(steps["expected"], rel=1e-6)
    assert steps["far"] < 1e-5


@pytest.mark.parametrize("number", range(len(RAMPS)), ids=str)
def test_batch_grows_as_in_megatron_core(probe: dict[str, Any], number: int) -> None:
    ramp, (start, increment, samples, end) = probe["ramps"][number], RAMPS[number]
    assert ramp["differing"] == []
    assert ramp["points"] == samples + 2 * end
    assert set(ramp["batches"]) <= set(range(start, end + 1, increment))
    assert ramp["batches"] == sorted(ramp["batches"])
    assert (ramp["batches"][0], ramp["batches"][-1]) == (start, end)


def test_every_batch_of_a_ramp_is_divisible() -> None:
    Rampup(8, 4, 100, 32).check(4, "four")
    with pytest.raises(UserError, match=r"\[8, 4, 100\]: the increment, 4, is not a multiple of eight = 8"):
        Rampup(8, 4, 100, 32).check(8, "eight")
    with pytest.raises(UserError, match=r"\[4, 8, 100\]: the first batch, 4, is not a multiple of eight = 8"):
        Rampup(4, 8, 100, 36).check(8, "eight")
