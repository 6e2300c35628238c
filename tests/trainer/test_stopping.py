"""Trainings that are asked to stop: by a signal to one of their ranks, or by the end of their time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import REPOSITORY, environment, free_port
from tests.trainer.faults import HELD
from tests.trainer.ranks import PATIENCE, Run
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

COMMON: dict[str, Any] = {
    "trainer.max_steps": 30,
    "trainer.val_check_interval": 10,
    "trainer.limit_val_batches": 2,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
}
ENDLESS = {
    **COMMON,
    "trainer.max_steps": 1_000_000,
    "model.data.data_impl": "mock",
    "model.override_vocab_size": 304,
}


@pytest.fixture(scope="module")
def whole_run(trainings: Any, pool: WarmPool) -> Run:
    """Return a run that nothing stops."""
    run = Run(trainings, pool, "not_stopped", COMMON, 2)
    assert run.end() == [0, 0], run.output()
    return run


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_step_saves_it_and_costs_no_bit(
    trainings: Any, pool: WarmPool, whole_run: Run, number: signal.Signals
) -> None:
    name = number.name.lower()
    run = Run(trainings, pool, name, COMMON, 2, fault="hold:1:6")
    run.wait_for(HELD)
    run.send(number, 1)
    assert run.end() == [75, 75], run.output()
    (end,) = run.lines("end")
    assert end["reason"] == number.name
    assert end["step"] == 6
    assert [name for name in run.checkpoints() if f"step={end['step']}-" in name] == [Path(end["saved"]).name]
    assert f"stopped by {number.name} before step 30; saved as {end['saved']}" in run.output()
    again = Run(trainings, pool, name, COMMON, 2)
    assert again.end() == [0, 0], again.output()
    assert again.lines("start")[-1]["step"] == end["step"]

    def numbers(run: Run) -> dict[int, tuple[Any, ...]]:
        steps = run.lines("train")
        assert [line["step"] for line in steps] == list(range(1, 31))
        return {line["step"]: (line["loss"], line["grad_norm"], line["consumed_samples"]) for line in steps}

    assert numbers(again) == numbers(whole_run)
    losses = [(line["step"], line["val_loss"]) for line in whole_run.lines("validation")]
    assert [(line["step"], line["val_loss"]) for line in again.lines("validation")] == losses


def test_max_time_counts_for_each_launch_anew(trainings: Any, pool: WarmPool) -> None:
    changes = {**ENDLESS, "trainer.max_time": "00:00:00:03"}
    last = 0
    for _ in range(2):
        run = Run(trainings, pool, "limited", changes, 1, fault="slow:all:100")
        assert run.end() == [75], run.output()
        end = run.lines("end")[-1]
        assert end["reason"] == "max_time"
        # More than the one step that a launch does which has no time left.
        assert end["step"] > last + 1
        last = end["step"]
    assert [line["step"] for line in run.lines("train")] == list(range(1, last + 1))


def test_signal_ends_a_validation_without_a_report_of_it(trainings: Any, pool: WarmPool) -> None:
    changes = {**ENDLESS, "trainer.val_check_interval": 3, "trainer.limit_val_batches": 100_000}
    run = Run(trainings, pool, "validating", changes, 2)
    run.wait_for_step(3)
    run.send(signal.SIGTERM)
    assert run.end() == [75, 75], run.output()
    assert run.lines("validation") == []
    # The checkpoint that was due after it is the one: there is no second, and no loss in its name.
    assert run.checkpoints() == ["megatron_gpt--step=3-consumed_samples=24"]
    assert run.lines("end")[-1]["step"] == 3


def test_a_signal_to_a_rank_that_has_ended_spoils_no_other_rank(trainings: Any, pool: WarmPool) -> None:
    changes = {**COMMON, "trainer.max_steps": 2}
    run = Run(trainings, pool, "ended", changes, 2, fault="tidy:0:2")
    deadline = time.monotonic() + PATIENCE
    while not run.lines("checkpoint"):
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.01)
    # Rank 0 tidies up; the other has nothing left to do but to wait for it.
    time.sleep(0.5)
    run.send(signal.SIGTERM)
    assert run.end() == [0, 0], run.output()
    assert run.lines("end")[-1]["reason"] == "max_steps"


@pytest.mark.parametrize(
    ("rank", "number", "code"),
    # The latter is what srun sends when another rank has exited, say with 2: it must not look like 75.
    [(0, signal.SIGUSR1, 75), (0, signal.SIGTERM, 1), (1, signal.SIGTERM, 1)],
)
def test_signal_before_the_first_step_ends_the_training_at_once(
    trainings: Any, pool: WarmPool, rank: int, number: signal.Signals, code: int
) -> None:
    # The other rank never comes: this one waits for it in C.
    name = f"early-{rank}-{number.name}"
    options, log_dir = trainings.configure(name, COMMON, 2)
    output = trainings.root / f"{name}.out"
    process = pool.start(options, environment(rank, 2, free_port()), output)
    deadline = time.monotonic() + PATIENCE
    while not list(log_dir.glob("nemo_log_*")):
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait() == code
    message = f"rank 0: {number.name} before the first step: nothing to save\n"
    assert output.read_text().endswith(message if rank == 0 else "")
    assert not (log_dir / "metrics.jsonl").exists()


def test_second_request_to_save_does_not_cut_the_save_short() -> None:
    """A user asks first, and soon after that Slurm, before the time limit."""
    process = start_small("training", 0, stays=2.5)
    assert process.stdout
    process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    time.sleep(1.5)
    process.send_signal(signal.SIGUSR1)
    _, error = process.communicate(timeout=PATIENCE)
    assert error == "asked by SIGUSR1\n"
    assert process.returncode == 1


def test_a_second_signal_leaves_at_once_out_of_a_collective(trainings: Any, pool: WarmPool) -> None:
    run = Run(trainings, pool, "stuck", ENDLESS, 2)
    run.wait_for_step(2)
    run.send(signal.SIGSTOP, 1)
    time.sleep(0.3)
    run.send(signal.SIGUSR1, 0)
    # A repeated signal, as Slurm may deliver it, is no second one.
    run.send(signal.SIGUSR1, 0)
    time.sleep(1.2)
    run.send(signal.SIGTERM, 0)
    assert run.ranks[0].wait() == 128 + signal.SIGTERM
    run.send(signal.SIGKILL, 1)
    assert run.ranks[1].wait() == -signal.SIGKILL
    assert run.lines("end") == []
    assert "SIGTERM after SIGUSR1: leaving at once, unsaved" in run.output()


SMALL = """
import ctypes, sys, time
from slipway.trainer.signals import StopSignals
signals = StopSignals(0)
signals.install()
stage, code = sys.argv[1], int(sys.argv[2])
if stage != "starting":
    signals.mark_training()
