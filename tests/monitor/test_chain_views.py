"""A chain as one run: its log, its progress, its history, and its last failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from monitor_samples import (
    FAILED,
    JOB_NAME,
    PENDING,
    RUNNING,
    FakeScheduler,
    Runs,
    append,
    log,
    slipway,
    start,
    train,
)

from launcher.cli import logs as log_command
from launcher.cli.app import main
from launcher.jobs.launches import Launch, open_launch
from launcher.monitor.history import history
from launcher.monitor.logs import find_next, job_logs, rank_failures, tail_offsets
from launcher.monitor.progress import Progress
from launcher.monitor.readers import all_events, newest_events
from launcher.schedulers.base import ChainJobs, JobStatus
from launcher.slurm.states import State
from slipway.common.node.events import Train
from slipway.common.node.marks import ChainEnd, claim, end_chain
from slipway.supervisor.dependent_stages import NAME, Stage, Stages, to_json

Capsys = pytest.CaptureFixture[str]

INTERRUPTED = JobStatus(State.INTERRUPTED, "saved", "n1", "00:00:40", 75)
COMPLETED = JobStatus(State.COMPLETED, None, "n1", "00:00:10", 0)


def chain(*statuses: JobStatus, current: int, most: int = 4) -> JobStatus:
    """Return a scheduler's status of a chain whose first job is 11."""
    jobs = {str(10 + number): status for number, status in enumerate(statuses, 1)}
    status = statuses[current - 1]
    links = ChainJobs(current, most, jobs, range(1, len(jobs) + 1))
    return JobStatus(status.state, status.reason, status.nodes, status.elapsed, status.exit_code, chain=links)


@pytest.fixture
def launch_chain(runs: Runs) -> Callable[..., Path]:
    def launch(jobs: int = 3, **changes: Any) -> Path:
        directory = runs.launch(links=4, **changes)
        for link in range(1, jobs + 1):
            claim(directory, str(10 + link), link)
        return directory

    return launch


def mark(directory: Path, link: int, started: float, ended: float | None, **fields: Any) -> None:
    job = {"job_id": str(10 + link), "link": link}
    stem = directory / "marks" / f"{10 + link}.0"
    start_mark = {**job, "started": started, "nodes": "n1", **({"avoids": "n4"} if link > 1 else {})}
    stem.with_suffix(".0.started.json").write_text(json.dumps(start_mark))
    if ended is not None:
        stem.with_suffix(".0.ended.json").write_text(json.dumps({**job, "ended": ended, **fields}))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (None, "one\ntwo\nthree\nfour\nfive\n"),
        ("0", ""),
        ("1", "five\n"),
        ("2", "four\nfive\n"),
        ("4", "two\nthree\nfour\nfive\n"),
        ("5", "one\ntwo\nthree\nfour\nfive\n"),
        ("99", "one\ntwo\nthree\nfour\nfive\n"),
    ],
)
def test_log_of_a_chain_joins_the_logs_of_all_links(
    launch_chain: Callable[..., Path], runs: Runs, capsys: Capsys, lines: str | None, expected: str
) -> None:
    directory = launch_chain()
    log(directory, "11").write_text("one\ntwo\n")
    log(directory, "12").write_text("three\n")
    log(directory, "13").write_text("four\nfive\n")
    more = ("-n", lines) if lines else ()
    assert slipway(runs, "logs", "gpt3_tiny", *more) == 0
    assert capsys.readouterr().out == expected


def test_last_lines_are_found_across_several_logs(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path, text in zip(paths, ("1\n2\n", "", "3\n4"), strict=True):
        path.write_text(text)
    assert tail_offsets(paths, 3) == [(paths[0], 2), (paths[1], 0), (paths[2], 0)]
    assert tail_offsets(paths, 1) == [(paths[2], 2)]


def test_a_log_is_followed_from_link_to_link(
    launch_chain: Callable[..., Path], runs: Runs, scheduler: FakeScheduler, fast: None, capsys: Capsys
) -> None:
    """No link is passed over, however quickly the next one came."""
    directory = launch_chain()
    log(directory, "11").write_text("first\n")

    def second_and_third() -> JobStatus:
        log(directory, "12").write_text("second\n")
        log(directory, "13").write_text("third\n")
        return chain(INTERRUPTED, INTERRUPTED, COMPLETED, current=3)

    class Moving(list[JobStatus]):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index) if len(self) > 1 else second_and_third()

    first_runs = chain(RUNNING, PENDING, current=1)
    scheduler.table["11"] = Moving(
        [first_runs, first_runs, chain(INTERRUPTED, PENDING, current=2), first_runs]
    )
    assert slipway(runs, "logs", "gpt3_tiny", "-f") == 0
    output = capsys.readouterr()
    assert output.out == "first\nsecond\nthird\n"
    assert [line for line in output.err.splitlines() if line.startswith("log-")] == [
        f"log-{JOB_NAME}_12.out:", f"log-{JOB_NAME}_13.out:",
    ]  # fmt: skip
    assert "job 13 is COMPLETED" in output.err


