"""Jobs that Slurm has forgotten, is late with, or confuses with another are never reported as healthy."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.fakes.programs import write_programs
from tests.job_marks import end_marks
from tests.jobs.on_slurm.sandbox_runs import Row, SandboxRuns
from tests.jobs.on_slurm.scenarios import SCENARIOS, STRANGER, Scenario

pytestmark = pytest.mark.slurm

LIVE = {"running", "suspended", "held", "never", "requeued_held"}

# Without accounting: the states by the job's own marks, once the queue has forgotten the job.
BY_MARKS = {
    "completed": "COMPLETED",
    "failed": "FAILED",
    "killed": "FAILED",
    "interrupted": "INTERRUPTED",
    "preempted": "COMPLETED",
    "requeued": "COMPLETED",
    "released": "COMPLETED",
    "array": "FAILED",
    "requeued_held": "FAILED",
    # The verb has left a mark.
    "cancelled": "CANCELLED",
    "cancelled_waiting": "CANCELLED",
    # Began, and was killed or not.
    "running": "UNKNOWN",
    "suspended": "UNKNOWN",
    # Never began.
    "deadline": "UNKNOWN",
    "held": "UNKNOWN",
    "never": "UNKNOWN",
    "lost_its_place": "UNKNOWN",
}


@pytest.fixture(scope="module")
def rows_without_queue(sandbox_runs: dict[str, SandboxRuns]) -> dict[bool, dict[str, Row]]:
    """Return the statuses of all runs after squeue forgot them (MinJobAge), by `SandboxRuns.accounting`."""
    return {
        runs.accounting: runs.read_rows(write_programs(runs.directory / "forgetful", {"squeue": "exit 0"}))
        for runs in sandbox_runs.values()
    }


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.run)
def test_accounting_remembers_what_the_queue_forgot(
    sandbox_runs: dict[str, SandboxRuns], rows_without_queue: dict[bool, dict[str, Row]], scenario: Scenario
) -> None:
    run = scenario.run
    old_row, row = sandbox_runs["accounting"].rows[run], rows_without_queue[True][run]
    if run in LIVE:
        # sacct keeps "runaway" jobs alive for ever.
        assert row["state"] == "UNKNOWN"
        assert "not in the queue" in row["reason"]
    else:
        keys = ("state", "job_id", "restarts")
        assert [row[key] for key in keys] == [old_row[key] for key in keys]


# Slurm ends the script with its tasks: how much it can still write down is a race, which the machine decides.
RACING = ("preempted_politely", "preempted_for_good", "timed_out")
# Slurm's words for an end that is over; while it still signals the tasks, SIGNALING says nothing of why.
OVER = {"PREEMPTED": "PREEMPTED", "TIMEOUT": "TIMEOUT", "TimeLimit": "TIMEOUT"}


def state_by_marks(runs: SandboxRuns, run: str) -> str:
    """Return the status of a run by its marks alone."""
    if run not in RACING:
        return BY_MARKS[run]
    marks = end_marks(runs.launch_directory(run))
    # The mark has Slurm's word, or the exit code alone; there is none if the script was killed before.
    return OVER.get(marks[-1].get("state"), "FAILED") if marks else "UNKNOWN"


@pytest.mark.parametrize("run", sorted({*BY_MARKS, *RACING, "node_failed"}))
def test_without_accounting_the_marks_give_the_state(
    sandbox_runs: dict[str, SandboxRuns], rows_without_queue: dict[bool, dict[str, Row]], run: str
) -> None:
    row = rows_without_queue[False][run]
    if run == "node_failed":
        # srun itself says 0 when a node fails.
        assert row["state"] in ("FAILED", "NODE_FAIL", "UNKNOWN"), row
    else:
        assert row["state"] == state_by_marks(sandbox_runs["plain"], run), row
    assert (row["state"] == "UNKNOWN") <= bool(row["reason"])


def test_unknown_state_is_in_the_exit_code(runs: SandboxRuns) -> None:
    forgetful = write_programs(runs.directory / "forgetful", {"squeue": "exit 0"})
    done = runs.slipway("status", "running", programs=forgetful)
    assert done.returncode == 3
    assert "UNKNOWN" in done.stdout


def test_late_accounting_changes_nothing_while_the_queue_remembers(
    sandbox_runs: dict[str, SandboxRuns],
) -> None:
    runs = sandbox_runs["accounting"]
    rows = runs.read_rows(write_programs(runs.directory / "late", {"sacct": "exit 0"}))
    for scenario in SCENARIOS:
        assert rows[scenario.run]["state"] == scenario.final_state


def test_late_accounting_and_a_forgetful_queue_leave_the_marks(sandbox_runs: dict[str, SandboxRuns]) -> None:
    runs = sandbox_runs["accounting"]
    programs = write_programs(runs.directory / "neither", {"squeue": "exit 0", "sacct": "exit 0"})
    rows = runs.read_rows(programs)
    names = (*BY_MARKS, *RACING)
    assert {name: rows[name]["state"] for name in names} == {
        name: state_by_marks(runs, name) for name in names
    }


def test_out_of_memory_as_slurm_words_it(runs: SandboxRuns) -> None:
    """It takes control groups to provoke this; here the answers about another failed job are reworded."""
    reworded = runs.directory / "reworded"
    for name in ("squeue", "sacct"):
        write_programs(reworded, {name: f'$real "$@" | sed /{runs.jobs["failed"]}/s/FAILED/OUT_OF_MEMORY/'})
    done = runs.slipway("status", "failed", "--json", "--exit-code", programs=reworded)
    (row,) = json.loads(done.stdout)
    assert (row["state"], done.returncode) == ("OUT_OF_MEMORY", 1)


def copy_as_another_job(runs: SandboxRuns, run: str, name: str, job_id: str) -> None:
    """Copy a run under another name, as if its job had had another id."""
    copy, old = runs.directory / "results" / name, runs.jobs[run]
    shutil.copytree(runs.directory / "results" / run, copy, symlinks=True)
    launch = copy / "launches" / "1"
    for path in [launch / "launcher.json", *(launch / "marks").glob("*")]:
        text = path.read_text().replace(f'"{run}"', f'"{name}"').replace(old, job_id)
        path.unlink()
        path.with_name(path.name.replace(old, job_id)).write_text(text)


@pytest.mark.parametrize(
    ("run", "state"), [("completed", "COMPLETED"), ("cancelled", "CANCELLED"), ("never", "UNKNOWN")]
)
def test_the_id_of_a_job_may_be_a_strangers_now(runs: SandboxRuns, run: str, state: str) -> None:
    """A Slurm that was set up anew counts from one again."""
    name, stranger = f"{run}_long_ago", runs.jobs[STRANGER]
    copy_as_another_job(runs, run, name, stranger)
    try:
        (row,) = json.loads(runs.slipway("status", name, "--json").stdout)
        assert (row["state"], row["job_id"]) == (state, stranger), row
        for verb in ("cancel", "hold"):
            runs.slipway(verb, name)
            assert (
                runs.slurm("squeue", "--noheader", "--format=%T", f"--jobs={stranger}").strip() == "RUNNING"
            )
        assert runs.slipway("cancel", name).returncode == (3 if state == "UNKNOWN" else 0)
    finally:
        shutil.rmtree(runs.directory / "results" / name)
