"""`slipway history`: the outcome of each launch, and the provenance of a result."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from monitor_samples import FakeScheduler, Runs, append, curve, end, start, train, whole_training

from launcher.cli.app import main
from launcher.monitor.history import history
from launcher.monitor.provenance_report import changes_between
from launcher.runs.provenance import gather
from launcher.schedulers.base import JobStatus
from launcher.schedulers.job_status import INTERRUPTED_REASON
from launcher.slurm.states import State
from tests.job_marks import leave_marks

Capsys = pytest.CaptureFixture[str]


def slipway(runs: Runs, *arguments: str) -> int:
    return main(["history", *arguments, "--base-results-dir", str(runs.base)])


def read_history(runs: Runs, capsys: Capsys, *arguments: str, code: int = 0) -> Any:
    assert slipway(runs, *arguments, "--json") == code
    return json.loads(capsys.readouterr().out)


def test_each_launch_has_a_line_and_its_changes(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    first = runs.launch(overrides=["training=gpt3/tiny", "a=1", "gone=x"], git_commit="0123456789abcdef")
    second = runs.launch(
        number=2,
        overrides=["training=gpt3/tiny", "a=2", "+b=3"],
        git_commit="fedcba9876543210",
        git_dirty=True,
        user="ada",
    )
    append(first, whole_training(0, 100)[:-1])
    leave_marks(first, "11", started=1_795_262_400.0, ended=1_795_262_460.0, code=1)
    append(second, whole_training(100, 300))
    scheduler.set("11", JobStatus(State.FAILED, "exit code 1", "n[1-2]", "00:01:00", 1))
    scheduler.set("12", JobStatus(State.COMPLETED, None, "n3", "00:02:00", 0))
    assert slipway(runs, "gpt3_tiny") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == (
        ["LAUNCH", "JOB", "STATE", "LAUNCHED", "BY", "STARTED", "RAN", "NODES", "STEPS", "LOSS", "COMMIT"]
    )
    assert lines[1].split()[:3] == ["1", "11", "FAILED"]
    assert lines[1].split()[-5:] == ["00:01:00", "n[1-2]", "0→100", "5.2615", "0123456789"]
    assert lines[2].strip() == "exit code 1"
    assert lines[3].split()[-4:] == ["n3", "100→300", f"{curve(300):.4f}", "fedcba9876*"]
    assert " ada " in lines[3]
    assert [line.strip() for line in lines[4:]] == ["- gone=x", "+ +b=3", "a: 1 → 2"]
    assert scheduler.questions == [["11", "12"]], "one question for all"


def test_json_has_a_row_for_each_launch(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    append(runs.launch(overrides=["a=1"]), [start(), train(1, loss=float("inf"))])
    runs.launch(number=2, overrides=["a=2"], job_id=None, error="sbatch: error: invalid partition\nmore")
    (runs.launch(number=3) / "launcher.json").write_text("{")
    scheduler.set("11", State.RUNNING)
    first, second, third = read_history(runs, capsys, "gpt3_tiny", code=3)
    assert (first["state"], first["first_step"], first["step"], first["loss"]) == ("RUNNING", 0, 1, "inf")
    assert (second["state"], second["reason"]) == ("NOT_SUBMITTED", "sbatch: error: invalid partition")
    assert second["changed"] == {"a": ["1", "2"]}
    assert (third["state"], third["tag"]) == ("UNKNOWN", None)
    assert "not a launch's manifest" in third["reason"]


def test_history_has_each_attempt_of_a_requeued_job(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    directory = runs.launch()
    leave_marks(directory, "11", started=1000.0, nodes="n1")
    leave_marks(directory, "11", attempt=1, started=1100.0, ended=1130.0, code=143, nodes="n2")
    leave_marks(directory, "11", attempt=2, started=1200.0, ended=1300.0, nodes="n3")
    append(directory, [start(0, 1010.0), train(1, 1020.0), train(30, 1050.0)])
    append(directory, [start(20, 1110.0), train(25, 1120.0)])
    append(directory, [start(25, 1210.0), train(300, 1290.0, 4.5), end(300, 1295.0)])
    scheduler.set("11", JobStatus(State.COMPLETED, None, "n3", "00:01:40", 0, restarts=2))
    (row,) = read_history(runs, capsys, "gpt3_tiny")
    assert (row["first_step"], row["step"], row["loss"], row["restarts"]) == (0, 300, 4.5, 2)
    attempts = [
        (attempt["state"], attempt["first_step"], attempt["step"], attempt["node_list"])
        for attempt in row["attempts"]
    ]
    assert attempts == [
        ("REQUEUED", 0, 30, "n1"),
        ("REQUEUED", 20, 25, "n2"),
        ("COMPLETED", 25, 300, "n3"),
    ]
    assert [attempt["reason"] for attempt in row["attempts"]] == [
        "no mark of its end",
        "exit code 143 (SIGTERM)",
        None,
    ]
    assert slipway(runs, "gpt3_tiny") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:2] == ["11", "REQUEUED"]
    assert lines[4].split()[:4] == ["11,", "attempt", "2", "REQUEUED"]
    assert "00:00:30" in lines[4]
    assert all(line == line.rstrip() for line in lines)


def test_history_has_each_start_of_the_tasks(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    directory = runs.launch()
    leave_marks(directory, "11", started=1000.0, ended=1300.0, code=1, nodes="n1,n2")
    again = {"job_id": "11", "exit_code": 137, "ended": 1100, "rule": "killed", "verdict": "continue"}
    again |= {"why": "a task was killed", "host": "n2", "rank": 1, "started": 1103, "nodes": "n1,n3"}
    (directory / "marks/11.0.restarted-1.json").write_text(json.dumps(again))
    append(directory, [start(0, 1010.0), train(30, 1050.0), start(20, 1110.0), train(25, 1120.0)])
    scheduler.set("11", JobStatus(State.FAILED, "exit code 1", "n[1-3]", "00:05:00", 1))
    (row,) = read_history(runs, capsys, "gpt3_tiny")
    names = ("state", "restart", "first_step", "step", "node_list", "started", "ended", "exit_code")
    assert [tuple(attempt[name] for name in names) for attempt in row["attempts"]] == [
        ("RESTARTED", 0, 0, 30, "n1,n2", 1000.0, 1100.0, 137),
        ("FAILED", 1, 20, 25, "n1,n3", 1103.0, 1300.0, 1),
    ]
    assert slipway(runs, "gpt3_tiny") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[1:3]] == ["1", "11"]
    assert lines[3:5] == [["a", "task", "was", "killed"], ["rank", "1", "on", "n2", "failed", "first"]]
    assert lines[6][:4] == ["11,", "restart", "1", "FAILED"]


def test_why_a_requeued_job_ended_is_said_once(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    directory = runs.launch()
    leave_marks(directory, "11", started=1000.0, ended=1050.0, code=75)
    leave_marks(directory, "11", attempt=1, started=1100.0, ended=1130.0, code=75)
    interrupted = JobStatus(State.INTERRUPTED, INTERRUPTED_REASON, "n1", "00:00:30", 75, restarts=1)
    scheduler.set("11", interrupted)
    slipway(runs, "gpt3_tiny")
    assert capsys.readouterr().out.count("saved before its end") == 1


def test_what_sbatch_said_of_a_job_is_shown(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    directory = runs.launch()
    (directory / "launcher.log").write_text("Submitted batch job 11\njob 12: 40 GPU hours\x1b[1m are left\n")
    scheduler.set("11", JobStatus(State.COMPLETED))
    slipway(runs, "gpt3_tiny")
    assert [line.strip() for line in capsys.readouterr().out.splitlines()][2:] == [
        r"sbatch said: job 12: 40 GPU hours\x1b[1m are left"
    ]


def test_what_the_log_says_of_a_job_without_marks_is_shown(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    runs.launch()
    scheduler.set("11", JobStatus(State.FAILED, "exit code 127", why="the script failed: module load x"))
    slipway(runs, "gpt3_tiny")
    assert "exit code 127: the script failed: module load x\n" in capsys.readouterr().out


def test_history_names_the_changes_of_a_different_training(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    changes: list[dict[str, Any]] = [{"key": "training.model.optim.lr", "old": 6e-4, "new": 3e-4}]
    changes += [{"key": f"training.model.k{number}", "old": None, "new": "x"} for number in range(9)]
    differs = {"launch": 1, "changes": changes}
    runs.launch()
    runs.launch(number=2, differs=differs)
    for job in ("11", "12"):
        scheduler.set(job, State.COMPLETED)
    first, second = read_history(runs, capsys, "gpt3_tiny")
    assert (first["differs"], second["differs"]) == (None, differs)
    slipway(runs, "gpt3_tiny")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    position = lines.index("a different training than launch 1:")
    assert lines[position + 1] == "training.model.optim.lr: 0.0006 → 0.0003"
    assert lines[position + 9] == "and 2 more"


def test_history_has_each_task_of_an_array(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    directory = runs.launch()
    leave_marks(directory, "11_0", started=1.0, ended=5.0)
    leave_marks(directory, "11_1", started=1.0, ended=5.0, code=1)
    leave_marks(directory, "11_2", started=2.0)
    tasks = {"2": State.RUNNING}
    scheduler.set("11", JobStatus(State.RUNNING, "tasks: 1 RUNNING", tasks=tasks))
    (row,) = read_history(runs, capsys, "gpt3_tiny")
    assert [(attempt["job_id"], attempt["state"], attempt["reason"]) for attempt in row["attempts"]] == [
        ("11_0", "COMPLETED", None),
        ("11_1", "FAILED", "exit code 1"),
        ("11_2", "RUNNING", None),
    ]


def test_secrets_are_not_shown(runs: Runs, scheduler: FakeScheduler, capsys: Capsys) -> None:
    secret, other = "hf_0123456789", "hf_9876543210"
    command = ["slipway", "launch", f"env_vars.HF_TOKEN={secret}"]
    runs.launch(overrides=[f"env_vars.HF_TOKEN={secret}", f"+env_vars.OLD_TOKEN={secret}"], command=command)
    added = f"+env_vars.NEW_TOKEN={other}"
    runs.launch(number=2, overrides=[f"env_vars.HF_TOKEN={other}", added], command=command)
    for number in ("11", "12"):
        scheduler.set(number, State.COMPLETED)
    for arguments in ([], ["--json"], ["--launch", "1"], ["--launch", "1", "--json"]):
        assert slipway(runs, "gpt3_tiny", *arguments) == 0
        output = capsys.readouterr().out
        assert secret not in output and other not in output
        assert "HF_TOKEN" in output and "***" in output
    assert slipway(runs, "gpt3_tiny") == 0
    assert "env_vars.HF_TOKEN: *** (changed)" in capsys.readouterr().out


def test_changes_between_overrides() -> None:
    changes = changes_between(["a=1", "a=2", "b=[x,y]", "c=", "~d"], ["a=3", "b=[x,y]", "c=1", "e=f=g"])
    assert changes.lines() == ["- ~d", "+ e=f=g", "a: 2 → 3", "c:  → 1"]
    assert changes_between(["a=1"], ["a=1"]).lines() == []


# the provenance of a result


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The user's own checkout, changed since its commit."""
    directory = tmp_path / "my checkout"
    (directory / "conf").mkdir(parents=True)
    (directory / "conf" / "mine.yaml").write_text("env_vars:\n  HF_TOKEN: null\nx: 1\n")
    git = ["git", "-C", str(directory), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "mine"]):
        subprocess.run([*git, *arguments], check=True)
    (directory / "conf" / "mine.yaml").write_text("env_vars:\n  HF_TOKEN: hf_0123456789\nx: 2\n")
    (directory / "conf" / "new.yaml").touch()
    return directory


