"""`slipway verify` on runs on disk; each check has a case in which it fails."""

from __future__ import annotations

import io
import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from monitor_samples import (
    JOB_NAME,
    FakeScheduler,
    Runs,
    append,
    end,
    start,
    train,
    validation,
    whole_training,
)

from launcher.cli.app import main
from launcher.errors import UserError
from launcher.monitor.evidence import gather
from launcher.monitor.verification import RunCheck, RunVerdict, Trend, exit_code, measure_trend, verify
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from tests.job_marks import leave_marks

COMPLETED = JobStatus(State.COMPLETED, None, "n[1-2]", "00:01:30", 0)
RANKS = 4


def sound_launch(runs: Runs, number: int = 1, first: int = 0, last: int = 300, max_steps: int = 300) -> Path:
    """Write a launch with all files of a sound training; return its directory."""
    launch = runs.launch(number=number)
    run_dir = launch.parents[1]
    append(launch, whole_training(first, last))
    saving = {
        "create_checkpoint_callback": True,
        "checkpoint_callback_params": {"dirpath": "/elsewhere/checkpoints"},
    }
    # JSON is YAML. The run was moved after it had been launched.
    run = {"results_dir": "/elsewhere"}
    config = {"run": run, "trainer": {"max_steps": max_steps}, "exp_manager": saving}
    (launch / "gpt3_tiny_hydra.yaml").write_text(json.dumps(config))
    (launch / f"log-{JOB_NAME}_{10 + number}.out").write_text("Job 11: run x; rendezvous at n1:2\nstep 1\n")
    for rank in range(RANKS):
        log = launch / "results" / f"nemo_log_globalrank-{rank}_localrank-{rank % 2}.txt"
        log.write_text(f"[INFO rank {rank}] end at step {last}: max_steps\n")
    checkpoint = run_dir / "checkpoints" / f"megatron_gpt--step={last}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "__0_0.distcp").write_text("weights")
    marker = {"step": last, "serial": number, "files": {"__0_0.distcp": 7}}
    (checkpoint / "complete.json").write_text(json.dumps(marker))
    return launch


def verify_launch(launch: Path) -> tuple[int, dict[str, RunCheck]]:
    evidence = gather(launch.parents[1])
    checks = verify(evidence)
    return exit_code(evidence, checks), {check.name: check for check in checks}


def checks_with(checks: dict[str, RunCheck], verdict: RunVerdict) -> list[str]:
    return [name for name, check in checks.items() if check.verdict is verdict]


def test_a_sound_run_is_verified(runs: Runs, scheduler: FakeScheduler) -> None:
    scheduler.set("11", COMPLETED)
    code, checks = verify_launch(sound_launch(runs))
    assert code == 0
    assert {check.verdict for check in checks.values()} == {RunVerdict.OK}
    assert len(checks) == 8
    assert checks["last step"].evidence == "step 300/300"
    assert checks["last step saved"].evidence == "megatron_gpt--step=300"


def test_a_training_loss_that_falls_is_enough(runs: Runs, scheduler: FakeScheduler) -> None:
    scheduler.set("11", COMPLETED)
    launch = sound_launch(runs)
    with_nothing_held_out(launch)
    code, checks = verify_launch(launch)
    assert code == 0
    assert "held-out" not in checks["loss falling"].evidence


def test_a_spike_is_a_note(runs: Runs, scheduler: FakeScheduler) -> None:
    scheduler.set("11", COMPLETED)
    launch = sound_launch(runs)
    rewrite(launch, lambda e: e | {"loss": 10.6} if e["kind"] == "train" and e["step"] == 19 else e)
    code, checks = verify_launch(launch)
    assert code == 0
    assert checks["loss falling"].evidence.endswith("; 1 spike, at step 19")


def test_a_resumed_run_is_verified_as_a_whole(runs: Runs, scheduler: FakeScheduler) -> None:
    """The second launch alone is flat, too short, and begins at step 280; the first was killed at 290."""
    first = sound_launch(runs, 1, last=290)
    second = sound_launch(runs, 2, first=280)
    scheduler.set("11", JobStatus(State.FAILED, "it was killed"))
    scheduler.set("12", COMPLETED)
    code, checks = verify_launch(second)
    assert code == 0, checks
    assert checks["no step missing"].evidence == "steps 1-300"
    assert "falls" in checks["loss falling"].evidence

    lines = (first / "results" / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept_lines = [line for line in lines if not json.loads(line).get("step", 0) >= 270]
    (first / "results" / "metrics.jsonl").write_text("".join(kept_lines))
    code, checks = verify_launch(second)
    assert (code, checks_with(checks, RunVerdict.FAILED)) == (1, ["no step missing"])
    assert checks["no step missing"].evidence == "no record of steps 270-280"


def rewrite(launch: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    path = launch / "results" / "metrics.jsonl"
    events = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(event) + "\n" for event in events if event))


