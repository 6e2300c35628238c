"""A training goes on with other parallel sizes: all that it has learnt is there to the last bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.trainer.checkpoint.marker import FULLY_RESHARDABLE
from slipway.trainer.conversion.convert import convert
from slipway.trainer.conversion.spec import read_conversion
from tests.trainer.conftest import config_with, environment, free_port
from tests.trainer.faults import FAULT
from tests.trainer.ranks import Run

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

TENSOR = {"model.tensor_model_parallel_size": 2}
PIPELINE = {"model.pipeline_model_parallel_size": 2}
VIRTUAL = {**PIPELINE, "model.virtual_pipeline_model_parallel_size": 2}
CONTEXT = {"model.context_parallel_size": 2}
Stages = list[tuple[str, dict[str, Any], str | None]]
# Ranks and stages of one launch after the other: the name, what changes, and whose checkpoint is restored.
LAUNCHES: list[tuple[int, Stages]] = [
    (4, [("data4", {}, None)]),
    (
        2,
        [
            ("data2", {}, "data4"),
            ("tensor2", TENSOR, "data2"),
            ("pipeline2", PIPELINE, "tensor2"),
            ("virtual2", VIRTUAL, "pipeline2"),
            ("context2", CONTEXT, "virtual2"),
            ("tensor2-again", TENSOR, "context2"),
        ],
    ),
    (4, [("both2", {**TENSOR, **PIPELINE}, "tensor2-again")]),
    (1, [("one", {}, "both2")]),
]
# Buckets of which the last rank has padding alone: such states are gathered, and saved for all sizes.
BUCKETS = {"model.optim.overlap_grad_sync": True, "model.optim.ddp_bucket_size": 1}
# Optimizer states in shards are loaded by other data- and context-parallel sizes; by others after a copy.
SHARDED: list[tuple[int, Stages]] = [
    (4, [("data4", {}, None)]),
    (2, [("data2", {}, "data4"), ("context2", CONTEXT, "data2")]),
    (1, [("one", {}, "context2")]),
    (4, [("data4-again", {}, "one"), ("both2", {**TENSOR, **VIRTUAL}, "one-resharded")]),
    (
        2,
        [
            ("tensor2", TENSOR, "both2-resharded"),
            ("pipeline2", PIPELINE, "both2-resharded"),
            ("whole", {}, "both2-resharded"),
            ("buckets", BUCKETS, "both2-resharded"),
        ],
    ),
]
LAYERS = {"model.num_layers": 4, "trainer.devices": None}
# A GPT-3 in 32 bits; a Llama in bf16, whose gated and grouped weights are laid out otherwise, with masters.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt3": {},
    "llama": {
        "trainer.precision": "bf16",
        "model.megatron_amp_O2": True,
        "model.position_embedding_type": "rope",
        "model.normalization": "rmsnorm",
        "model.activation": "swiglu",
        "model.num_query_groups": 2,
        "model.bias": False,
        "model.share_embeddings_and_output_weights": False,
    },
}
# Sums are taken in another order: some units in the last place of 32 bits, or of the 8 that bf16 has.
NEAR = {"gpt3": 1e-6, "llama": 1e-3}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_optimizer_states_are_the_same_under_other_parallel_sizes(
    pool: Any, tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"exp_manager.explicit_log_dir": str(tmp_path), "model.data.data_impl": "mock"}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(config_with({**LAYERS, **changes, **FAMILIES[family]})))
    results: dict[str, Any] = {}
    for launch in LAUNCHES:
        numbers, output = run_launch(pool, config, *launch)
        results.update(numbers)
        # Ranks that share no part of the model may be fewer; the log reports each other change.
        changed = sum(stage[2] not in (None, "data4") for stage in launch[1])
        assert output.count("dropout does not continue bit by bit") == changed
    first = results["data4"]
    kinds = {name.split(".")[2] for name in first["tensors"] if name.startswith("optimizer.state.")}
    assert kinds == {"exp_avg", "exp_avg_sq"} | ({"fp32_param"} if family == "llama" else set())
    assert_equal_results(results, NEAR[family])
    assert_equal_exports(tmp_path, {*results, "data4-beside"})
    # A model in bf16 exports its masters.
    assert_equal_exports(tmp_path, {"data4", "tensor2", "virtual2", "one"}, "float32")
    assert capsys.readouterr().out.count("32-bit masters") == (4 if family == "llama" else 0)


def test_optimizer_states_in_shards_are_the_same_under_other_parallel_sizes(
    pool: Any, tmp_path: Path
) -> None:
    changes = {"exp_manager.explicit_log_dir": str(tmp_path), "model.data.data_impl": "mock"}
    config = tmp_path / "config.yaml"
    # The last pipeline stage has a copy of the embeddings, which is saved once.
    tied = {**FAMILIES["llama"], "model.share_embeddings_and_output_weights": True}
    sharded = {"model.optim.name": "mcore_distributed_optim"}
    config.write_text(yaml.safe_dump(config_with({**LAYERS, **changes, **tied, **sharded})))
    results: dict[str, Any] = {}
    for launch in SHARDED:
        results.update(run_launch(pool, config, *launch, fault="shard:all:0")[0])
    kinds = {
        name.split(".")[2] for name in results["data4"]["tensors"] if name.startswith("optimizer.state.")
    }
    assert kinds == {"exp_avg", "exp_avg_sq", "param"}
    assert_equal_results(results, NEAR["llama"])
    assert_equal_exports(tmp_path, {*results, "data4-resharded", "both2-resharded"})
    gathered = {name for name, result in results.items() if result["format"] == FULLY_RESHARDABLE}
    assert gathered == {"buckets"}
    assert results["data4"]["gathered"] == results["data4"]["tensors"]
    assert results["data4-again"]["losses"] == results["data4"]["losses"]
    assert results["whole"]["losses"] == results["data2"]["losses"]


def run_launch(
    pool: Any, config: Path, world: int, stages: Stages, fault: str = ""
) -> tuple[dict[str, Any], str]:
    """Run a launch of the probe; return its results by stage, and the output of rank 0."""
    port, name = free_port(), f"{world}-{stages[0][0]}"
    outputs = [config.with_name(f"{name}.rank{rank}") for rank in range(world)]
    answers = config.with_name(f"{name}.json")
    ranks = [
        pool.start(
            [str(config), str(answers), json.dumps(stages)],
            {**environment(rank, world, port), FAULT: fault},
            output,
            "tests.trainer.probe_resharding",
        )
        for rank, output in enumerate(outputs)
    ]
    assert [rank.wait() for rank in ranks] == [0] * world, outputs[0].read_text()
    return json.loads(answers.read_text()), outputs[0].read_text()


def assert_equal_results(results: dict[str, Any], near: float) -> None:
    """Compare each stage's results with the first's, whose state it has."""
    first = results["data4"]
    for name, result in results.items():
        assert result["tensors"] == first["tensors"], name
        assert result["losses"] == pytest.approx(first["losses"], rel=near), name
        # Saved beside a step: as it was before, though every file was written after.
        assert not result["written_early"]
        assert result["step"] == 2
        assert result["beside"] == result["tensors"], name


def assert_equal_exports(directory: Path, names: set[str], dtype: str | None = None) -> None:
    """Compare the safetensors of all checkpoints, byte by byte."""
    digests = {}
    for name in names:
        output = directory / f"hf-{name}-{dtype}"
        node = {"source": str(directory / name), "to": "huggingface", "output": str(output), "dtype": dtype}
        (result,) = convert(read_conversion(node))
        digests[name] = hashlib.sha256((result.output / "model.safetensors").read_bytes()).hexdigest()
    assert len(set(digests.values())) == 1, digests


def test_four_ranks_become_two_and_then_one(trainings: Any, pool: Any, tmp_path: Path) -> None:
    params = "exp_manager.checkpoint_callback_params"
    common = {
        "trainer.val_check_interval": 2,
        "trainer.limit_val_batches": 2,
        "model.micro_batch_size": 1,
        "model.optim.sched.max_steps": 6,
        f"{params}.save_top_k": -1,
    }

    def numbers(name: str, world: int, until: int, directory: Path) -> dict[tuple[str, int], tuple[Any, ...]]:
        changes = {**common, "trainer.max_steps": until, f"{params}.dirpath": str(directory)}
        run = Run(trainings, pool, name, changes, world)
        assert run.end() == [0] * world, run.output()
        fields = {"train": ("consumed_samples", "loss", "grad_norm"), "validation": ("val_loss",)}
        return {
            (kind, line["step"]): tuple(line[field] for field in names)
            for kind, names in fields.items()
            for line in run.lines(kind)
        }

    whole = numbers("one_rank", 1, 6, tmp_path / "whole")
    parts = [
        numbers(f"of_{world}", world, until, tmp_path / "parts") for world, until in [(4, 2), (2, 4), (1, 6)]
    ]
    assert [min(step for _, step in part) for part in parts] == [1, 3, 5]
    assert {key: pytest.approx(values, rel=5e-6) for part in parts for key, values in part.items()} == whole
