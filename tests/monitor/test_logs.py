"""`slipway logs`: the choice of a file, and following it, on runs on disk."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
from monitor_samples import COMPLETED, FAILED, PENDING, RUNNING, FakeScheduler, Runs, log, slipway

from launcher.errors import UserError
from launcher.monitor import logs as log_reading
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State

pytestmark = pytest.mark.usefixtures("fast")

Capsys = pytest.CaptureFixture[str]

INTERRUPTED = JobStatus(State.INTERRUPTED, "saved before its end: launching again continues")


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


def test_missing_log_is_reported_with_the_state_of_the_job(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    runs.launch()
    scheduler.set("11", PENDING)
    assert slipway(runs, "logs", "gpt3_tiny") == 1
    assert "no log yet, job 11 is PENDING (Resources)" in capsys.readouterr().err


@pytest.mark.parametrize(("final", "code"), [(COMPLETED, 0), (FAILED, 1), (INTERRUPTED, 75)])
def test_logs_follow_until_the_job_ends(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, final: JobStatus, code: int
) -> None:
    path = log(runs.launch())
    scheduler.set("11", PENDING, PENDING, RUNNING, RUNNING, RUNNING, RUNNING, final)
    scheduler.events[4] = lambda: path.write_text("first\nlast, and torn")
    assert slipway(runs, "logs", "gpt3_tiny", "-f") == code
    output = capsys.readouterr()
    assert output.out == "first\nlast, and torn"
    assert f"waiting for {path.name}: the job is PENDING (Resources)" in output.err
    assert final.state.value in output.err


def test_following_gives_up_when_the_state_is_unknown(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    runs.launch()
    assert slipway(runs, "logs", "gpt3_tiny", "-f") == 3
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
    assert log_reading.read_last_lines(path, lines) == expected


def test_a_character_split_between_two_reads(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = log_reading.LogReader(path)
    encoded = "█\n".encode()
    path.write_bytes(encoded[:2])
    assert reader.poll() == ""
    path.write_bytes(encoded)
    assert reader.poll() == "█\n"


def test_logs_name_the_failure_of_a_rank(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    directory = runs.launch()
    results = directory / "results"
    (results / "failures").mkdir()
    failure = {"time": 5.0, "rank": 2, "host": "n2", "error": "ValueError: no such token", "log": None}
    (results / "failures" / "globalrank-2.json").write_text(json.dumps(failure))
    (results / "nemo_log_globalrank-2_localrank-0.txt").write_text("rank two\n")
    assert slipway(runs, "logs", "gpt3_tiny", "--rank", "2") == 0
    output = capsys.readouterr()
    assert output.out == "rank two\n"
    assert (
        "rank 2 failed: ValueError: no such token: " in output.err
        and "failures/globalrank-2.json" in output.err
    )
    # The failure is reported, too, if the whole job is followed.
    log(directory).write_text("srun: error\n")
    scheduler.set("11", FAILED)
    assert slipway(runs, "follow", "gpt3_tiny") == 1
    assert "Rank 2 failed first: ValueError: no such token: " in capsys.readouterr().err


def test_the_log_of_a_rank_that_nemo_moved(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    results = runs.launch() / "results"
    (results / "run_0").mkdir()
    (results / "run_0" / "nemo_log_globalrank-1_localrank-1.txt").write_text("moved\n")
    assert slipway(runs, "logs", "gpt3_tiny", "--rank", "1") == 0
    (results / "nemo_log_globalrank-1_localrank-1.txt").write_text("its own\n")
    assert slipway(runs, "logs", "gpt3_tiny", "--rank", "1") == 0
    assert capsys.readouterr().out == "moved\nits own\n"


def test_logs_of_an_array(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    directory = runs.launch()
    for task in (0, 2, 10):
        log(directory, f"11_{task}").write_text(f"task {task}\n")
    assert slipway(runs, "logs", "gpt3_tiny") == 0
    output = capsys.readouterr()
    assert output.out == "task 10\n"
    assert "task 10 of an array; other tasks that have started: 0, 2" in output.err
    assert slipway(runs, "logs", "gpt3_tiny", "--task", "2") == 0
    assert capsys.readouterr().out == "task 2\n"
    scheduler.set("11", JobStatus(State.RUNNING, tasks={"0": State.COMPLETED, "4": State.PENDING}))
    assert slipway(runs, "logs", "gpt3_tiny", "--task", "4") == 1
    assert "no log yet, job 11_4 is PENDING" in capsys.readouterr().err
    (directory / "x_submission.sh").write_text("#SBATCH --array=0-10%1\n")
    with pytest.raises(UserError, match="launch 1 of gpt3_tiny has no task 11"):
        slipway(runs, "logs", "gpt3_tiny", "--task", "11", "-f")
    # Task 0 has ended, whatever the others do.
    assert slipway(runs, "logs", "gpt3_tiny", "--task", "0", "-f") == 0
    assert "job 11_0 is COMPLETED" in capsys.readouterr().err


def test_following_an_array_goes_on_to_the_next_task(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    directory = runs.launch()
    scheduler.set("11", PENDING, *[RUNNING] * 20, COMPLETED)
    for task in (1, 2):
        text = f"task {task}\n"
        scheduler.events[5 * task] = partial(log(directory, f"11_{task}").write_text, text)
    assert slipway(runs, "logs", "gpt3_tiny", "-f") == 0
    output = capsys.readouterr()
    assert output.out == "task 1\ntask 2\n"
    assert f"{log(directory, '11_2').name}:" in output.err and "job 11 is COMPLETED" in output.err


def test_task_option_is_refused_for_a_job_that_is_no_array(runs: Runs, scheduler: FakeScheduler) -> None:
    log(runs.launch()).write_text("one\n")
    with pytest.raises(UserError, match="launch 1 of gpt3_tiny is not an array: it has no task 1"):
        slipway(runs, "logs", "gpt3_tiny", "--task", "1")


def test_a_requeued_job_is_followed_on(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    path = log(runs.launch())
    path.write_text("first attempt\n")
    requeued = JobStatus(State.PENDING, "BeginTime", restarts=1)
    scheduler.set("11", RUNNING, requeued, requeued, RUNNING, RUNNING, RUNNING, RUNNING, COMPLETED)

    def write_second_attempt() -> None:
        with path.open("a") as stream:
            stream.write("second attempt\n")

    scheduler.events[4] = write_second_attempt
    assert slipway(runs, "logs", "gpt3_tiny", "-f", "-n", "1") == 0
    assert capsys.readouterr().out == "first attempt\nsecond attempt\n"


def test_following_warns_of_a_newer_launch(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    log(runs.launch()).write_text("old\n")
    scheduler.set("11", RUNNING, RUNNING, RUNNING, RUNNING, RUNNING, RUNNING, COMPLETED)
    scheduler.events[3] = partial(runs.launch, number=2)
    assert slipway(runs, "logs", "gpt3_tiny", "-f") == 0
    assert capsys.readouterr().err.count("launched again meanwhile: this is launch 1") == 1


def test_ctrl_c_ends_the_following_and_not_the_job(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.launch()
    scheduler.set("11", RUNNING)

    def interrupt(*args: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(log_reading, "read_all", interrupt)
    assert slipway(runs, "logs", "gpt3_tiny", "-f") == 130
    message = capsys.readouterr().err
    assert "job 11 continues" in message and "cancel it:  slipway cancel" in message


def test_records_of_failed_ranks_have_any_form(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    """A record may lack a host or span lines, and ranks repeat; impossible ranks and times are left out."""
    directory = runs.launch()
    results = directory / "results"
    (results / "failures").mkdir()
    log(directory).write_text("srun: error\n")
    scheduler.set("11", FAILED)
    for name, record in {
        "2": json.dumps({"time": 5.0, "rank": 2, "error": "ValueError: no token"}, indent=1),
        "20": json.dumps({"time": 6.0, "rank": 2, "host": "n2", "error": "a later one"}),
        "3": json.dumps({"time": 1.0, "rank": -3, "host": "n2", "error": "no such rank"}),
        "4": '{"time": 1e999, "rank": 4, "host": "n2", "error": "never"}',
    }.items():
        (results / "failures" / f"globalrank-{name}.json").write_text(record)
    for rank in ("2", "4"):
        (results / f"nemo_log_globalrank-{rank}_localrank-0.txt").write_text("text\n")
        assert slipway(runs, "logs", "gpt3_tiny", "--rank", rank) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rank 2 failed: ValueError: no token: ") and line.endswith("/globalrank-2.json")
    assert slipway(runs, "follow", "gpt3_tiny") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("Rank 2 failed first: ValueError: no token: ") and last.endswith(
        "/globalrank-2.json"
    )
    # The record that is read last has its own path, although its rank names another file.
    (results / "failures" / "globalrank-2.json").unlink()
    assert slipway(runs, "logs", "gpt3_tiny", "--rank", "2") == 0
    assert capsys.readouterr().err.endswith(
        "a later one: " + last.rpartition(": ")[2].replace("-2.", "-20.") + "\n"
    )


@pytest.mark.timeout(20)
@pytest.mark.parametrize("end", ["", "a\n" * 3, "a\nb"])
def test_a_hole_in_a_log_is_not_read_to_its_beginning(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.out"
    with path.open("wb") as stream:
        stream.truncate(900_000_000)
        stream.seek(0, os.SEEK_END)
        stream.write(end.encode())
    text = log_reading.read_last_lines(path, 5)
    assert text.endswith(end)
    assert len(text) <= 1 << 20
    assert log_reading.tail_offsets([path], 1)[0][1] > 890_000_000
