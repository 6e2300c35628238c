"""Communication beside the computation: the numbers, weights and checkpoints are those without it.

Two ranks add two numbers, which has but one order: without clipping, whose norm is summed by buckets, all
is equal to the last bit.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.trainer.conftest import config_with, environment, free_port
from tests.trainer.probing import run_probe

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

GRADIENTS = {"model.optim.overlap_grad_sync": True, "model.optim.ddp_bucket_size": 2000}
BOTH = {**GRADIENTS, "model.optim.overlap_param_sync": True}
ALIGNED = {**BOTH, "model.optim.align_param_gather": True}
EACH = {**BOTH, "model.optim.align_grad_reduce": False}
SHARDED = {"model.optim.name": "mcore_distributed_optim"}
BF16 = {"trainer.precision": "bf16", "model.megatron_amp_O2": True}
PIPELINE = {"model.pipeline_model_parallel_size": 2, "model.num_layers": 4}
VIRTUAL = {**PIPELINE, "model.virtual_pipeline_model_parallel_size": 2}
COMMON = {
    "exp_manager.explicit_log_dir": "/absent",
    "model.data.data_impl": "mock",
    "trainer.devices": None,
    "trainer.gradient_clip_val": 0.0,
}
# Trainings by number of ranks, each with its own options and the ways to overlap.
CASES: dict[int, dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]]] = {
    2: {
        "whole": ({}, {"gradients": GRADIENTS}),
        "sharded": ({**SHARDED, **BF16}, {"gradients": GRADIENTS, "both": BOTH}),
    },
    4: {
        "pipeline": ({**SHARDED, **BF16, **PIPELINE}, {"both": BOTH}),
        "virtual": ({**SHARDED, **BF16, **VIRTUAL}, {"both": BOTH, "aligned": ALIGNED, "each": EACH}),
    },
}


@pytest.fixture(scope="module", params=CASES, ids="{} ranks".format)
def results(request: Any, pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    world, directory = request.param, tmp_path_factory.mktemp("overlap")
    (directory / "config.yaml").write_text(yaml.safe_dump(config_with(COMMON)))
    cases = {
        f"{training}-{way}": {**options, **changes}
        for training, (options, ways) in CASES[world].items()
        for way, changes in {"after": {}, **ways}.items()
    }
    arguments, port = [str(directory / "config.yaml"), json.dumps(cases)], free_port()
    ranks = tuple(environment(rank, world, port) for rank in range(world))
    return world, run_probe(pool, "tests.trainer.probe_overlap", arguments, directory, ranks)


def test_overlap_changes_no_bit(results: tuple[int, dict[str, Any]]) -> None:
    world, cases = results
    for training, (_, ways) in CASES[world].items():
        reference = cases[f"{training}-after"]
        for way in ways:
            overlapped = cases[f"{training}-{way}"]
            assert overlapped["buckets"][0] > reference["buckets"][0], "nothing would overlap"
            for name in ("losses", "tensors", "after"):
                assert overlapped[name] == reference[name], (training, way, name)


def test_a_save_gathers_weights_that_the_next_step_would_have(results: tuple[int, dict[str, Any]]) -> None:
    world, cases = results
    for training, (_, ways) in CASES[world].items():
        for way in ways:
            gathered = way != "gradients"
            assert cases[f"{training}-{way}"]["gathered by the save"] is gathered, (training, way)


def test_extra_states_of_layers_are_saved_and_restored(results: tuple[int, dict[str, Any]]) -> None:
    saved, restored = results[1]["extra states"]
    assert len(saved) >= 8
    assert restored == saved


def test_a_training_with_validations_saves_and_a_restart_is_the_same(trainings: Any) -> None:
    common = {
        **SHARDED,
        **BF16,
        "trainer.max_steps": 5,
        "trainer.val_check_interval": 2,
        "trainer.limit_val_batches": 2,
        "trainer.gradient_clip_val": 0.0,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": 2,
    }

    outcomes: dict[str, Any] = {}

    def numbers(name: str, changes: dict[str, Any], *launches: list[str]) -> dict[str, dict[int, float]]:
        for arguments in launches or ([],):
            outcomes[name] = outcome = trainings(name, {**common, **changes}, 2, arguments, "shard:all:0")
            assert outcome.codes == [0, 0], outcome.stderr
        fields = {"train": "loss", "validation": "val_loss"}
        return {
            kind: {line["step"]: line[field] for line in outcome.lines(kind)}
            for kind, field in fields.items()
        }

    after = numbers("after", {})
    assert list(after["validation"]) == [2, 4, 5]
    assert numbers("beside", BOTH) == after
    gathering = [line for line in outcomes["beside"].stdout[0].splitlines() if "with hooks" in line]
    without, passes = "training with hooks {False}", "training with hooks {True}"
    validation = ["validation with hooks {False}"] * 2
    # Before the first step is done, and in validations, forward passes take the weights as they are.
    assert gathering == [without, passes, *validation, passes, passes, *validation, passes, *validation]
    restarted = numbers("restarted", BOTH, ["--stop-after", "3"], [])
    assert restarted["train"] == after["train"]
    assert {step: loss for step, loss in restarted["validation"].items() if step != 3} == after["validation"]
