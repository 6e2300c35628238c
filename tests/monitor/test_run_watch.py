"""`slipway watch` sees from the login node what the jobs of runs cannot, and delivers what they have not."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from monitor_samples import FAILED, PENDING, RUNNING, FakeScheduler, Runs, append, slipway, start, train

from launcher.errors import UserError
from launcher.schedulers.base import ChainJobs, JobStatus
from launcher.slurm.states import State
from slipway.common.node.settings import Settings, to_json
from slipway.watch import detectors
from slipway.watch.alerts import OUTBOX, read_messages
from tests.fakes.receiver import Receiver, receive
from tests.job_marks import leave_marks

Capsys = pytest.CaptureFixture[str]
CANCELLED = JobStatus(State.CANCELLED)
WITHDRAWN = replace(CANCELLED, chain=ChainJobs(2, 2, {"11": FAILED, "12": CANCELLED}, [1, 2]))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receive() as server:
        yield server


def write_settings(directory: Path, watch: dict[str, Any], tell: dict[str, Any]) -> None:
    run_dir = str(directory.parents[1])
    settings = Settings("gpt3_tiny", 1, "t", run_dir, "s", "l", "slurm", "megatron", watch=watch, tell=tell)
    (directory / "supervisor.json").write_text(to_json(settings))


def diverging_run(runs: Runs) -> Path:
    directory = runs.launch()
    now = time.time()
    steps = [train(step, now - 30 + step, float("nan")) for step in range(1, 30)]
    append(directory, [start(0, now - 30), *steps])
    return directory.parents[1]


def messages(run_dir: Path) -> list[str]:
    return [message.name for message in read_messages(run_dir)]


def test_a_training_whose_job_does_not_look_is_looked_at(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    scheduler.set("11", RUNNING)
    run_dir = diverging_run(runs)
    assert slipway(runs, "watch") == 1
    assert messages(run_dir) == ["non_finite-1.1"]
    assert "gpt3_tiny: the loss is nan at step 1 (non_finite-1)" in capsys.readouterr().out
    assert slipway(runs, "watch", "--json") == 1  # and opens no alert again
    assert messages(run_dir) == ["non_finite-1.1"]
    (look,) = json.loads(capsys.readouterr().out)
    assert [alert["alert"] for alert in look["alerts"]] == ["non_finite-1"]
    assert len(scheduler.questions) == 2


def test_a_job_that_looks_itself_is_left_alone(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    scheduler.set("11", RUNNING)
    run_dir = diverging_run(runs)
    (run_dir / OUTBOX).mkdir()
    (run_dir / OUTBOX / "job.json").write_text(json.dumps({"job": "11", "time": time.time()}))
    assert slipway(runs, "watch", "gpt3_tiny") == 0
    assert messages(run_dir) == []
    assert "no alert is open; its job watches it" in capsys.readouterr().out


@pytest.mark.parametrize("has_mark", [False, True])
@pytest.mark.parametrize("status", [FAILED, WITHDRAWN, JobStatus(State.UNKNOWN)])
def test_a_job_that_ended_without_a_word_is_an_alert(
    has_mark: bool,
    status: JobStatus,
    runs: Runs,
    scheduler: FakeScheduler,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chain that gives up cancels its next job: that one is no word of the end."""
    monkeypatch.setattr(detectors, "_PATIENCE", 0)
    monkeypatch.setattr(scheduler, "find", lambda submissions: {}, raising=False)  # no further link
    created = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    directory = runs.launch(created=created, links=2)
    leave_marks(directory, "11", started=1, ended=2 if has_mark else None, code=1)
    scheduler.set("11", status)
    assert slipway(runs, "watch") == (0 if has_mark else 1)
    assert messages(directory.parents[1]) == ([] if has_mark else ["job-1.1"])
    assert ("left no mark of the end" in capsys.readouterr().out) is not has_mark


def test_a_job_that_waits_is_no_alert(runs: Runs, scheduler: FakeScheduler) -> None:
    directory = runs.launch()
    scheduler.set("11", PENDING)
    assert slipway(runs, "watch") == 0
    assert messages(directory.parents[1]) == []


def test_five_hundred_runs_are_one_question(runs: Runs, scheduler: FakeScheduler) -> None:
    for number in range(500):
        runs.launch(f"r{number}", job_id=str(1000 + number))
        scheduler.set(str(1000 + number), PENDING)
    slipway(runs, "watch", "--all")
    assert len(scheduler.questions) == 1
    with pytest.raises(UserError, match="name runs, or all of them"):
        slipway(runs, "watch", "--all", "r1")


