"""A rank that dies ends the job, and the report names the first one that died."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from slipway.trainer import failures, logs
from slipway.trainer.failures import Failure, Peers
from slipway.trainer.world import World
from tests.trainer.ranks import Run
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

MOCK: dict[str, Any] = {
    "trainer.max_steps": 1_000_000,
    "trainer.limit_val_batches": 1,
    "model.data.data_impl": "mock",
    "model.override_vocab_size": 304,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "pipeline": {"model.pipeline_model_parallel_size": 2},
}


def test_one_rank_raises_and_the_others_point_at_it(trainings: Any, pool: WarmPool) -> None:
    changes = {**MOCK, "model.tensor_model_parallel_size": 2}
    run = Run(trainings, pool, "raising", changes, 4, fault="raise:2:4")
    assert run.end() == [1, 1, 1, 1]
    assert run.last_step() == 3
    # The cause once, whole; the others' errors are lines, and theirs are in their own logs.
    assert run.output().count("Traceback") == 1
    assert "rank 2 (local rank 2) failed:\nTraceback" in run.output(2)
    assert "ValueError: a matrix is missing\nand more" in run.output(2)
    host = socket.gethostname()
    line = (
        f"rank 2 on {host} was lost: ValueError: a matrix is missing; its error is in "
        "nemo_log_globalrank-2_localrank-2.txt"
    )
    assert run.output(0).endswith(f"rank 0 (local rank 0): {line}\n")
    for rank in (0, 1, 3):
        log = (run.log_dir / f"nemo_log_globalrank-{rank}_localrank-{rank}.txt").read_text()
        assert log.endswith(f"rank {rank} (local rank {rank}): {line}\n")
        assert "Traceback" in log
    error_log = (run.log_dir / "nemo_error_log.txt").read_text()
    assert error_log.count("Traceback") == 1
    assert line in error_log
    first = failures.find_first(run.log_dir, 4)
    assert first is not None
    assert (first.rank, first.host, first.error) == (2, host, "ValueError: a matrix is missing")


def test_killed_rank_is_named_by_another(trainings: Any, pool: WarmPool) -> None:
    run = Run(trainings, pool, "killed", MOCK, 4)
    run.wait_for_step(2)
    run.send(signal.SIGKILL, 3)
    assert run.end() == [1, 1, 1, -signal.SIGKILL]
    assert "Traceback" not in run.output()
    assert "rank 0 (local rank 0): rank 3 on " in run.output(0)
    assert "its process is gone without a word" in run.output(0)
    first = failures.find_first(run.log_dir, 4)
    assert first is not None
    assert first.rank == 3
    # Failures of one launch are not reported by the next with the same logs.
    again = Run(trainings, pool, "killed", {**MOCK, "trainer.max_steps": 3}, 4)
    assert again.end() == [0, 0, 0, 0], again.output()
    assert failures.find_first(run.log_dir, 4) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quantity", ["loss", "gradient"])
def test_non_finite_loss_ends_all_ranks_before_a_save(
    trainings: Any, pool: WarmPool, layout: str, quantity: str
) -> None:
    """A save is due after each step."""
    often = {"exp_manager.checkpoint_callback_params.every_n_train_steps": 1, "trainer.limit_val_batches": 0}
    spoiled = {"model.optim.lr": 1e30, "model.optim.sched.min_lr": 1e29} if quantity == "loss" else {}
    changes = {**MOCK, **LAYOUTS[layout], **often, **spoiled}
    fault = "norm:all:3" if quantity == "gradient" else ""
    run = Run(trainings, pool, f"diverging_{quantity}_{layout}", changes, 2, fault)
    assert run.end() == [3, 3], run.output()
    message = (
        f"the {'training loss' if quantity == 'loss' else 'gradient norm'} of step {run.last_step() + 1} is "
    )
    assert message in run.output(0)
    # The last finite step's is complete, though it may still have been on its way.
    assert [name for name in run.checkpoints() if f"step={run.last_step()}-" in name]
    assert not [name for name in run.checkpoints() if f"step={run.last_step() + 1}-" in name]
    assert not list((run.log_dir / "checkpoints").glob(".unfinished-*"))
    assert "Traceback" not in run.output()


def world(rank: int, size: int) -> World:
    names = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    return World.from_environment(names)


def test_first_failure_is_the_earliest_of_the_ranks(tmp_path: Path) -> None:
    assert failures.find_first(tmp_path, 8) is None
    for rank, seconds in ((1, 30.0), (5, 20.0), (7, 10.0)):
        Failure(seconds, rank, "n1", "an error").write(tmp_path)
    (tmp_path / failures.DIRECTORY / "globalrank-0.json").write_text("{half")
    first = failures.find_first(tmp_path, 6)
    assert first is not None
    assert first.rank == 5
    failures.forget(tmp_path, 5)
    failures.forget(tmp_path, 5)
    first = failures.find_first(tmp_path, 6)
    assert first is not None
    assert first.rank == 1


def test_rank_that_left_an_error_is_named_before_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    # Nobody waits for the child: a zombie is gone too.
    host = socket.gethostname()
    peers = Peers(((host, os.getpid()), (host, child), ("elsewhere", 1)))
    while peers.find_gone() != [1]:
        time.sleep(0.01)
    Failure(time.time(), 2, "elsewhere", "ValueError: no").write(tmp_path)
    cause = failures.find_cause(tmp_path, world(0, 3), peers)
    assert cause is not None
    assert cause.rank == 2
    failures.forget(tmp_path, 2)
    cause = failures.find_cause(tmp_path, world(0, 3), peers)
    assert cause is not None
    assert cause.rank == 1
    os.waitpid(child, 0)
    failures.forget(tmp_path, 1)
    monkeypatch.setattr(failures, "PATIENCE_SECONDS", 0.0)
    assert failures.find_cause(tmp_path, world(0, 3), Peers()) is None
    assert "(RuntimeError: Socket closed)" in failures.describe(None, RuntimeError("Socket closed\nmore"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:42"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (BrokenPipeError("Broken pipe"), False),
    ],
)
def test_exceptions_of_a_lost_peer_are_recognised(error: Exception, expected: bool) -> None:
    assert failures.is_lost_peer(error) is expected
    outer = RuntimeError("the checkpoint cannot be written")
    outer.__cause__ = error
    assert failures.is_lost_peer(outer) is expected


def test_same_error_of_many_ranks_is_printed_in_full_once(tmp_path: Path, capsys: Any) -> None:
    for rank in range(3):
        logs.record_failure(tmp_path, world(rank, 3), ValueError("no"), Peers())
    stderr = capsys.readouterr().err
    assert stderr.count("rank 0 (local rank 0) failed:") == 1
    assert "rank 1" not in stderr
    log = (tmp_path / "nemo_log_globalrank-1_localrank-1.txt").read_text()
    assert log.endswith("rank 1 (local rank 1): the same as rank 0: ValueError: no\n")
    assert json.loads((tmp_path / failures.DIRECTORY / "globalrank-2.json").read_text())["rank"] == 2