def test_launch_option_shows_everything_about_one_launch(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, checkout: Path
) -> None:
    origin = gather(checkout / "conf", (), "/images/nemo.sqsh")
    directory = runs.launch(overrides=["a=1"], choices={"cluster": "bcm"}, **origin.fields)
    (directory / "git.diff").write_text(origin.files["git.diff"])
    (directory / "marks").mkdir()
    (directory / "marks" / "image.sha256").write_text("abc123  -\n")
    (directory / "results" / "packages.json").write_text('{"torch": "2.13.0"}')
    (directory / "results" / "git-info.log").write_text("commit hash: 123\nmore\n")
    details = read_history(runs, capsys, "gpt3_tiny", "--launch", "1")
    assert (details["image"], details["image_digest"]) == ("/images/nemo.sqsh", "sha256:abc123")
    assert details["job_packages"] == {"torch": "2.13.0"}
    assert set(details["packages"]) >= {"python", "slipway", "hydra-core", "submitit"}
    assert (details["git_dirty"], details["git_diff"]) == (True, "git.diff")
    assert slipway(runs, str(directory / "results")) == 0
    output = capsys.readouterr().out
    for expected in (
        "slipway launch",
        "a=1",
        "cluster=bcm",
        f"commit {details['git_commit']}, with uncommitted changes",
        "launches/1/git.diff",
        "sha256:abc123",
        "torch 2.13.0",
        "by u on login",
    ):
        assert expected in output
    assert slipway(runs, "11") == 0
    assert capsys.readouterr().out == output, "the job's id names the launch"


def test_older_manifest_is_shown_without_the_newer_fields(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys
) -> None:
    runs.launch()
    assert slipway(runs, "gpt3_tiny", "--launch", "1") == 0
    output = capsys.readouterr().out
    assert "slipway 0.1.0" in output
    assert "image" not in output and "code" not in output
    assert slipway(runs, "gpt3_tiny", "--launch", "7") == 2


def test_a_launch_that_cannot_be_read_hides_no_other(runs: Runs, scheduler: FakeScheduler) -> None:
    (runs.launch() / "launcher.json").unlink()
    runs.launch(number=2)
    scheduler.set("12", State.COMPLETED)
    states = [row.status.state for row in history(runs.base / "gpt3_tiny")]
    assert states == [State.UNKNOWN, State.COMPLETED]
