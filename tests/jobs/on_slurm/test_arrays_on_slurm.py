"""Job arrays on a real Slurm: one run whose tasks follow one another."""

from __future__ import annotations

import json

import pytest

from tests.jobs.on_slurm.sandbox_runs import Row, SandboxRuns

pytestmark = pytest.mark.slurm


def read_status(runs: SandboxRuns, word: str) -> tuple[Row, int]:
    done = runs.slipway("status", word, "--json", "--exit-code")
    (row,) = json.loads(done.stdout)
    return row, done.returncode


def waiting_reasons(runs: SandboxRuns, run: str) -> set[str]:
    """Return the reasons why the tasks of an array wait, in Slurm's own words."""
    job = runs.jobs[run]
    output = runs.slurm("squeue", "--noheader", "--states=PENDING", "--format=%r", f"--jobs={job}")
    return set(output.split())


def test_one_failed_task_makes_the_array_fail(runs: SandboxRuns) -> None:
    row, code = read_status(runs, "array")
    assert (row["state"], row["exit_code"], code) == ("FAILED", 3, 1)
    assert row["tasks"] == {"0": "COMPLETED", "1": "FAILED", "2": "COMPLETED"}
    assert "exit code 3" in row["reason"]
    assert "FAILED" in runs.slipway("status", "array").stdout


def test_each_task_has_a_log(runs: SandboxRuns) -> None:
    job = runs.jobs["array"]
    for task in "012":
        done = runs.logs(f"{job}_{task}")
        assert done.returncode == 0, done.stderr
        assert f"\ntask {task}\n" in done.stdout
        assert runs.logs("array", "--task", task).stdout == done.stdout
    newest = runs.logs("array")
    assert "\ntask 2\n" in newest.stdout
    assert "--task" in newest.stderr, "that there are others"


def test_history_lists_each_task(runs: SandboxRuns) -> None:
    (launch,) = json.loads(runs.slipway("history", "array", "--json").stdout)
    attempts = {attempt["job_id"].partition("_")[2]: attempt["state"] for attempt in launch["attempts"]}
    assert attempts == {"0": "COMPLETED", "1": "FAILED", "2": "COMPLETED"}


def test_the_tasks_that_wait_are_held_and_released_and_one_is_cancelled(runs: SandboxRuns) -> None:
    job = runs.jobs["array_held"]
    row, code = read_status(runs, "array_held")
    assert (row["state"], code) == ("RUNNING", 4)
    tasks = {"0": "RUNNING", "1": "PENDING", "2": "PENDING", "3": "PENDING"}
    assert row["tasks"] == tasks
    assert "JobHeldUser: held, `slipway release RUN`" in row["reason"]
    assert waiting_reasons(runs, "array_held") == {"JobHeldUser"}
    released = runs.slipway("release", "array_held")
    assert released.returncode == 0, released.stderr
    assert "JobHeldUser" not in waiting_reasons(runs, "array_held")
    cancelled = runs.slipway("cancel", f"{job}_2")
    assert (cancelled.returncode, f"{job}_2" in cancelled.stdout) == (0, True), cancelled.stderr
    # Slurm keeps no record of a task that never began, and its accounting is late to drop what it had.
    row = runs.wait_for("array_held", task="2", states=["CANCELLED"])
    assert (row["state"], row["tasks"]) == ("RUNNING", {**tasks, "2": "CANCELLED"})
    assert runs.slipway("cancel", "array_held").returncode == 0
    row = runs.wait_for("array_held", states=["CANCELLED", "FAILED", "UNKNOWN"])
    assert (row["state"], set(row["tasks"].values())) == ("CANCELLED", {"CANCELLED"})