def test_what_waits_is_delivered_by_apprise_and_by_the_ways_of_the_job(
    runs: Runs, scheduler: FakeScheduler, receiver: Receiver, tmp_path: Path, capsys: Capsys
) -> None:
    scheduler.set("11", RUNNING)
    run_dir = diverging_run(runs)
    services, url = tmp_path / "apprise", tmp_path / "url"
    services.write_text(f"# ours\njson://user:PASS-W0RD@127.0.0.1:{receiver.server_port}/apprise\n")
    url.write_text(receiver.url + "\n")
    tell = {"apprise_file": str(services), "webhook": {"url_file": str(url), "style": "slack"}}
    write_settings(run_dir / "launches/1", {}, tell)
    slipway(runs, "watch", "--deliver")
    slipway(runs, "watch", "--deliver")
    assert sorted(next(iter(body)) for body in receiver.bodies) == ["text", "version"]
    (body,) = (body for body in receiver.bodies if "message" in body)
    assert "the loss is nan at step 1" in body["message"]
    receiver.code = 500
    append(run_dir / "launches/1", [train(step, time.time(), 3.0) for step in range(30, 60)])  # it is over
    slipway(runs, "watch", "--deliver")
    output = capsys.readouterr().out
    assert "not delivered: apprise could not deliver to json" in output
    kept = [path.read_text() for path in run_dir.rglob("*") if path.is_file()]
    assert not any("PASS-W0RD" in text for text in [*kept, output])


def test_a_run_that_cannot_be_recorded_says_so(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    scheduler.set("11", RUNNING)
    (diverging_run(runs) / OUTBOX).write_text("no directory")
    assert slipway(runs, "watch") == 1
    output, error = capsys.readouterr()
    assert "nothing could be recorded" in error
    assert "the loss is nan at step 1 (non_finite-1)" in output  # what is wrong is said all the same


@pytest.mark.parametrize(
    "memory", [{}, {"conditions": {}, "since": {"disk": 1e400}, "disk": [[1, 9], [1, float("inf")]]}]
)
def test_an_odd_run_costs_its_own_row_alone(
    memory: dict[str, Any], runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    write_settings(runs.launch("of-another-version"), {"tea_time": {"reaction": "notify"}}, {})
    (diverging_run(runs) / OUTBOX).mkdir()
    (runs.base / "gpt3_tiny" / OUTBOX / "login.json").write_text(json.dumps(memory))
    fifo = runs.launch("fifo", job_id="12").parents[1] / "alerts.jsonl"
    os.mkfifo(fifo)
    append(fifo.parent / "launches/1", [train(1, time.time(), float("nan"))])
    for job in ("11", "12"):
        scheduler.set(job, RUNNING)
    assert slipway(runs, "watch") == 1
    output, error = capsys.readouterr()
    assert "gpt3_tiny: the loss is nan at step 1 (non_finite-1)" in output
    assert "not of this version" in error
    assert "fifo: nothing could be recorded" in error


def test_a_training_that_ended_is_not_called_slow(runs: Runs, scheduler: FakeScheduler) -> None:
    directory = diverging_run(runs) / "launches/1"
    scheduler.set("11", RUNNING)
    slipway(runs, "watch")
    leave_marks(directory, "11", started=1, ended=int(time.time()), code=1)
    append(directory, [train(step, time.time() - 9999, 3.0) for step in range(30, 32)])
    scheduler.set("11", FAILED)
    assert slipway(runs, "watch") == 1  # its alert is open still
    assert messages(directory.parents[1]) == ["non_finite-1.1"]
    scheduler.set("11", JobStatus(State.CANCELLED))
    assert slipway(runs, "watch") == 0
    assert messages(directory.parents[1]) == ["non_finite-1.1", "non_finite-1.2"]


def test_settings_of_somebody_else_run_no_program(
    runs: Runs, scheduler: FakeScheduler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler.set("11", RUNNING)
    directory = diverging_run(runs) / "launches/1"
    write_settings(directory, {}, {"command": ["/usr/bin/touch", str(tmp_path / "ran")]})
    (directory / "supervisor.json").chmod(0o666)
    slipway(runs, "watch", "--deliver")
    assert not (tmp_path / "ran").exists()
    assert "nothing is delivered: everybody may write" in caplog.text
    (directory / "supervisor.json").chmod(0o600)
    slipway(runs, "watch", "--deliver")
    assert (tmp_path / "ran").exists()


def test_an_interval_that_a_controller_would_feel_is_refused(runs: Runs, capsys: Capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        slipway(runs, "watch", "--follow", "--interval", "1")
    assert "at least 30 seconds" in capsys.readouterr().err
