"""`slipway status | logs | plot | follow` through their parsers, on runs as they lie on disk."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from pathlib import Path

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

from launcher.cli import follow, logs, plot, status
from launcher.errors import UserError
from launcher.monitor import logs as log_reading
from launcher.monitor import watch
from launcher.monitor.launches import open_launch
from launcher.monitor.lines import LinesView
from launcher.schedulers.base import JobStatus, State

Capsys = pytest.CaptureFixture[str]

RUNNING = JobStatus(State.RUNNING, None, "n[1-2]", "00:00:50")
COMPLETED = JobStatus(State.COMPLETED, None, "n[1-2]", "00:01:30", 0)
FAILED = JobStatus(State.FAILED, "exit code 1", "n[1-2]", "00:00:03", 1)
PENDING = JobStatus(State.PENDING, "Resources")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for the real pace of a display."""
    monkeypatch.setattr(watch.StatusWatch.__init__, "__defaults__", (0.05, 0.3))
    monkeypatch.setattr(log_reading, "_POLL", 0.02)
    monkeypatch.setattr(LinesView, "interval", 0.02)


def slipway(runs: Runs, *arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="slipway")
    subparsers = parser.add_subparsers(required=True)
    for verb in (status, logs, plot, follow):
        verb.add_parser(subparsers)
    args = parser.parse_args([*arguments, "--base-results-dir", str(runs.base)])
    return int(args.run(args))


def log(directory: Path, job_id: str = "11", extension: str = "out") -> Path:
    return directory / f"log-{JOB_NAME}_{job_id}.{extension}"


# status


def test_status(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch("a", job_id="1"), whole_training(0, 100)[:-1])
    runs.launch("b", job_id="2")
    scheduler.set("1", RUNNING)
    scheduler.set("2", PENDING)
    assert slipway(runs, "status", "a", "b") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["RUN", "LAUNCH", "JOB", "STATE"]
    assert " ".join(lines[1]) == (
        "a 1 1 RUNNING 00:00:50/00:30:00 2×2 100/300 5.2615 5.4264 4.10k 00:01:40 -"
    )
    assert " ".join(lines[2]) == "b 1 2 PENDING - 2×2 - - - - - Resources"
    assert scheduler.questions == [["1", "2"]]  # one question for all


def test_status_for_programs(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch("a", job_id="1"), [start(), train(1, loss=float("nan"))])
    scheduler.set("1", COMPLETED)
    assert slipway(runs, "status", "--json") == 0
    (item,) = json.loads(capsys.readouterr().out)
    assert (item["run"], item["state"], item["step"], item["loss"]) == ("a", "COMPLETED", 1, "nan")
    assert item["eta_seconds"] is None and item["exit_code"] == 0