def test_no_log_is_passed_over_that_appears_meanwhile(
    launch_chain: Callable[..., Path], runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = launch_chain()
    launch = open_launch(runs.base / "gpt3_tiny")
    first, *others = (log(directory, job) for job in ("11", "12", "13"))
    first.touch()
    answer = Path.is_file

    def is_file(path: Path) -> bool:
        before = answer(path)
        if path == others[0]:
            for other in others:
                other.touch()
        return before

    monkeypatch.setattr(Path, "is_file", is_file)
    assert find_next(launch, first) in (first, others[0])
    assert find_next(launch, first) == others[0]


def test_a_first_log_may_appear_while_logs_are_listed(
    launch_chain: Callable[..., Path],
    runs: Runs,
    scheduler: FakeScheduler,
    fast: None,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = launch_chain(jobs=1)
    scheduler.set("11", chain(COMPLETED, current=1))

    def listing(*arguments: Any) -> list[Path]:
        logs = job_logs(*arguments)
        log(directory, "11").write_text("first\n")
        return logs

    monkeypatch.setattr(log_command, "job_logs", listing)
    assert slipway(runs, "logs", "gpt3_tiny", "-f") == 0
    assert capsys.readouterr().out == "first\n"


def test_link_option_shows_the_log_of_one_link(
    launch_chain: Callable[..., Path], runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    directory = launch_chain()
    log(directory, "12").write_text("second\n")
    scheduler.set("11", chain(INTERRUPTED, FAILED, RUNNING, current=3))
    assert slipway(runs, "logs", "gpt3_tiny", "--link", "2", "-f") == 1, "that link failed"
    assert capsys.readouterr().out == "second\n"
    assert main(["logs", "12", "--base-results-dir", str(runs.base)]) == 0
    assert capsys.readouterr().out == "second\n"
    for words in (["--link", "4"], ["--link", "0"]):
        assert main(["logs", "gpt3_tiny", *words, "--base-results-dir", str(runs.base)]) == 2
        assert "has no such link" in capsys.readouterr().err
    runs.launch("alone")
    assert main(["logs", "alone", "--link", "1", "--base-results-dir", str(runs.base)]) == 2
    assert "is not a chain" in capsys.readouterr().err


def test_status_of_a_chain_is_one_line(
    launch_chain: Callable[..., Path], runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    directory = launch_chain()
    append(directory, [start(), *(train(step) for step in range(1, 6)), start(4), train(5), train(6)])
    scheduler.set("11", chain(INTERRUPTED, RUNNING, PENDING, current=2))
    assert slipway(runs, "status") == 0
    header, line = capsys.readouterr().out.splitlines()
    cells = dict(zip(header.split(), line.split(), strict=False))
    assert (cells["JOB"], cells["LINK"], cells["STATE"]) == ("12", "2/4", "RUNNING")
    runs.launch("alone", job_id="99")
    scheduler.set("99", RUNNING)
    assert slipway(runs, "status", "alone") == 0
    assert "LINK" not in capsys.readouterr().out, "a column that says nothing"
    assert slipway(runs, "status", "gpt3_tiny", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["job_id"], row["link"], row["max_links"], row["step"]) == ("12", 2, 4, 6)
    assert [(link["link"], link["job_id"], link["state"]) for link in row["links"]] == [
        (1, "11", "INTERRUPTED"), (2, "12", "RUNNING"), (3, "13", "PENDING"),
    ]  # fmt: skip
    # Claims are read anew each time: a chain gets links while it is watched.
    assert scheduler.questions
    assert open_launch(runs.base / "gpt3_tiny").links == {1: "11", 2: "12", 3: "13"}


def test_history_lists_each_link(
    launch_chain: Callable[..., Path], runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    directory = launch_chain()
    mark(
        directory, 1, 1000.0, 1004.0, exit_code=75, verdict="continue", rule="saved", why="it saved and left"
    )
    mark(directory, 2, 1004.0, 1010.0, exit_code=1, verdict="exclude", why="a GPU was lost", excluded="n1")
    mark(directory, 3, 1010.0, None)
    events = [start(0, 1000.0), train(1, 1001.0), train(2, 1002.0), start(2, 1005.0), train(3, 1006.0)]
    append(directory, [*events, start(2, 1011.0), train(3, 1012.0), train(4, 1013.0)])
    scheduler.set("11", chain(INTERRUPTED, FAILED, RUNNING, current=3))
    (row,) = history(runs.base / "gpt3_tiny")
    assert [(attempt.link, attempt.state, str(attempt.steps)) for attempt in row.attempts] == [
        (1, "INTERRUPTED", "0→2"), (2, "FAILED", "2→3"), (3, "RUNNING", "2→4"),
    ]  # fmt: skip
    readings = [attempt.reading for attempt in row.attempts]
    assert readings[1] and readings[1].why == "a GPU was lost" and readings[1].nodes == ("n1",)
    assert readings[2] is None
    assert row.elapsed == "00:01:00"  # 4 and 6 seconds, and 50 of the link that runs
    assert main(["history", "gpt3_tiny", "--base-results-dir", str(runs.base)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["1", "13", "RUNNING"]
    assert lines[2].startswith("link 1  11") and lines[3].strip() == "it saved and left"
    second_lines = [line.strip() for line in lines[lines.index(lines[4]) + 1 :]]
    assert second_lines[0] == "excluded nodes: n4"
    assert second_lines[1].startswith("exit code 1; a GPU was lost") and "n1" in second_lines[1]
    attempt_json = row.to_json()["attempts"][1]
    assert (attempt_json["link"], attempt_json["avoids"]) == (2, "n4")
    assert attempt_json["reading"]["verdict"] == "exclude"


def test_history_says_once_why_a_chain_stopped(
    launch_chain: Callable[..., Path], runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    directory, why = (
        launch_chain(jobs=1),
        "1 link in a row ended without a new checkpoint: a library was missing",
    )
    mark(directory, 1, 1000.0, 1004.0, exit_code=1, verdict="stop", rule="import_error", why=why)
    end_chain(directory, ChainEnd("job 11", why, 1004.0))
    status = JobStatus(State.FAILED, f"exit code 1; {why}", "n1", "00:00:04", 1)
    scheduler.set("11", replace(status, chain=ChainJobs(1, 4, {"11": FAILED}, [1])))
    assert main(["history", "gpt3_tiny", "--base-results-dir", str(runs.base)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines if why in line] == [f"exit code 1; {why}"]


def test_failures_of_an_earlier_link_are_not_reported(launch_chain: Callable[..., Path], runs: Runs) -> None:
    directory = launch_chain()
    failures = directory / "results" / "failures"
    failures.mkdir()
    for rank, failed_at in ((0, 1005.0), (1, 1011.0)):
        content = {"time": failed_at, "rank": rank, "error": f"of rank {rank}"}
        (failures / f"globalrank-{rank}.json").write_text(json.dumps(content))
    launch = open_launch(runs.base / "gpt3_tiny")
    mark(directory, 1, 1000.0, 1006.0, exit_code=1)
    assert [failure.rank for failure in rank_failures(launch)] == [0, 1]
    mark(directory, 2, 1010.0, None)
    assert [failure.rank for failure in rank_failures(launch)] == [1]


def test_nemos_progress_goes_on_in_the_next_log(launch_chain: Callable[..., Path], runs: Runs) -> None:
    directory = launch_chain(engine="nemo")

    def line(step: int) -> str:
        metrics = f"reduced_train_loss=9.0, global_step={step - 1}.000"
        return f"Epoch 0: :  40%|████      | {step}/9 [00:2{step}<00:33, {metrics}]\r"

    log(directory, "11").write_text("".join(map(line, (1, 2))))
    launch: Launch = open_launch(runs.base / "gpt3_tiny")
    assert Progress(newest_events(launch)).step == 2
    log(directory, "12").write_text("imports take a while\n")
    assert Progress(newest_events(launch)).step == 2, "the link that has just begun tells of no step yet"
    log(directory, "13").write_text("".join(map(line, (3, 4))))
    assert Progress(newest_events(launch)).step == 4
    steps = [event.step for event in all_events(launch) if isinstance(event, Train)]
    assert steps == [1, 2, 3, 4]


def test_stage_waits_before_slurm_has_looked_at_its_new_dependency(
    runs: Runs, scheduler: FakeScheduler, launch_chain: Callable[..., Path], capsys: Capsys
) -> None:
    """Each link gives the stage another dependency, and Slurm has no reason for the wait at first."""
    chain, stage = launch_chain(name="a"), runs.launch("after", 2, waits_for="a")
    (stage / NAME).write_text(to_json(Stages(before=Stage("a", str(chain), "a-1"))))
    scheduler.set("12", State.PENDING)
    slipway(runs, "status", "after")
    assert "Dependency: it waits for the end of a" in capsys.readouterr().out
    end_chain(chain, ChainEnd("job 13", "done"))
    slipway(runs, "status", "after")
    assert "it waits" not in capsys.readouterr().out


def test_damaged_stages_hide_no_status(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    stage = runs.launch("after", 2, waits_for="a")
    (stage / NAME).write_text('{"before": {"run": "a", "directory": 5, "tag": "a-1"}}')
    scheduler.set("12", State.PENDING)
    assert slipway(runs, "status", "after") == 0
    assert "PENDING" in capsys.readouterr().out
