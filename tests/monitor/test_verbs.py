"""`slipway follow | plot` through their parsers, on runs on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from monitor_samples import (
    COMPLETED,
    FAILED,
    PENDING,
    RUNNING,
    FakeScheduler,
    Runs,
    append,
    end,
    log,
    slipway,
    start,
    train,
    validation,
    whole_training,
)

from launcher.errors import UserError
from launcher.jobs.launches import open_launch
from launcher.monitor import polling
from launcher.monitor.follow import LinesView
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State

Capsys = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("fast")


def test_a_pipe_imports_neither_rich_nor_plots(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    directory = runs.launch(job_id=None, error="refused")
    append(directory, whole_training(0, 10))
    code = f"""
import argparse, sys
from launcher.cli import history, logs, status
parser = argparse.ArgumentParser()
verbs = parser.add_subparsers()
for verb in (status, logs, history):
    verb.add_parser(verbs)
once = (["status"], ["status", "--json"], ["plot", "--json", "gpt3_tiny"])
for arguments in (*once, ["status", "--watch"], ["follow", "gpt3_tiny"]):
    args = parser.parse_args([*arguments, "--base-results-dir", {str(tmp_path)!r}])
    args.run(args)
heavy = {{"rich", "matplotlib", "plotext", "torch", "submitit", "hydra", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "NOT_SUBMITTED" in done.stdout


# follow


def test_follow_in_a_pipe(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch(), whole_training(0, 300))
    scheduler.set("11", PENDING, RUNNING, RUNNING, COMPLETED)
    assert slipway(runs, "follow", "gpt3_tiny") == 0
    lines = [line.split("  ", 1)[-1] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "gpt3_tiny, launch 1, job 11"
    assert lines[1] == "job 11 PENDING (Resources)"
    assert "job 11 RUNNING on n[1-2]" in lines
    assert "step 300/300  held-out loss 4.3647" in lines
    assert lines[-1] == "job 11 COMPLETED after 00:01:30"
    assert sum("lr " in line for line in lines) == 1  # hundreds of steps at once are one line


def test_follow_tells_of_an_ended_job_in_the_order_of_its_events(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    append(runs.launch(), whole_training(0, 50))
    scheduler.set("11", COMPLETED)
    assert slipway(runs, "follow", "gpt3_tiny") == 0
    lines = [line.split("  ", 1)[-1] for line in capsys.readouterr().out.splitlines()]
    beginnings = [
        "gpt3_tiny,",
        "the trainer started",
        "unigram",
        "step 25/",
        "step 50/",
        "step 50/",
        "job 11",
    ]
    assert len(lines) == len(beginnings) and all(map(str.startswith, lines, beginnings)), lines


def test_follow_says_why_nothing_was_trained(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch(), [start(300), {**end(300, 1001.0), "reason": "already_complete"}])
    scheduler.set("11", RUNNING, COMPLETED)
    assert slipway(runs, "follow", "gpt3_tiny") == 0
    output = capsys.readouterr().out
    assert "the trainer resumed from step 300" in output
    assert "nothing left to do: increase training.trainer.max_steps to continue" in output


def test_follow_shows_the_end_of_a_failed_jobs_log(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    directory = runs.launch()
    log(directory).write_text("".join(f"line {i}\n" for i in range(100)))
    scheduler.set("11", FAILED)
    assert slipway(runs, "follow", "gpt3_tiny") == 1
    message = capsys.readouterr().err
    assert "FAILED (exit code 1)" in message and "line 80\n" in message and "line 79\n" not in message
    assert str(log(directory)) in message


def test_follow_a_training_that_was_interrupted(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    log(runs.launch()).write_text("saved at step 120\n")
    scheduler.set("11", JobStatus(State.INTERRUPTED, "saved before its end: launching again continues"))
    assert slipway(runs, "follow", "gpt3_tiny") == 75
    message = capsys.readouterr().err
    assert "INTERRUPTED (saved before its end: launching again continues)" in message
    assert "The end of" not in message  # nothing went wrong


def test_follow_gives_up_when_the_state_is_unknown(runs: Runs, scheduler: FakeScheduler) -> None:
    runs.launch()
    assert slipway(runs, "follow", "gpt3_tiny") == 3


def test_follow_a_job_that_left_no_log(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    runs.launch()
    scheduler.set("11", JobStatus(State.CANCELLED, "by 0"))
    assert slipway(runs, "follow", "gpt3_tiny") == 1
    assert "has no log" in capsys.readouterr().err


def test_ctrl_c_leaves_the_job_alone(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.launch()
    scheduler.set("11", RUNNING)

    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LinesView, "show", interrupt)
    assert slipway(runs, "follow", "gpt3_tiny") == 130
    message = capsys.readouterr().err
    assert "job 11 continues" in message and "slipway follow" in message
    assert "slipway cancel" in message


def test_a_bug_in_the_watching_thread_is_not_hidden(runs: Runs, scheduler: FakeScheduler) -> None:
    runs.launch()
    scheduler.set("11", RUNNING)
    calls = iter([[RUNNING]])
    scheduler.statuses = lambda refs: next(calls)  # type: ignore[method-assign]
    with pytest.raises(StopIteration):
        slipway(runs, "follow", "gpt3_tiny")


def test_a_scheduler_that_hangs_is_not_taken_for_a_running_job(runs: Runs, scheduler: FakeScheduler) -> None:
    runs.launch()
    answers, hang = iter([[RUNNING]]), threading.Event()

    def hanging(refs: object) -> list[JobStatus]:
        answer = next(answers, [JobStatus(State.UNKNOWN)])
        if answer != [RUNNING]:
            hang.wait(10)
        return answer

    scheduler.statuses = hanging  # type: ignore[method-assign]
    with polling.job_poller(open_launch(runs.base / "gpt3_tiny"), patience=0.5) as poller:
        assert poller.snapshot().states == [State.RUNNING]
        hang.wait(0.6)
        assert poller.snapshot().is_over and poller.snapshot().states == [State.UNKNOWN]
        poller.mark_alive()  # the trainer still records steps
        assert not poller.snapshot().is_over
    hang.set()


def test_the_live_panel(runs: Runs, scheduler: FakeScheduler) -> None:
    import io

    from rich.console import Console

    from launcher.monitor.follow import follow_launch
    from launcher.monitor.live import LiveView, sparkline

    append(runs.launch(), whole_training(0, 300))
    scheduler.set("11", PENDING, RUNNING, COMPLETED)
    screen = io.StringIO()
    launch = open_launch(runs.base / "gpt3_tiny")
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    assert follow_launch(launch, LiveView(launch, console)).state is State.COMPLETED
    last = screen.getvalue().rpartition("╭")[2]
    for words in (
        "gpt3_tiny · launch 1",
        "COMPLETED on n[1-2]",
        "step 300/300",
        "100 %",
        "train loss    4.1967",
    ):
        assert words in last
    assert "held-out loss 4.3647  below the unigram entropy 6.1000" in last
    assert "█" in last and "ETA" not in last
    assert sparkline([1.0, float("nan")]) == "" and sparkline([2.0, 1.0]) == "█▁"


# status


def test_status_shows_the_newest_and_what_has_not_ended(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    for number in range(23):
        directory = runs.launch(f"run{number:02}", job_id=str(100 + number)).parent
        os.utime(directory, (number, number))
        scheduler.set(str(100 + number), RUNNING if number == 1 else COMPLETED)
    assert slipway(runs, "status") == 0
    output = capsys.readouterr()
    shown = [line.split()[0] for line in output.out.splitlines()[1:]]
    assert shown == [*(f"run{number:02}" for number in range(22, 2, -1)), "run01"]
    assert "2 older runs: slipway status --all" in output.err
    assert slipway(runs, "status", "--all") == 0
    assert len(capsys.readouterr().out.splitlines()) == 24
    assert slipway(runs, "status", "--active", "--json") == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out)] == ["run01"]


def test_an_interrupted_run_is_resumed_by_the_printed_command(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    runs.launch()
    scheduler.set("11", JobStatus(State.INTERRUPTED))
    for verb in ("status", "history"):
        assert slipway(runs, verb, "gpt3_tiny") == 0
        assert f"to continue: slipway resume {runs.base}/gpt3_tiny" in capsys.readouterr().err


# plot


def test_plot(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch(), whole_training(0, 180))
    append(runs.launch(number=2), whole_training(150, 300))
    scheduler.set("12", COMPLETED)
    assert slipway(runs, "plot", "gpt3_tiny") == 0
    output = capsys.readouterr().out
    assert "held-out loss    7.5885 → 4.3647" in output and "yes, by 1.7353 nats" in output
    assert "┈┈ unigram entropy 6.1000" in output and "\x1b" not in output
    assert max(map(len, output.splitlines()[:-1])) <= 110
    png = (runs.base / "gpt3_tiny" / "loss.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and png.rstrip().endswith(b"IEND\xaeB`\x82")
    width, height = (int.from_bytes(png[at : at + 4]) for at in (16, 20))
    assert (width, height) == (1440, 832)
    assert [path.name for path in (runs.base / "gpt3_tiny").iterdir() if path.name.startswith(".")] == []


def test_plot_of_a_single_step(runs: Runs, scheduler: FakeScheduler, capsys: Capsys, tmp_path: Path) -> None:
    append(runs.launch(), [start(), train(1, loss=float("nan")), validation(1, float("nan"))])
    output = tmp_path / "x.png"
    assert slipway(runs, "plot", "gpt3_tiny", "--output", str(output)) == 0
    assert output.stat().st_size > 1000 and "nan" in capsys.readouterr().out
    with pytest.raises(UserError, match="cannot write the plot"):
        slipway(runs, "plot", "gpt3_tiny", "--no-terminal", "--output", str(tmp_path / "none" / "x.png"))


def test_plot_as_json(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch(), whole_training(0, 300))
    scheduler.set("11", COMPLETED)
    assert slipway(runs, "plot", "gpt3_tiny", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["below_entropy"] is True and summary["tokens"] == 614400
    assert not (runs.base / "gpt3_tiny" / "loss.png").exists()


def test_plot_of_several_runs(runs: Runs, scheduler: FakeScheduler, capsys: Capsys, tmp_path: Path) -> None:
    for name, last in (("worse", 100), ("better", 300)):
        append(runs.launch(name), whole_training(0, last))
    runs.launch("waiting")
    assert slipway(runs, "plot", "worse", "waiting", "better") == 0
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines()[:3]] == ["RUN", "better", "worse"]
    assert "⠤⠤ better   ⠤⠤ worse" in output.out
    assert "waiting has no training step yet" in output.err
    assert (runs.base / "worse/comparison.png").read_bytes().startswith(b"\x89PNG")
    assert slipway(runs, "plot", "worse", "better", "--json") == 0
    assert [run["run"] for run in json.loads(capsys.readouterr().out)] == ["better", "worse"]
    png = tmp_path / "own.png"
    assert slipway(runs, "plot", "worse", "better", "--no-terminal", "--output", str(png)) == 0
    assert png.exists() and "⠤" not in capsys.readouterr().out
    with pytest.raises(UserError, match="no training step yet"):
        slipway(runs, "plot", "waiting", str(runs.base / "waiting/launches"))


@pytest.mark.parametrize("module", ["plotext", "matplotlib.figure"])
def test_plot_without_its_extra(
    runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    append(runs.launch(), whole_training(0, 20))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"-m pip install .*\[plot\]"):
        slipway(runs, "plot", "gpt3_tiny")