def with_nan(launch: Path) -> None:
    rewrite(launch, lambda e: e | {"loss": math.nan} if e["kind"] == "train" and 50 <= e["step"] < 52 else e)


def with_infinite_held_out_loss(launch: Path) -> None:
    rewrite(launch, lambda e: e | {"val_loss": math.inf} if e["kind"] == "validation" else e)


def with_rising_loss(launch: Path) -> None:
    rewrite(launch, lambda e: e | {"loss": 5 + e["step"] / 100} if e["kind"] == "train" else e)


def with_rising_held_out_loss(launch: Path) -> None:
    rewrite(launch, lambda e: e | {"val_loss": 5 + e["step"]} if e["kind"] == "validation" else e)


def with_a_hole(launch: Path) -> None:
    rewrite(launch, lambda e: None if e["kind"] == "train" and 50 <= e["step"] < 60 else e)


def cut_off(launch: Path) -> None:
    rewrite(launch, lambda e: None if e.get("step", 0) > 250 else e)


def stopped_by_its_time(launch: Path) -> None:
    cut_off(launch)
    append(launch, [end(250, 2000.0) | {"reason": "max_time"}])
    for log in (launch / "results").glob("nemo_log_*"):
        log.write_text("end at step 250: max_time\n")


def with_a_failed_rank(launch: Path) -> None:
    failures = launch / "results" / "failures"
    failures.mkdir()
    failure = {"time": 5.0, "rank": 3, "host": "n2", "error": "OSError: no space", "log": None}
    (failures / "globalrank-3.json").write_text(json.dumps(failure))


def with_a_traceback(launch: Path) -> None:
    """Add a traceback after one of an earlier attempt and a harmless one at an interpreter's end."""
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nValueError: {}\n'
    earlier, harmless, real = (trace.format(word) for word in ("earlier", "harmless", "real"))
    stopped = "srun: error: n1: tasks 0-1: Exited with exit code 75\n"
    later = f"Exception ignored in: f\n{harmless}{stopped}{real}srun: error: n1: task 0: Killed\n"
    log = launch / f"log-{JOB_NAME}_11.out"
    log.write_text(f"{earlier}Job 11: run x; rendezvous at n1:3\n{later}")


def with_a_killed_rank(launch: Path) -> None:
    with_a_traceback(launch)
    log = launch / f"log-{JOB_NAME}_11.out"
    log.write_text(log.read_text().replace("Traceback", "Trace"))


def with_a_silent_rank(launch: Path) -> None:
    (launch / "results" / "nemo_log_globalrank-2_localrank-0.txt").write_text("[INFO rank 2] step 299\n")


def with_a_rank_that_ended_in_an_earlier_attempt(launch: Path) -> None:
    log = launch / "results" / "nemo_log_globalrank-2_localrank-0.txt"
    log.write_text("[INFO rank 2] end at step 200: SIGUSR1\n[INFO rank 2] step 201\n")


def with_a_flat_loss_and_nothing_held_out(launch: Path) -> None:
    """Make the loss noise alone."""
    dice = random.Random(2)
    with_nothing_held_out(launch)
    rewrite(launch, lambda e: e | {"loss": dice.gauss(5, 0.1)} if e["kind"] == "train" else e)


def with_nothing_held_out(launch: Path) -> None:
    rewrite(launch, lambda e: e if e["kind"] != "validation" else None)


def without_the_last_checkpoint(launch: Path) -> None:
    last = launch.parents[1] / "checkpoints" / "megatron_gpt--step=300"
    previous = last.with_name("megatron_gpt--step=200")
    previous.mkdir()
    (previous / "complete.json").write_text(json.dumps({"step": 200, "serial": 0}))
    (last / "__0_0.distcp").write_text("wei")  # of another size than the marker says


