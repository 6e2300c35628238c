"""Damaged checkpoints in the output of `slipway status` and `slipway history`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from monitor_samples import RUNNING, FakeScheduler, Runs, append, start, train

from launcher.cli.app import main
from launcher.jobs.launches import open_launch
from launcher.monitor.checkpoints import FILE_NAME, find_damaged_checkpoints, find_saved
from launcher.schedulers.base import ChainJobs, JobStatus
from launcher.slurm.states import State
from slipway.common.node.marks import claim
from slipway.trainer.report.metrics import DAMAGED_FILE_NAME

pytestmark = pytest.mark.usefixtures("fast")

Capsys = pytest.CaptureFixture[str]


def slipway(runs: Runs, *arguments: str) -> None:
    main([*arguments, "--base-results-dir", str(runs.base)])


def record_damage(launch: Path, step: int, time: float, *, moved: bool = True) -> None:
    """Record a damaged checkpoint as the trainer does."""
    event = {
        "kind": "damaged",
        "time": time,
        "path": f"/results/run/checkpoints/m-step={step}",
        "reason": "common.pt is missing",
        "moved_to": f"/results/run/checkpoints/damaged/m-step={step}" if moved else None,
    }
    with (launch / "results" / FILE_NAME).open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_launcher_and_trainer_use_the_same_file_name() -> None:
    assert FILE_NAME == DAMAGED_FILE_NAME


def test_directories_set_aside_are_no_checkpoints(runs: Runs) -> None:
    runs.launch("a")
    for path, step in (("m-step=4", 4), ("damaged/m-step=8", 8)):
        checkpoint = runs.base / "a" / "checkpoints" / path
        checkpoint.mkdir(parents=True)
        (checkpoint / "complete.json").write_text(json.dumps({"step": step, "serial": step, "files": {}}))
    saved = find_saved({}, open_launch(runs.base / "a", 1).paths, "megatron")
    assert saved is not None
    assert (saved.step, saved.wrong) == (4, None)


def test_status_names_damaged_checkpoints_beside_the_reason(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    launch = runs.launch("a", job_id="1")
    append(launch, [start(4), train(5)])
    scheduler.set("1", JobStatus(State.FAILED, "exit code 1", "n1", "00:00:50", 1))
    record_damage(launch, 8, 1000.0)
    slipway(runs, "status", "a")
    assert "exit code 1; the checkpoint m-step=8 was damaged" in capsys.readouterr().out
    record_damage(launch, 6, 1001.0)
    slipway(runs, "status", "a")
    assert "exit code 1; 2 checkpoints were damaged, m-step=6 the last" in capsys.readouterr().out
    slipway(runs, "status", "a", "--json")
    (row,) = json.loads(capsys.readouterr().out)
    assert [checkpoint["moved_to"] for checkpoint in row["damaged_checkpoints"]] == [
        "/results/run/checkpoints/damaged/m-step=8",
        "/results/run/checkpoints/damaged/m-step=6",
    ]


def test_history_lists_damaged_checkpoints_below_the_link(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    launch = runs.launch("a", links=4)
    for link in (1, 2):
        claim(launch, str(10 + link), link)
        job = {"job_id": str(10 + link), "link": link}
        start_mark = {**job, "started": 1000.0 * link, "nodes": "n1"}
        (launch / "marks" / f"{10 + link}.0.started.json").write_text(json.dumps(start_mark))
    end_mark = {
        "job_id": "11",
        "link": 1,
        "ended": 1500.0,
        "exit_code": 75,
        "verdict": "continue",
        "why": "it saved",
    }
    (launch / "marks" / "11.0.ended.json").write_text(json.dumps(end_mark))
    record_damage(launch, 8, 2010.0)
    record_damage(launch, 6, 2011.0, moved=False)
    jobs = {"11": JobStatus(State.INTERRUPTED, "saved", "n1", "00:08:20", 75), "12": RUNNING}
    scheduler.set("11", JobStatus(State.RUNNING, chain=ChainJobs(2, 4, jobs, [1, 2])))
    slipway(runs, "history", "a")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    position = next(index for index, line in enumerate(lines) if line.startswith("link 2"))
    assert lines[position + 1 : position + 3] == [
        "the checkpoint m-step=8 was damaged (common.pt is missing), and was set aside as "
        "/results/run/checkpoints/damaged/m-step=8",
        "the checkpoint m-step=6 was damaged (common.pt is missing), and was skipped",
    ]
    assert "\n".join(lines).count("m-step=8 was damaged") == 1


def test_history_lists_damaged_checkpoints_below_a_launch_without_links(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    launch = runs.launch("a")
    record_damage(launch, 8, 1000.0)
    scheduler.set("11", RUNNING)
    slipway(runs, "history", "a")
    assert "the checkpoint m-step=8 was damaged" in capsys.readouterr().out
    slipway(runs, "history", "a", "--json")
    (row,) = json.loads(capsys.readouterr().out)
    assert row["damaged_checkpoints"][0]["reason"] == "common.pt is missing"


@pytest.mark.parametrize(
    "content",
    ["{", "[1]", '{"time": "x"}', '{"time": 1, "path": 2, "reason": "r", "moved_to": null}', "\0" * 99],
)
def test_invalid_lines_are_ignored(runs: Runs, content: Any) -> None:
    launch = runs.launch("a")
    (launch / "results" / FILE_NAME).write_text(content + "\n")
    record_damage(launch, 8, 1.0)
    (checkpoint,) = find_damaged_checkpoints(open_launch(runs.base / "a", 1))
    assert checkpoint.name == "m-step=8"


def test_a_named_pipe_and_control_characters_do_no_harm(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    launch = runs.launch("a")
    path = launch / "results" / FILE_NAME
    os.mkfifo(path)
    assert find_damaged_checkpoints(open_launch(runs.base / "a", 1)) == []
    path.unlink()
    event = {"time": 1, "path": "/x/\x1b[31m", "reason": "\x1b]0;x\n", "moved_to": "\x1b"}
    path.write_text(json.dumps(event) + "\n")
    scheduler.set("11", RUNNING)
    for verb in ("status", "history"):
        slipway(runs, verb, "a")
        assert "\x1b" not in capsys.readouterr().out
