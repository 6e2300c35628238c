"""Layers that are compiled: their graphs, and the numbers of the same layers without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.conftest import Trainings, environment, free_port
from tests.trainer.probing import run_probe
from tests.trainer.t5 import T5, both
from tests.trainer.test_models import FULL, LLAMA
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

THREE = {"model.num_layers": 3}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
RECOMPUTED = {FULL: "full", "model.activations_checkpoint_method": "uniform"}
RELATIVE = both(position_embedding_type="relative", num_layers=3)
PIPELINE = {"model.pipeline_model_parallel_size": 2, "model.virtual_pipeline_model_parallel_size": 2}
# The keys of a model, and its graphs: of a layer and of the last norm, in training and in validation. The
# last word of a name is the compiler: `eager` runs operations, `aot_eager` also those of the gradient.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "gpt aot_eager": (THREE, 4),
    "dropout aot_eager": ({**THREE, **DROPOUT}, 4),
    # The forward pass whose activations are forgotten is a graph without gradients.
    "recomputed aot_eager": ({**THREE, **DROPOUT, **RECOMPUTED}, 5),
    "selective eager": ({**THREE, **DROPOUT, FULL: "selective"}, 4),
    "llama aot_eager": ({**THREE, **LLAMA}, 4),
}


def run(
    cases: dict[str, dict[str, Any]],
    base: dict[str, Any],
    configuration: Any,
    pool: WarmPool,
    directory: Path,
    ranks: int = 1,
) -> dict[str, Any]:
    """Run cases in as many processes as there are ranks; return what the first one found."""
    files = {"exp_manager.explicit_log_dir": str(directory), "model.data.data_impl": "mock"}
    path, port = directory / "probe.yaml", free_port()
    path.write_text(yaml.safe_dump(configuration({**files, "trainer.devices": ranks, **base})))
    environments = tuple(environment(rank, ranks, port) for rank in range(ranks))
    arguments = [str(path), json.dumps(cases)]
    result: dict[str, Any] = run_probe(
        pool, "tests.trainer.probe_compiled", arguments, directory, environments
    )
    return result


@pytest.fixture(scope="module")
def gpts(configuration: Any, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {name: keys for name, (keys, _) in CASES.items()}
    return run(cases, {}, configuration, pool, tmp_path_factory.mktemp("gpts"))


@pytest.mark.parametrize("name", CASES)
def test_all_layers_share_a_graph_and_no_graph_breaks(gpts: dict[str, Any], name: str) -> None:
    assert gpts["cases"][name]["graphs"] == [CASES[name][1], 0]


@pytest.mark.parametrize("name", ["gpt aot_eager", "llama aot_eager"])
def test_a_graph_computes_bitwise_what_its_operations_do(gpts: dict[str, Any], name: str) -> None:
    case = gpts["cases"][name]
    assert case["compiled"] == case["plain"]


def test_dropout_is_recomputed_bitwise(gpts: dict[str, Any]) -> None:
    cases = gpts["cases"]
    assert cases["recomputed aot_eager"]["compiled"] == cases["dropout aot_eager"]["compiled"]
    # Attention dropout has the generator of all dropout in a graph, and its own without.
    assert cases["dropout aot_eager"]["compiled"] != cases["dropout aot_eager"]["plain"]


def test_chunks_share_graphs(configuration: Any, pool: WarmPool, tmp_path: Path) -> None:
    base = {**PIPELINE, "model.num_layers": 4}
    stages = run({"stages eager": {}}, base, configuration, pool, tmp_path, ranks=2)
    case = stages["cases"]["stages eager"]
    # Without a norm on the first rank. What it receives has a gradient, also in validation.
    assert case["graphs"] == [3, 0]
    assert case["compiled"] == case["plain"]


def test_stacks_of_a_t5_have_graphs_of_their_own(configuration: Any, pool: WarmPool, tmp_path: Path) -> None:
    result = run({"t5 aot_eager": {}}, {**T5, **RELATIVE}, configuration, pool, tmp_path)
    case = result["cases"]["t5 aot_eager"]
    assert case["graphs"] == [8, 0]
    assert case["compiled"] == case["plain"]


def test_dropout_fault_of_torch_is_avoided_on_cuda(gpts: dict[str, Any]) -> None:
    assert gpts["aligned"] == [False, False, True]


# --- trainings with torch's own compiler, on a CPU


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Require a C++ compiler, for which ranks share the cores."""
    if shutil.which("g++") is None:
        pytest.skip("torch compiles for a CPU with g++")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


SAVES = "exp_manager.create_checkpoint_callback"
SHORT = {"trainer.max_steps": 4, "trainer.limit_val_batches": 0, SAVES: False}
COMPILED = {"model.compile_layers": True}


@pytest.mark.usefixtures("compiler")
def test_compiled_layers_train_as_others_do(trainings: Trainings) -> None:
    plain = trainings("uncompiled", SHORT, 2)
    # Both ranks compile at once, into one directory.
    compiled = trainings("compiled", {**SHORT, **COMPILED}, 2)
    assert compiled.codes == [0, 0], compiled.stderr
    assert "layers compiled" in compiled.stdout[0]
    assert "layers compiled" not in plain.stdout[0]
    for (_, loss), (_, expected) in zip(compiled.curve("loss"), plain.curve("loss"), strict=True):
        assert loss == pytest.approx(expected, rel=4e-7)
    assert any((compiled.log_dir / "compiled").rglob("*.so"))


@pytest.mark.usefixtures("compiler")
def test_resumed_with_kernels_compiled_anew_is_bitwise_the_same(
    trainings: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**SHORT, **COMPILED, **DROPOUT, **RECOMPUTED, SAVES: True}
    names = ("loss", "grad_norm")
    whole = trainings("compiled_whole", changes).curve(*names)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(trainings.root / "compiled_whole" / "compiled"))
    trainings("compiled_parts", changes, arguments=["--stop-after", "2"])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "empty"))
    resumed = trainings("compiled_parts", changes)
    assert resumed.curve(*names) == whole
    assert any((tmp_path / "empty").rglob("*.so"))
