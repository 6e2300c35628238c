"""Saving of trainings, in their own directory of checkpoints and in each other's."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from launcher.estimates import cost
from launcher.estimates.training import model_size
from launcher.estimates.values import Values
from tests.trainer.conftest import config_with
from tests.trainer.ranks import Run
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

TENSOR_2 = {"model.tensor_model_parallel_size": 2}


def checkpoints_of(trainings: Any, name: str) -> set[str]:
    """Return the names of a run's checkpoints."""
    return {path.name for path in (trainings.root / name / "checkpoints").glob("megatron_gpt*")}


def test_only_the_last_step_is_saved_without_intervals_and_validation(trainings: Any) -> None:
    params = "exp_manager.checkpoint_callback_params"
    changes = {f"{params}.every_n_train_steps": 0, "trainer.limit_val_batches": 0}
    outcome = trainings("at_the_end", changes)
    assert outcome.codes == [0], outcome.stderr
    assert checkpoints_of(trainings, "at_the_end") == {"megatron_gpt--step=6-consumed_samples=48"}
    assert "checkpoints: at the end, in " in outcome.stdout[0]


def test_generators_that_differ_end_no_training(trainings: Any) -> None:
    """Rank 1 has drawn once more: at the next save it takes the state of rank 0, which the checkpoint has."""
    changes = {
        "trainer.max_steps": 3,
        "trainer.limit_val_batches": 0,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": 1,
        "model.distributed_timeout_seconds_after_init": 60,
    }
    outcome = trainings("drawn", changes, world=2, fault="draw:1:1")
    assert outcome.codes == [0, 0], outcome.stderr
    warnings = outcome.stdout[0].count("the random generators of the 2 data-parallel ranks differ")
    assert warnings == 1
    assert len(outcome.lines("checkpoint")) == 3


def test_step_time_contains_no_save(trainings: Any) -> None:
    """Neither the beginning nor the end of a save counts: the save of step 40 waits for that of step 20."""
    changes = {
        "trainer.max_steps": 41,
        "trainer.limit_val_batches": 0,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": 20,
    }
    outcome = trainings("clock", changes, fault="clock:0:0")
    assert outcome.codes == [0], outcome.stderr
    lines = [line for line in outcome.stdout[0].splitlines() if line.startswith("settled, ")]
    assert lines[0] == "settled, paused True"


@pytest.mark.parametrize(("precision", "bytes_each"), [("bf16", 14), (32, 12)])
def test_checkpoint_takes_its_estimated_bytes(trainings: Any, precision: Any, bytes_each: int) -> None:
    """launcher/estimates counts weights, master weights if these are in 16 bits, and two moments."""
    params = "exp_manager.checkpoint_callback_params"
    changes = {
        "trainer.precision": precision,
        "trainer.max_steps": 1,
        "trainer.limit_val_batches": 0,
        f"{params}.every_n_train_steps": 0,
        "model.megatron_amp_O2": precision == "bf16",
        "model.hidden_size": 256,
        "model.ffn_hidden_size": 1024,
        "model.max_position_embeddings": 32,
    }
    outcome = trainings(f"sized_{precision}", changes)
    assert outcome.codes == [0], outcome.stderr
    (directory,) = (trainings.root / f"sized_{precision}" / "checkpoints").glob("megatron_gpt*")
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    values = Values(config_with({**changes, "model.override_vocab_size": 304}))
    model = model_size(values)
    assert model is not None
    assert model.parameters == 2 * (12 * 256**2 + 13 * 256) + (304 + 32) * 256 + 2 * 256
    estimate = cost.checkpoints_of(values, model, "megatron")
    assert estimate is not None
    assert estimate.size == bytes_each * model.parameters
    # The rest is what each file and each tensor is introduced with.
    assert estimate.size < size < 1.02 * estimate.size


def test_checkpoint_that_one_rank_cannot_write_ends_the_job_and_stays_unfinished(trainings: Any) -> None:
    # The limit acts as a full disk: the logs are smaller, the rank's part of a checkpoint is not.
    outcome = trainings("full", TENSOR_2, 2, fault="full:1:100000")
    log_dir = outcome.log_dir
    assert outcome.codes == [1, 1]
    logs = [(log_dir / f"nemo_log_globalrank-{rank}_localrank-{rank}.txt").read_text() for rank in range(2)]
    assert "__1_0.distcp: [Errno 27] File too large" in logs[1]
    for log in logs:
        assert " failed:\nTraceback" in log
        assert "cannot be written" in log
    # Both learn of it at once; the first to report it prints its traceback.
    assert any(" failed:\nTraceback" in stderr for stderr in outcome.stderr)
    # Rank 0 always reports it; rank 1, which is not the first of its node, only if it is the first to do so.
    assert "cannot be written" in outcome.stderr[0]
    assert (" failed:\nTraceback" in outcome.stderr[1]) == ("cannot be written" in outcome.stderr[1])
    (directory,) = [path for path in (log_dir / "checkpoints").iterdir() if path.is_dir()]
    assert directory.name.startswith(".unfinished-")
    assert not (directory / "complete.json").exists()


