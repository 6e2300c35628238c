"""The space that checkpoints take, and the room for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.checks.facts import Facts, LocalPath, LocalPaths, PathFacts
from launcher.checks.findings import Finding, Severity
from launcher.checks.registry import run_checks
from launcher.checks.rules.files import checkpoint_problems
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


def saved(changes: dict[str, Any], engine: str = "nemo") -> Checkpoints | None:
    values = Values(changed(GPT, {**SIZES, **changes}))
    model = model_size(values)
    assert model is not None
    assert model.parameters == PARAMETERS
    return checkpoints_of(values, model, engine)


@pytest.mark.parametrize(
    ("changes", "engine", "each"),
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
def test_bytes_of_a_checkpoint(changes: dict[str, Any], engine: str, each: int) -> None:
    found = saved(changes, engine)
    assert found is not None
    assert found.size == each * PARAMETERS


@pytest.mark.parametrize("name", ["adamw", "mcore_distributed_optim"])
@pytest.mark.parametrize("context", [1, 2])
def test_the_nodes_together_hold_one_checkpoint_in_memory_during_a_save(name: str, context: int) -> None:
    changes = {"model.optim.name": name, "model.context_parallel_size": context}
    config = changed(GPT, {**SIZES, **changes, "model.tensor_model_parallel_size": 1})
    nodes = 2
    held = bytes_of_save(config, nodes, "megatron")
    assert held is not None
    assert nodes * held == pytest.approx(14 * PARAMETERS, rel=1e-6)
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
    found = saved(changes, engine)
    assert found is not None
    assert (found.kept, found.saves) == (kept, saves)
    assert found.most == (saves if kept is None else min(kept, saves))


def test_training_without_saves_takes_no_space() -> None:
    assert saved({"exp_manager.create_checkpoint_callback": False}) is None
    assert saved({"trainer.max_steps": None}) is None


def found_with(
    free: float, *, there: int | None = 0, by: str = "file system", engine: str = "nemo", top: int = 5
) -> list[Finding]:
    """The findings with so many terabytes; a checkpoint takes 70.7 GB."""
    plan = plan_of(changed(GPT, {**SIZES, f"{CALLBACK}.save_top_k": top}), engine=engine)
    paths = PathFacts(free_bytes=int(free * 1e12), free_by=by, checkpoints_there=there)
    return [*checkpoint_problems(plan, paths)]


def test_checkpoint_without_room_is_an_error() -> None:
    (found,) = found_with(0.07)
    assert found.severity is Severity.ERROR
    assert found.message == (
        "training.exp_manager.checkpoint_callback_params.dirpath='/results/run/checkpoints':"
        " a checkpoint takes about 70.7 GB, and 70 GB are free"
    )
    assert found_with(0.0707, there=7) == []


def test_a_full_disk_of_a_laptop_is_a_warning() -> None:
    """Several nodes do not write to a disk of this machine's own, however full it is."""
    own = LocalPaths((LocalPath("base_results_dir", "/results", "ext4", "/"),), ())
    paths = PathFacts(free_bytes=10**9, checkpoints_there=0, local=own)
    (found,) = checkpoint_problems(plan_of(changed(GPT, SIZES)), paths)
    assert found.severity is Severity.WARNING
    assert found.message.endswith("and 1 GB are free of this machine's own disk")
    shared = replace(paths, local=LocalPaths((), ()))
    (found,) = checkpoint_problems(plan_of(changed(GPT, SIZES)), shared)
    assert found.severity is Severity.ERROR
    alone = plan_of(changed(GPT, {**SIZES, "trainer.num_nodes": 1}))
    (found,) = checkpoint_problems(alone, paths)
    assert found.severity is Severity.ERROR


def test_checkpoints_without_room_together_are_a_warning() -> None:
    (found,) = found_with(0.3, by="quota")
    assert found.severity is Severity.WARNING
    assert found.message == (
        "training.exp_manager.checkpoint_callback_params.save_top_k=5: 7 checkpoints of about 70.7 GB take"
        " 495 GB, and 300 GB are free (by the quota): enough for 4"
    )
    assert found.fix == (
        "training.exp_manager.checkpoint_callback_params.save_top_k=2,"
        " or base_results_dir=... where there is more space"
    )
    # What it says makes it pass, and one more would not.
    assert found_with(0.3, top=2) == []
    assert found_with(0.3, top=3) != []
    assert found_with(0.5) == []


def test_existing_checkpoints_count_as_kept() -> None:
    assert found_with(0.3, there=3) == []
    (found,) = found_with(0.15, there=3)
    assert (
        "4 more checkpoints of about 70.7 GB take 283 GB, and 150 GB are free: enough for 2" in found.message
    )
    # Two beside the three that are there are the best three, the newest, and the one that is being written.
    assert found.fix is not None and f"{CALLBACK}.save_top_k=3, or" in found.fix
    assert found_with(0.15, there=3, top=3) == []
    assert found_with(0.15, there=7) == []
    assert found_with(0.3, there=None) == found_with(0.3)


def test_another_directory_is_named_where_no_number_fits() -> None:
    assert [found.fix for found in found_with(0.15)] == ["base_results_dir=... where there is more space"]
    (found,) = found_with(0.3, engine="megatron_lm")
    assert found.fix is not None and found.fix.startswith("fewer: Megatron-LM keeps them all; or ")
    assert "10 checkpoints" in found.message


def test_unknown_space_skips_the_check() -> None:
    plan = plan_of(changed(GPT, SIZES))
    paths = PathFacts(missing={"free_bytes": "statvfs timed out"})
    told = [found for found in run_checks(plan, Facts(paths=paths)) if found.id == "space.checkpoints"]
    assert [(found.severity, found.why) for found in told] == [(Severity.SKIPPED, "statvfs timed out")]
    # Nobody looked: a dry run says nothing of it.
    assert "space.checkpoints" not in {found.id for found in run_checks(plan, Facts())}