@pytest.mark.parametrize(
    ("damage", "check", "evidence"),
    [
        (with_nan, "losses finite", "not a finite number: training loss of steps 50, 51"),
        (with_infinite_held_out_loss, "losses finite", "held-out loss of steps 25, 50"),
        (with_rising_loss, "loss falling", "training 5.1550 → 7.8550, rises"),
        (with_rising_held_out_loss, "loss falling", "held-out 30.0000 → 305.0000"),
        (with_a_flat_loss_and_nothing_held_out, "loss falling", "within its noise"),
        (with_a_hole, "no step missing", "no record of steps 50-59"),
        (cut_off, "last step", "step 250/300"),
        (stopped_by_its_time, "last step", "step 250/300: stopped by max_time"),
        (with_a_failed_rank, "no error of a rank", "rank 3: OSError: no space"),
        (with_a_traceback, "no error of a rank", f"log-{JOB_NAME}_11.out: ValueError: real; and 1 more"),
        (with_a_killed_rank, "no error of a rank", f"log-{JOB_NAME}_11.out: srun: error: n1: task 0: Killed"),
        (with_a_silent_rank, "every rank ended", "no record of rank 2 of 4"),
        (with_a_rank_that_ended_in_an_earlier_attempt, "every rank ended", "no record of rank 2 of 4"),
        (without_the_last_checkpoint, "last step saved", "the newest complete checkpoint is of step 200"),
    ],
)
def test_a_run_that_is_not_sound_is_not_verified(
    runs: Runs, scheduler: FakeScheduler, damage: Callable[[Path], None], check: str, evidence: str
) -> None:
    scheduler.set("11", COMPLETED)
    launch = sound_launch(runs)
    damage(launch)
    code, checks = verify_launch(launch)
    assert code == 1
    assert checks[check].verdict is RunVerdict.FAILED
    assert evidence in checks[check].evidence


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (JobStatus(State.FAILED, "exit code 1", exit_code=1), 1),
        (JobStatus(State.INTERRUPTED, "saved before its end", exit_code=75), 1),
        (JobStatus(State.CANCELLED), 1),
        (JobStatus(State.UNKNOWN, "nobody can tell"), 3),
        (JobStatus(State.RUNNING), 4),
        (JobStatus(State.PENDING), 4),
    ],
)
def test_exit_code_for_each_end_of_the_job(
    runs: Runs, scheduler: FakeScheduler, status: JobStatus, code: int
) -> None:
    scheduler.set("11", status)
    launch = sound_launch(runs)
    actual_code, checks = verify_launch(launch)
    assert actual_code == code
    assert checks["ended well"].verdict is (RunVerdict.FAILED if code == 1 else RunVerdict.UNKNOWN)
    assert status.state.value in checks["ended well"].evidence


def test_unfinished_work_of_a_running_job_is_no_failure(runs: Runs, scheduler: FakeScheduler) -> None:
    scheduler.set("11", JobStatus(State.RUNNING))
    launch = runs.launch()
    append(launch, whole_training(0, 100)[:-1])
    code, checks = verify_launch(launch)
    assert code == 4
    assert checks_with(checks, RunVerdict.FAILED) == []
    assert checks["last step"].evidence == "step 100/300 so far"


def test_verify_reports_the_loss_that_stopped_the_trainer(runs: Runs, scheduler: FakeScheduler) -> None:
    """The trainer writes no step for such a loss."""
    scheduler.set("11", JobStatus(State.FAILED, "exit code 3", exit_code=3))
    launch = sound_launch(runs)
    message = "the training loss of step 301 is nan: stopping without a checkpoint"
    (launch / f"log-{JOB_NAME}_11.out").write_text(f"error: {message}\n")
    _, checks = verify_launch(launch)
    assert checks["losses finite"] == RunCheck("losses finite", RunVerdict.FAILED, message)


def test_errors_of_an_earlier_attempt_of_a_requeued_job_are_over(
    runs: Runs, scheduler: FakeScheduler
) -> None:
    scheduler.set("11", COMPLETED)
    launch = sound_launch(runs)
    with_a_failed_rank(launch)
    now = time.time()
    (launch / "results" / "nemo_error_log.txt").write_text("Traceback (most recent call last):\nE: x\n")
    leave_marks(launch, "11", attempt=0, started=now - 50, ended=now - 40, code=1)
    assert verify_launch(launch)[0] == 1
    leave_marks(launch, "11", attempt=1, started=now + 10, ended=now + 20)
    assert verify_launch(launch)[0] == 0


def test_a_trend_needs_enough_steps_or_a_held_out_loss(runs: Runs, scheduler: FakeScheduler) -> None:
    scheduler.set("11", COMPLETED)
    launch = runs.launch()
    append(launch, [start(max_steps=4), *(train(step) for step in range(1, 5)), end(4, 1002.0)])
    code, checks = verify_launch(launch)
    assert checks["loss falling"].verdict is RunVerdict.UNKNOWN
    assert code == 1  # nothing else of a sound run is there
    append(launch, [validation(2, 5.0), validation(4, 4.9)])
    assert verify_launch(launch)[1]["loss falling"].verdict is RunVerdict.OK


