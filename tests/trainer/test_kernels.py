"""The functions that a GPU computes with in place of megatron-core's: the loss, lists in the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.conftest import config_with, environment, free_port
from tests.trainer.probing import run_probe
from tests.trainer.t5 import T5
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

_BF16 = {"trainer.precision": "bf16", "model.megatron_amp_O2": True}
CASES: list[dict[str, Any]] = [{}, {**T5, **_BF16}]


@pytest.fixture(scope="module", params=[1, 2], ids=["tensor 1", "tensor 2"])
def probe(
    request: pytest.FixtureRequest, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    directory, ranks, port = tmp_path_factory.mktemp("kernels"), request.param, free_port()
    paths = [str(_write(directory, number, case)) for number, case in enumerate(CASES)]
    environments = tuple(environment(rank, ranks, port) for rank in range(ranks))
    result: dict[str, Any] = run_probe(pool, "tests.trainer.probe_kernels", paths, directory, environments)
    return {**result, "ranks": ranks}


def _write(directory: Path, number: int, case: dict[str, Any]) -> Path:
    changes = {
        "model.data.data_impl": "mock",
        "exp_manager.explicit_log_dir": str(directory),
        "trainer.devices": "auto",
    }
    path = directory / f"{number}.yaml"
    path.write_text(yaml.safe_dump(config_with({**changes, **case})))
    return path


def test_loss_is_as_exact_as_megatron_cores(probe: dict[str, Any]) -> None:
    for numbers in probe["losses"]:
        (their_loss, their_gradient), (loss, gradient) = numbers["errors"]
        assert loss <= 1.5 * their_loss
        assert gradient <= 1.5 * their_gradient
        assert numbers["type"]
        if probe["ranks"] == 1:
            assert numbers["equal"]


def test_loss_keeps_the_logits_alone(probe: dict[str, Any]) -> None:
    # A label, a largest logit and a sum for each token are beside them; megatron-core's keeps fp32.
    for numbers in probe["losses"]:
        assert 1 < numbers["kept"] < 1.02


def test_training_by_the_loss_of_gpus_is_the_same(probe: dict[str, Any]) -> None:
    for theirs, ours in probe["trainings"]:
        assert len(set(theirs)) == len(theirs)
        if probe["ranks"] == 1:
            assert ours == theirs
        else:
            assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("probe", [1], indirect=True)
def test_lists_are_computed_as_their_tensors(probe: dict[str, Any]) -> None:
    assert probe["lists"] == {"norm": True, "scale": True, "copy": True}


@pytest.mark.parametrize("probe", [1], indirect=True)
def test_launches_of_the_optimizer_do_not_grow_with_the_model(probe: dict[str, Any]) -> None:
    small, large = probe["operations"]
    assert small["parameters"] + 24 == large["parameters"]
    assert small["launches"] == large["launches"] < 16
    assert small["reads"] == large["reads"] == 1