def test_a_second_training_does_not_write_into_the_directory_of_another(
    trainings: Any, pool: WarmPool
) -> None:
    changes = {**TENSOR_2, "trainer.max_steps": 100000}
    first = Run(trainings, pool, "first", changes, 2, fault="slow:all:100")
    first.wait_for_step(1)
    log_dir = first.log_dir
    own_directory = {"exp_manager.checkpoint_callback_params.dirpath": str(log_dir / "checkpoints")}
    second = trainings("second", own_directory)
    first.send(signal.SIGKILL)
    # It was at work until then.
    assert -signal.SIGKILL in first.end()
    assert second.codes == [2]
    (message,) = second.stderr[0].splitlines()
    assert f"{log_dir / 'checkpoints'}: process {first.ranks[0].pid} on " in message
    assert "training.run.dependency=singleton" in message


def test_a_training_that_starts_afresh_is_the_one_to_continue(trainings: Any) -> None:
    params = "exp_manager.checkpoint_callback_params"
    few = {f"{params}.every_n_train_steps": 2, f"{params}.save_top_k": 1}
    assert trainings("afresh", few).codes == [0]
    before = checkpoints_of(trainings, "afresh")
    assert before
    anew = trainings(
        "afresh", {**few, "exp_manager.resume_if_exists": False}, arguments=["--stop-after", "3"]
    )
    assert anew.codes == [0], anew.stderr
    assert anew.lines("start")[1]["step"] == 0
    last = f"megatron_gpt--val_loss={anew.lines('validation')[-1]['val_loss']:.2f}-step=3-consumed_samples=24"
    # The second training keeps one of its two, and leaves the first training's alone.
    assert checkpoints_of(trainings, "afresh") == before | {last}
    assert trainings("afresh", few).lines("start")[2]["step"] == 3


def test_steps_go_on_while_older_checkpoints_are_removed(trainings: Any) -> None:
    params = "exp_manager.checkpoint_callback_params"
    changes = {
        "trainer.max_steps": 4,
        "trainer.limit_val_batches": 0,
        f"{params}.every_n_train_steps": 2,
        f"{params}.async_save": False,
    }
    outcome = trainings("removing", changes, fault="retain:0:3")
    assert outcome.codes == [0], outcome.stderr


def test_the_first_saves_are_validated_and_planned_for_all(trainings: Any) -> None:
    every = {"exp_manager.checkpoint_callback_params.every_n_train_steps": 1}
    changes = {"trainer.max_steps": 5, "trainer.limit_val_batches": 0, **every}
    outcome = trainings("planned", changes, fault="plans:0:0")
    assert outcome.codes == [0], outcome.stderr
    assert len(outcome.lines("checkpoint")) == 5
    assert outcome.stdout[0].count("save validated") == 1
    # The second finds that nothing has changed.
    assert outcome.stdout[0].count("plans gathered") == 2


# Where each step is saved, one is being saved in the background when the run goes.
@pytest.mark.parametrize(
    ("fault", "every", "world"),
    [
        ("delete", 1, 1),
        ("delete", 3, 1),
        ("move", 3, 1),
        ("replace", 1, 1),
        ("replace", 3, 2),
        ("empty", 3, 1),
        ("forget", 3, 1),
    ],
)
def test_a_training_whose_run_is_gone_saves_nothing_and_ends(
    trainings: Any, fault: str, every: int, world: int
) -> None:
    """The next training of this name would go on from its weights."""
    params, name = "exp_manager.checkpoint_callback_params", f"{fault}_{every}"
    checkpoints = trainings.root / f"{name}_elsewhere" if fault == "forget" else None
    changes = {
        "trainer.limit_val_batches": 0,
        "exp_manager.create_tensorboard_logger": False,  # its writer has a traceback of its own
        f"{params}.every_n_train_steps": every,
        f"{params}.save_top_k": -1,
        **({f"{params}.dirpath": str(checkpoints)} if checkpoints else {}),
    }
    outcome = trainings(name, changes, world=world, fault=f"{fault}:0:3")
    assert outcome.codes == [2] * world, outcome.stderr
    (line,) = [line for line in outcome.stderr[0].splitlines() if "error: " in line]
    assert line.endswith(" was deleted or moved under this training, which saves nothing and ends")
    assert "Traceback" not in "".join(outcome.stderr)
    left = {str(path.relative_to(outcome.log_dir)) for path in outcome.log_dir.rglob("*")}
    if fault == "replace":
        assert left == {"checkpoints", "checkpoints/of another training"}
    elif fault == "empty":
        assert not [path for path in left if path.startswith("checkpoints")]
    else:
        assert left == set()
    if checkpoints:
        steps = [path.name for path in checkpoints.glob("megatron_gpt*") if "step=3" in path.name]
        assert steps == []
