"""The space that checkpoints take, and the room for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.checks.facts import Facts, PathFacts
from launcher.checks.findings import Finding, Severity
from launcher.checks.registry import run_checks
from launcher.checks.rules.space import checkpoint_problems
from launcher.estimates.cost import Checkpoints, bytes_of_save, checkpoints_of
from launcher.estimates.training import model_size
from launcher.estimates.values import Values
from tests.checks.plans import GPT, changed, plan_of

CALLBACK = "exp_manager.checkpoint_callback_params"
# 5,047,558,144 parameters: 24 layers, and 50,304 words and 2,048 positions.
SIZES = {
    "model.override_vocab_size": 50_304,
    "trainer.precision": "bf16",
    f"{CALLBACK}.dirpath": "/results/run/checkpoints",
    f"{CALLBACK}.save_top_k": 5,
}
PARAMETERS = 24 * (12 * 4096**2 + 13 * 4096) + (50_304 + 2048) * 4096 + 2 * 4096


def checkpoints_with(changes: dict[str, Any], engine: str = "nemo") -> Checkpoints | None:
    values = Values(changed(GPT, {**SIZES, **changes}))
    model = model_size(values)
    assert model is not None
    assert model.parameters == PARAMETERS
    return checkpoints_of(values, model, engine)


@pytest.mark.parametrize(
    ("changes", "engine", "per_parameter"),
    [
        # Weights, master weights and two moments: 2 + 4 + 4 + 4, and 4 + 4 + 4 where weights are in 32 bits.
        ({}, "nemo", 14),
        ({}, "megatron", 14),
        ({"trainer.precision": "bf16-mixed"}, "megatron_lm", 14),
        ({"model.megatron_amp_O2": False}, "nemo", 12),
        ({"trainer.precision": 32}, "megatron", 12),
        ({f"{CALLBACK}.save_weights_only": True}, "nemo", 2),
    ],
)
def test_bytes_of_a_checkpoint_are_those_of_its_states(
    changes: dict[str, Any], engine: str, per_parameter: int
) -> None:
    checkpoints = checkpoints_with(changes, engine)
    assert checkpoints is not None
    assert checkpoints.size == per_parameter * PARAMETERS


@pytest.mark.parametrize("name", ["adamw", "mcore_distributed_optim"])
@pytest.mark.parametrize("context", [1, 2])
def test_the_nodes_together_hold_one_checkpoint_in_memory_during_a_save(name: str, context: int) -> None:
    changes = {"model.optim.name": name, "model.context_parallel_size": context}
    config = changed(GPT, {**SIZES, **changes, "model.tensor_model_parallel_size": 1})
    nodes = 2
    node_bytes = bytes_of_save(config, nodes, "megatron")
    assert node_bytes is not None
    assert nodes * node_bytes == pytest.approx(14 * PARAMETERS, rel=1e-6)
    assert bytes_of_save(config, nodes, "nemo") is None


@pytest.mark.parametrize(
    ("changes", "engine", "kept", "saves"),
    [
        # The best five, the newest, and the one that is being written.
        ({}, "nemo", 7, 10),
        ({}, "megatron", 7, 10),
        ({f"{CALLBACK}.save_last": False}, "nemo", 6, 10),
        ({f"{CALLBACK}.save_top_k": 0}, "megatron", 2, 10),
        ({f"{CALLBACK}.save_top_k": None}, "nemo", 5, 10),
        ({f"{CALLBACK}.save_top_k": -1}, "nemo", None, 10),
        ({}, "megatron_lm", None, 10),
        ({f"{CALLBACK}.every_n_train_steps": 300}, "nemo", 7, 4),
        ({f"{CALLBACK}.every_n_train_steps": 0}, "megatron", 7, 1),
        ({"trainer.val_check_interval": 0.5}, "nemo", 7, 1),
    ],
)
def test_checkpoints_on_the_disk_are_counted(
    changes: dict[str, Any], engine: str, kept: int | None, saves: int
) -> None:
    checkpoints = checkpoints_with(changes, engine)
    assert checkpoints is not None
    assert (checkpoints.kept, checkpoints.saves) == (kept, saves)
    assert checkpoints.most == (saves if kept is None else min(kept, saves))


def test_training_without_saves_takes_no_space() -> None:
    assert checkpoints_with({"exp_manager.create_checkpoint_callback": False}) is None
    assert checkpoints_with({"trainer.max_steps": None}) is None


def problems_with(
    free: float, *, existing: int | None = 0, by: str = "file system", engine: str = "nemo", top: int = 5
) -> list[Finding]:
    """Return the findings with a number of free terabytes; a checkpoint takes 70.7 GB."""
    plan = plan_of(changed(GPT, {**SIZES, f"{CALLBACK}.save_top_k": top}), engine=engine)
    paths = PathFacts(free_bytes=int(free * 1e12), free_by=by, checkpoints_there=existing)
    return [*checkpoint_problems(plan, paths)]


def test_checkpoint_without_room_is_an_error() -> None:
    (problem,) = problems_with(0.07)
    assert problem.severity is Severity.ERROR
    assert problem.message == (
        "training.exp_manager.checkpoint_callback_params.dirpath='/results/run/checkpoints':"
        " a checkpoint takes about 70.7 GB, and 70 GB are free"
    )
    assert problems_with(0.0707, existing=7) == []


def test_a_full_disk_of_a_laptop_is_a_warning() -> None:
    """Several nodes do not write to a disk of this machine's own, however full it is."""
    paths = PathFacts(free_bytes=10**9, checkpoints_there=0, is_own_disk=True)
    (problem,) = checkpoint_problems(plan_of(changed(GPT, SIZES)), paths)
    assert problem.severity is Severity.WARNING
    assert problem.message.endswith("and 1 GB are free of this machine's own disk")
    shared = replace(paths, is_own_disk=False)
    (problem,) = checkpoint_problems(plan_of(changed(GPT, SIZES)), shared)
    assert problem.severity is Severity.ERROR