def test_status_tells_what_it_cannot_see(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    done = runs.launch("done", job_id="1")
    (done / "exit.json").write_text('{"job_id": "1", "exit_code": 0, "ended": 5}')
    runs.launch("lost", job_id="2")
    refused = runs.launch("refused", job_id=None, error="sbatch: error: invalid partition\nBatch job failed")
    broken = runs.launch("broken")
    (broken / "launcher.json").write_text("{")
    scheduler.error = "squeue cannot reach the controller"
    assert slipway(runs, "status", "--json") == 1
    told = {item["run"]: (item["state"], item["reason"]) for item in json.loads(capsys.readouterr().out)}
    assert told["done"] == ("COMPLETED", None)
    assert told["lost"] == ("UNKNOWN", "squeue cannot reach the controller")
    assert told["refused"] == ("NOT_SUBMITTED", "sbatch: error: invalid partition")
    assert told["broken"][0] == "UNKNOWN" and "not a launch's manifest" in told["broken"][1]
    assert refused.exists()


def test_status_of_nothing(runs: Runs, capsys: Capsys) -> None:
    assert slipway(runs, "status") == 0
    assert "no run was launched" in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no run 'x'"):
        slipway(runs, "status", "x")


def test_a_pipe_imports_neither_rich_nor_plots(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    directory = runs.launch(job_id=None, error="refused")
    append(directory, whole_training(0, 10))
    code = f"""
import argparse, sys, types
registry = types.ModuleType("launcher.schedulers.registry")
sys.modules["launcher.schedulers.registry"] = registry
from launcher.cli import follow, plot, status
parser = argparse.ArgumentParser()
verbs = parser.add_subparsers()
for verb in (status, follow, plot):
    verb.add_parser(verbs)
for arguments in (["status"], ["status", "--json"], ["follow", "gpt3_tiny"], ["plot", "--json", "gpt3_tiny"]):
    args = parser.parse_args([*arguments, "--base-results-dir", {str(tmp_path)!r}])
    args.run(args)
heavy = {{"rich", "matplotlib", "plotext", "torch", "submitit", "hydra", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "NOT_SUBMITTED" in done.stdout


# logs


def test_logs(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    first, second = runs.launch(), runs.launch(number=2)
    log(first).write_text("old\n")
    log(second, "12").write_text("one\ntwo\nthree\n")
    assert slipway(runs, "logs", "gpt3_tiny") == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"
    assert slipway(runs, "logs", "gpt3_tiny", "--lines", "2") == 0
    assert capsys.readouterr().out == "two\nthree\n"
    assert slipway(runs, "logs", "gpt3_tiny", "--launch", "1") == 0
    assert capsys.readouterr().out == "old\n"
    with pytest.raises(UserError, match=r"no launch 3\n  launches: 1, 2"):
        slipway(runs, "logs", "gpt3_tiny", "--launch", "3")


def test_logs_of_ranks_and_stderr(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    directory = runs.launch()
    log(directory).write_text("out\n")
    (directory / "results" / "nemo_log_globalrank-3_localrank-1.txt").write_text("rank three\n")
    assert slipway(runs, "logs", "gpt3_tiny", "--rank", "3") == 0
    assert capsys.readouterr().out == "rank three\n"
    with pytest.raises(UserError, match="ranks 0 to 3"):
        slipway(runs, "logs", "gpt3_tiny", "--rank", "4")
    with pytest.raises(UserError, match="stderr_to_stdout"):
        slipway(runs, "logs", "gpt3_tiny", "--err")
    log(directory, extension="err").write_text("err\n")
    assert slipway(runs, "logs", "gpt3_tiny", "--err") == 0
    assert capsys.readouterr().out == "err\n"


def test_logs_before_there_is_one(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    runs.launch()
    scheduler.set("11", PENDING)
    assert slipway(runs, "logs", "gpt3_tiny") == 1
    assert "no log yet, the job 11 is PENDING (Resources)" in capsys.readouterr().err


@pytest.mark.parametrize(("final", "code"), [(COMPLETED, 0), (FAILED, 1)])
def test_logs_follow_until_the_job_ends(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, final: JobStatus, code: int
) -> None:
    path = log(runs.launch())
    scheduler.set("11", PENDING, PENDING, RUNNING, RUNNING, RUNNING, RUNNING, final)
    timer = threading.Timer(0.15, path.write_text, ["first\nlast, and torn"])
    timer.start()
    assert slipway(runs, "logs", "gpt3_tiny", "-f") == code
    timer.join()
    told = capsys.readouterr()
    assert told.out == "first\nlast, and torn"
    assert f"waiting for {path.name}: the job is PENDING (Resources)" in told.err
    assert final.state.value in told.err


def test_following_gives_up_when_nobody_can_tell(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    runs.launch()
    assert slipway(runs, "logs", "gpt3_tiny", "-f") == 1
    assert "UNKNOWN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\nc", 1, "c"),
        ("a\nb\n", 5, "a\nb\n"),
        ("a\nb\n", 0, ""),
        ("a\nb", 0, ""),
        ("", 3, ""),
        ("x" * 200_000 + "\n" + "y" * 100_000 + "\nz\n", 2, "y" * 100_000 + "\nz\n"),
    ],
)
def test_last_lines(tmp_path: Path, content: str, lines: int, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text(content)
    assert log_reading.last_lines(path, lines) == expected


def test_a_character_split_between_two_reads(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = log_reading.LogReader(path)
    encoded = "█\n".encode()
    path.write_bytes(encoded[:2])
    assert reader.poll() == ""
    path.write_bytes(encoded)
    assert reader.poll() == "█\n"


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


def test_follow_tells_a_newcomer_why_nothing_was_trained(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    append(runs.launch(), [start(300), {**end(300, 1001.0), "reason": "already_complete"}])
    scheduler.set("11", RUNNING, COMPLETED)
    assert slipway(runs, "follow", "gpt3_tiny") == 0
    told = capsys.readouterr().out
    assert "the trainer goes on from step 300" in told
    assert "nothing left to do: a larger training.trainer.max_steps would go on" in told


def test_follow_shows_the_end_of_a_failed_jobs_log(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    directory = runs.launch()
    log(directory).write_text("".join(f"line {i}\n" for i in range(100)))
    scheduler.set("11", FAILED)
    assert slipway(runs, "follow", "gpt3_tiny") == 1
    told = capsys.readouterr().err
    assert "FAILED (exit code 1)" in told and "line 80\n" in told and "line 79\n" not in told
    assert str(log(directory)) in told


def test_follow_a_job_that_left_no_log(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    runs.launch()
    scheduler.set("11", JobStatus(State.CANCELLED, "by 0"))
    assert slipway(runs, "follow", "gpt3_tiny") == 1
    assert "left no log" in capsys.readouterr().err


def test_ctrl_c_leaves_the_job_alone(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.launch(slurm_conf="/etc/other slurm.conf")
    scheduler.set("11", RUNNING)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LinesView, "show", interrupt)
    assert slipway(runs, "follow", "gpt3_tiny") == 130
    told = capsys.readouterr().err
    assert "goes on" in told and "slipway follow" in told
    assert "SLURM_CONF='/etc/other slurm.conf' scancel 11" in told


def test_a_bug_in_the_watching_thread_is_not_hidden(runs: Runs, scheduler: FakeScheduler) -> None:
    runs.launch()
    scheduler.set("11", RUNNING)
    calls = iter([{"11": RUNNING}])
    scheduler.statuses = lambda tickets: next(calls)  # type: ignore[method-assign]
    with pytest.raises(StopIteration):
        slipway(runs, "follow", "gpt3_tiny")


def test_a_scheduler_that_hangs_is_not_taken_for_a_running_job(runs: Runs, scheduler: FakeScheduler) -> None:
    runs.launch()
    answers, hang = iter([{"11": RUNNING}]), threading.Event()

    def hanging(tickets: object) -> dict[str, JobStatus]:
        answer = next(answers, {})
        if not answer:
            hang.wait(10)
        return answer

    scheduler.statuses = hanging  # type: ignore[method-assign]
    with watch.StatusWatch(open_launch(runs.base / "gpt3_tiny"), patience=0.2) as watched:
        assert watched.status == RUNNING
        hang.wait(0.3)
        assert watched.is_over and watched.status.state is State.UNKNOWN
        watched.alive()  # the trainer still tells of steps
        assert not watched.is_over
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
    assert follow_launch(launch, LiveView(launch, console)) == COMPLETED
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


# plot


def test_plot(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch(), whole_training(0, 180))
    append(runs.launch(number=2), whole_training(150, 300))
    scheduler.set("12", COMPLETED)
    assert slipway(runs, "plot", "gpt3_tiny") == 0
    told = capsys.readouterr().out
    assert "held-out loss    7.5885 → 4.3647" in told and "yes, by 1.7353 nats" in told
    assert "┈┈ unigram entropy 6.1000" in told and "\x1b" not in told
    assert max(map(len, told.splitlines()[:-1])) <= 110
    png = (runs.base / "gpt3_tiny" / "loss.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and png.rstrip().endswith(b"IEND\xaeB`\x82")
    width, height = (int.from_bytes(png[at : at + 4]) for at in (16, 20))
    assert (width, height) == (1440, 832)
    assert [path.name for path in (runs.base / "gpt3_tiny").iterdir() if path.name.startswith(".")] == []


def test_plot_of_little(runs: Runs, scheduler: FakeScheduler, capsys: Capsys, tmp_path: Path) -> None:
    append(runs.launch(), [start(), train(1, loss=float("nan")), validation(1, float("nan"))])
    output = tmp_path / "x.png"
    assert slipway(runs, "plot", "gpt3_tiny", "--output", str(output)) == 0
    assert output.stat().st_size > 1000 and "nan" in capsys.readouterr().out
    with pytest.raises(UserError, match="cannot write the plot"):
        slipway(runs, "plot", "gpt3_tiny", "--no-terminal", "--output", str(tmp_path / "none" / "x.png"))


def test_plot_for_programs(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch(), whole_training(0, 300))
    scheduler.set("11", COMPLETED)
    assert slipway(runs, "plot", "gpt3_tiny", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["below_entropy"] is True and summary["tokens"] == 614400
    assert not (runs.base / "gpt3_tiny" / "loss.png").exists()


@pytest.mark.parametrize("module", ["plotext", "matplotlib.figure"])
def test_plot_without_its_extra(
    runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    append(runs.launch(), whole_training(0, 20))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="pip install matplotlib plotext"):
        slipway(runs, "plot", "gpt3_tiny")
