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

GCC = shutil.which("g++")
INDUCTOR = "gpt inductor"
# One thread for it, no trial of the processor's instructions, no optimization: most of its time goes there.
FAST = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "TORCHINDUCTOR_DEBUG_COMPILE": "1",
}
SHORT = {
    "trainer.max_steps": 4,
    "trainer.limit_val_batches": 0,
    "exp_manager.checkpoint_callback_params.every_n_train_steps": 2,
    "exp_manager.checkpoint_callback_params.save_top_k": -1,
}
TWO = {"model.num_layers": 2}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
RECOMPUTED = {FULL: "full", "model.activations_checkpoint_method": "uniform"}
RELATIVE = both(position_embedding_type="relative", num_layers=3)
PIPELINE = {"model.pipeline_model_parallel_size": 2, "model.virtual_pipeline_model_parallel_size": 2}
# The keys of a model, and its graphs: of a group of layers and of the last norm, in training and in
# validation. The last word of a name is the compiler: `eager` runs operations, `aot_eager` also those of the
# gradient.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "gpt eager": (TWO, 4),
    "dropout aot_eager": ({**TWO, **DROPOUT}, 4),
    # The forward pass whose activations are forgotten is a graph without gradients.
    "recomputed aot_eager": ({**TWO, **DROPOUT, **RECOMPUTED}, 5),
    "selective eager": ({**TWO, **DROPOUT, FULL: "selective"}, 4),
    "llama eager": ({**TWO, **LLAMA}, 4),
    # Its gradients are autograd's, as each is waited for.
    "overlap eager": ({**TWO, "model.optim.overlap_grad_sync": True}, 4),
    # Two groups, which share graphs.
    "groups eager": ({"model.num_layers": 6}, 4),
    INDUCTOR: (TWO, 2),
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
    kernels = {**FAST, "TORCHINDUCTOR_CACHE_DIR": str(directory)}
    environments = tuple({**environment(rank, ranks, port), **kernels} for rank in range(ranks))
    arguments = [str(path), json.dumps(cases)]
    result: dict[str, Any] = run_probe(
        pool, "tests.trainer.probe_compiled", arguments, directory, environments
    )
    return result


@pytest.fixture(scope="module")
def gpts(configuration: Any, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {name: keys for name, (keys, _) in CASES.items() if GCC or name != INDUCTOR}
    return run(cases, {}, configuration, pool, tmp_path_factory.mktemp("gpts"))


@pytest.mark.parametrize("name", [name for name in CASES if name != INDUCTOR])
def test_all_groups_of_layers_share_a_graph_and_no_graph_breaks(gpts: dict[str, Any], name: str) -> None:
    assert gpts["cases"][name]["graphs"] == [CASES[name][1], 0]


@pytest.mark.parametrize("name", ["gpt eager", "llama eager", "overlap eager", "groups eager"])
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
    result = run({"t5 eager": {}}, {**T5, **RELATIVE}, configuration, pool, tmp_path)
    case = result["cases"]["t5 eager"]
    assert case["graphs"] == [8, 0]
    assert case["compiled"] == case["plain"]


def test_dropout_fault_of_torch_is_avoided_on_cuda(gpts: dict[str, Any]) -> None:
    assert gpts["aligned"] == [False, False, True]


def test_layers_are_compiled_on_a_gpu_where_that_is_possible(gpts: dict[str, Any]) -> None:
    explained = gpts["explained"]
    assert explained["cuda"] is None
    assert explained["cpu"] == "auto compiles on a GPU alone"
    assert explained["off"] == "as the configuration says"
    assert "model.tensor_model_parallel_size=2" in explained["tensor"]
    assert "model.transformer_engine=True" in explained["engine"]
    assert explained["gathers"].endswith("expected model.optim.overlap_param_sync=False")
    assert explained["gathers and must"] == f"refused: model.compile_layers=True: {explained['gathers']}"
    assert "has no gcc or clang or cc on PATH" in explained["no compiler"]
    assert explained["no compiler and must"].endswith("expected a compiler, or its path in CXX")
    assert explained["clang"] is None
    assert "the attention is local: expected model.attention_backend=sdpa" in explained["local and must"]


# --- torch's own compiler, on a CPU


@pytest.fixture
def compiler() -> None:
    if GCC is None:
        pytest.skip("torch compiles for a CPU with g++")


@pytest.mark.usefixtures("compiler")
def test_compiled_kernels_compute_what_operations_do(gpts: dict[str, Any]) -> None:
    case = gpts["cases"][INDUCTOR]
    assert case["graphs"] == [CASES[INDUCTOR][1], 0]
    # Without the loss of the validation.
    plain = case["plain"][:-1]
    assert case["compiled"][::2] == pytest.approx(plain[::2], rel=4e-7)
    assert case["compiled"] == pytest.approx(plain, rel=1e-5)


@pytest.mark.usefixtures("compiler")
def test_resumed_with_kernels_compiled_anew_is_bitwise_the_same(
    trainings: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without biases there are fewer kernels.
    model = {"model.normalization": "rmsnorm", "model.bias": False, "model.hidden_dropout": 0.1}
    changes = {**SHORT, **RECOMPUTED, **model, "model.compile_layers": True}
    for name, value in FAST.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # torch sets the first where it compiled
        monkeypatch.delenv(name, raising=False)
    whole = trainings("compiled", changes)
    assert whole.codes == [0], whole.stderr
    assert "layers compiled" in whole.stdout[0]
    (newest,) = (whole.log_dir / "checkpoints").glob("*step=4*")
    shutil.rmtree(newest)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    resumed = trainings("compiled", changes)
    curve = resumed.curve("loss", "grad_norm")
    assert [step for step, *_ in curve] == [1, 2, 3, 4, 3, 4]
    assert curve[4:] == curve[2:4]
    for kernels in (whole.log_dir / "compiled", tmp_path):
        assert any(kernels.rglob("*.main.so"))
