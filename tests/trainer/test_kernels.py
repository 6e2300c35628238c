"""The functions that only GPUs use: the loss, lists in the optimizer, documents by lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.conftest import config_with, environment, free_port
from tests.trainer.probing import run_probe
from tests.trainer.t5 import T5, both
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

_BF16 = {"trainer.precision": "bf16", "model.megatron_amp_O2": True}
CASES: list[dict[str, Any]] = [
    {},
    {**T5, **_BF16},
    {"model.attention_dropout": 0.1},
    {**T5, **both(position_embedding_type="relative")},
    {"model.data.reset_attention_mask": True, "model.num_query_groups": 2},
]
# By FlashAttention without dropout, in 16 bits, up to 256 channels.
LENGTHS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "groups": ({"model.num_query_groups": 2}, True),
    "sdpa": ({"model.attention_backend": "sdpa"}, True),
    "local": ({"model.attention_backend": "local"}, False),
    "fp32": ({"trainer.precision": 32}, False),
    "dropout": ({"model.attention_dropout": 0.1}, False),
    "odd channels": ({"model.kv_channels": 12}, False),
    "many channels": ({"model.kv_channels": 264}, False),
}


@pytest.fixture(scope="module", params=[1, 2], ids=["tensor 1", "tensor 2"])
def probe(
    request: pytest.FixtureRequest, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    directory, ranks, port = tmp_path_factory.mktemp("kernels"), request.param, free_port()
    paths = [str(_write(directory, number, case)) for number, case in enumerate(CASES)]
    lengths = json.dumps({name: {**_BF16, **changes} for name, (changes, _) in LENGTHS.items()})
    environments = tuple(environment(rank, ranks, port) for rank in range(ranks))
    result: dict[str, Any] = run_probe(
        pool, "tests.trainer.probe_kernels", [*paths, lengths], directory, environments
    )
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


@pytest.mark.parametrize("probe", [1], indirect=True)
def test_documents_by_lengths_are_those_by_a_mask(probe: dict[str, Any]) -> None:
    assert len(probe["documents"]) == 2 * 3 * 4 * 2
    for name, difference in probe["documents"].items():
        assert difference < (2e-2 if "bfloat16" in name else 2e-6), name


@pytest.mark.parametrize("probe", [1], indirect=True)
def test_kernels_of_attention_have_an_order(probe: dict[str, Any]) -> None:
    assert probe["kernels"] == {
        "H100": ["cudnn", "flash", "efficient", "math"],
        "H100, deterministic": ["flash", "efficient", "math"],
        "H100, old cuDNN": ["flash", "efficient", "cudnn", "math"],
        "A100": ["flash", "efficient", "cudnn", "math"],
        "RTX 5090": ["flash", "efficient", "cudnn", "math"],
        "inside": [["flash", "efficient", "math"], False],
        "restored": True,
    }


@pytest.mark.parametrize("probe", [1], indirect=True)
def test_documents_are_taken_by_lengths_where_flash_attention_can(probe: dict[str, Any]) -> None:
    assert probe["lengths"] == {name: expected for name, (_, expected) in LENGTHS.items()}


@pytest.mark.parametrize("probe", [1], indirect=True)
def test_named_kernel_of_attention_is_the_one_that_runs(probe: dict[str, Any]) -> None:
    gpt, t5, dropout, relative, documents = probe["flash"]
    assert gpt == ["sdpa (flash)", 2]
    # Two layers of the encoder, two of the decoder, which also attend to the encoder: without a bias.
    assert t5 == ["sdpa (flash)", 6]
    assert relative == ["sdpa (math)", 2]
    assert dropout == ["sdpa (math)", 0]
    assert documents == ["sdpa (flash, documents: flash by a mask)", 2]