def test_checkpoints_without_room_together_are_a_warning() -> None:
    (problem,) = problems_with(0.3, by="quota")
    assert problem.severity is Severity.WARNING
    assert problem.message == (
        "training.exp_manager.checkpoint_callback_params.save_top_k=5: 7 checkpoints of about 70.7 GB take"
        " 495 GB, and 300 GB are free (by the quota): enough for 4"
    )
    assert problem.fix == (
        "training.exp_manager.checkpoint_callback_params.save_top_k=2,"
        " or base_results_dir=... where there is more space"
    )
    # The number in the fix passes, and one more does not.
    assert problems_with(0.3, top=2) == []
    assert problems_with(0.3, top=3) != []
    assert problems_with(0.5) == []


def test_existing_checkpoints_count_as_kept() -> None:
    assert problems_with(0.3, existing=3) == []
    (problem,) = problems_with(0.15, existing=3)
    assert (
        "4 more checkpoints of about 70.7 GB take 283 GB, and 150 GB are free: enough for 2"
        in problem.message
    )
    # Two beside the three that are there are the best three, the newest, and the one that is being written.
    assert problem.fix is not None and f"{CALLBACK}.save_top_k=3, or" in problem.fix
    assert problems_with(0.15, existing=3, top=3) == []
    assert problems_with(0.15, existing=7) == []
    assert problems_with(0.3, existing=None) == problems_with(0.3)


def test_another_directory_is_named_where_no_number_fits() -> None:
    assert [problem.fix for problem in problems_with(0.15)] == [
        "base_results_dir=... where there is more space"
    ]
    (problem,) = problems_with(0.3, engine="megatron_lm")
    assert problem.fix is not None and problem.fix.startswith("fewer: Megatron-LM keeps them all; or ")
    assert "10 checkpoints" in problem.message


def test_unknown_space_skips_the_check() -> None:
    plan = plan_of(changed(GPT, SIZES))
    paths = PathFacts(missing={"free_bytes": "statvfs timed out"})
    findings = [
        finding for finding in run_checks(plan, Facts(paths=paths)) if finding.id == "space.checkpoints"
    ]
    assert [(finding.severity, finding.why) for finding in findings] == [
        (Severity.SKIPPED, "statvfs timed out")
    ]
    # A dry run does not look, and does not report the check.
    assert "space.checkpoints" not in {finding.id for finding in run_checks(plan, Facts())}