def test_a_run_without_a_launch_is_refused(runs: Runs) -> None:
    (runs.base / "x" / "launches").mkdir(parents=True)
    with pytest.raises(UserError, match="has no launch yet"):
        gather(runs.base / "x")


def test_a_launch_without_steps_fails(runs: Runs, scheduler: FakeScheduler) -> None:
    scheduler.set("11", COMPLETED)
    launch = runs.launch()
    code, checks = verify_launch(launch)
    assert (code, checks["last step"].evidence) == (1, "the trainer recorded no step")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_narrow_terminal_keeps_each_verdict_in_one_line(
    runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.launch()
    scheduler.set("11", COMPLETED)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"COLUMNS": "36", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["verify", "gpt3_tiny", "--base-results-dir", str(runs.base)]) == 1
    output = terminal.getvalue()
    assert "cannot tell" in output
    assert "losses finite" in output and "\x1b[1mlosses finite" not in output, "a name is plain"


def test_nemos_run_is_verified_by_its_log(runs: Runs, scheduler: FakeScheduler) -> None:
    scheduler.set("11", COMPLETED)
    launch = runs.launch(engine="nemo")
    bar = "Epoch 0: : 50%|█ | {0}/30 [00:0{1}<00:03, reduced_train_loss={2:.3f}, global_step={3}.00, "
    bar += "val_loss={4}]\r"
    lines = (bar.format(n, n // 10, 9 - n / 30, n - 1, 9 if n < 20 else 8.5) for n in range(1, 31))
    (launch / f"log-{JOB_NAME}_11.out").write_text("".join(lines))
    (launch / "gpt3_tiny_hydra.yaml").write_text('{"trainer": {"max_steps": 30}}')
    checkpoints = launch.parents[1] / "checkpoints"
    (checkpoints / "megatron_gpt--val_loss=8.50-step=30-consumed_samples=60.0-last").mkdir(parents=True)
    code, checks = verify_launch(launch)
    assert code == 0, checks
    assert checks_with(checks, RunVerdict.NOT_APPLICABLE) == ["no step missing", "every rank ended"]
    (checkpoints / "megatron_gpt--val_loss=8.50-step=30-consumed_samples=60.0-last-unfinished").touch()
    assert checks_with(verify_launch(launch)[1], RunVerdict.FAILED) == ["last step saved"]


def test_a_data_preparation_is_verified_by_its_files(runs: Runs, scheduler: FakeScheduler) -> None:
    scheduler.set("11", COMPLETED)
    launch = runs.launch(stage="data_preparation")
    data = runs.base / "it's data"
    data.mkdir()
    config = {"output_prefix": f"{data}/corpus", "splits": None, "phase": None}
    assert verify_launch(launch)[0] == 3  # without a configuration nothing is known of the outputs
    (launch / "gpt3_tiny_hydra.yaml").write_text(json.dumps({"data_preparation": config}))
    for name in ["corpus.bin", "corpus.idx", "corpus.manifest.json"]:
        (data / name).write_text("x")
    code, checks = verify_launch(launch)
    assert (code, checks["no error of a rank"].evidence) == (3, "the job has no log")
    (launch / f"log-{JOB_NAME}_11.out").write_text("all is well\n")
    code, checks = verify_launch(launch)
    assert (code, list(checks)) == (0, ["ended well", "outputs exist", "no error of a rank"])
    (data / "corpus.bin").write_text("")
    code, checks = verify_launch(launch)
    assert code == 1
    assert checks["outputs exist"].evidence == f"missing or empty: {data}/corpus.bin"
    config["phase"] = "fetch"
    (launch / "gpt3_tiny_hydra.yaml").write_text(json.dumps({"data_preparation": config}))
    code, checks = verify_launch(launch)
    assert (code, checks_with(checks, RunVerdict.NOT_APPLICABLE)) == (0, ["outputs exist"])


def test_a_trend_is_distinguished_from_noise() -> None:
    dice = random.Random(1)
    misjudged = 0
    for _ in range(200):
        flat = [5.0 + dice.gauss(0, 0.1) for _ in range(200)]
        measured = measure_trend(flat)
        assert measured
        misjudged += measured.trend is not Trend.FLAT
    assert misjudged <= 4, "three standard errors: one in four hundred"
    falling = [5.0 - step / 1000 + dice.gauss(0, 0.1) for step in range(200)]
    spiked = [*falling[:-3], 50.0, *falling[-2:]]
    for losses in (falling, spiked):
        measured = measure_trend(losses)
        assert measured and measured.trend is Trend.FALLS
    rising = measure_trend(falling[::-1])
    assert rising and rising.trend is Trend.RISES
    assert measure_trend(falling[:19]) is None