if stage == "ended":
    signals.mark_ended(code)
if stage == "forked":
    import os
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)
        time.sleep(1)
        os._exit(7)
    taken = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(taken if signals.requested() is None else 1)
print(flush=True)
deadline = time.monotonic() + 30
while signals.requested() is None and time.monotonic() < deadline:
    # In C: what waits in here sees no handler of Python's.
    ctypes.CDLL(None).usleep(10000)
time.sleep(float(sys.argv[3]))
sys.exit(f"asked by {signals.requested().name}")
"""


@pytest.mark.parametrize(
    ("stage", "code", "expected"),
    [("starting", 0, 1), ("training", 0, 1), ("ended", 0, 0), ("ended", 75, 75)],
)
def test_first_signal_ends_the_process_by_its_stage(stage: str, code: int, expected: int) -> None:
    process = start_small(stage, code)
    assert process.stdout
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == expected
    assert ("asked by SIGTERM" in error) == (stage == "training")


def test_a_forked_process_keeps_its_signals_to_itself() -> None:
    process = start_small("forked", 0)
    assert process.stdout
    child = int(process.stdout.readline())
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(child, number)
    process.communicate(timeout=PATIENCE)
    # It went on to its end, and its parent was asked nothing.
    assert process.returncode == 7


def start_small(stage: str, code: int, stays: float = 0) -> subprocess.Popen[str]:
    """Start a process that has nothing but the signals, and `stays` for some seconds after the first."""
    return subprocess.Popen(
        [sys.executable, "-c", SMALL, stage, str(code), str(stays)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
