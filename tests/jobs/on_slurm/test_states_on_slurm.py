"""Every state of a job that can be provoked on a real Slurm, as `status`, `logs` and `history` report it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import groupby

import pytest

from tests.jobs.on_slurm.sandbox_runs import SandboxRuns
from tests.jobs.on_slurm.scenarios import GRACE_IS_PREEMPTION, IS_REQUEUED_TWICE, REFUSED

pytestmark = pytest.mark.slurm

CLOCK = r"\d\d:\d\d:\d\d"
# The payload left when Slurm asked it to, or was killed.
ENDED = (143, 137)


@dataclass(frozen=True)
class ExpectedStatus:
    """The expected status of a run; `reason` is a pattern, `code` the exit code of `status --exit-code`.

    `exit_codes` are those that the payload may have ended with.
    """

    run: str
    state: str
    code: int
    reason: str = ""
    exit_codes: tuple[int | None, ...] = (None,)
    nodes: str | None = "n1"
    restarts: int = 0


EVERY = [
    ExpectedStatus("completed", "COMPLETED", 0, exit_codes=(0,)),
    ExpectedStatus("failed", "FAILED", 1, "exit code 3", (3,)),
    ExpectedStatus("killed", "FAILED", 1, r"exit code 139 \(SIGSEGV\)", (139,)),
    ExpectedStatus(
        "interrupted", "INTERRUPTED", 75, "saved before its end: launching again continues", (75,)
    ),
    ExpectedStatus("running", "RUNNING", 4),
    ExpectedStatus("suspended", "SUSPENDED", 4),
    ExpectedStatus("cancelled", "CANCELLED", 1, "by root", ENDED),
    ExpectedStatus("cancelled_waiting", "CANCELLED", 1, "by root", nodes=None),
    ExpectedStatus("timed_out", "TIMEOUT", 1, "TimeLimit", ENDED),
    ExpectedStatus("deadline", "DEADLINE", 1, "(?i)deadline.*", nodes=None),
    ExpectedStatus("node_failed", "NODE_FAIL", 1, "NodeDown.*", (None, 1, 129, 137, 143), nodes="n4"),
    ExpectedStatus(
        "preempted", "COMPLETED", 0, exit_codes=(0,), nodes="n2", restarts=2 if IS_REQUEUED_TWICE else 1
    ),
    ExpectedStatus("preempted_for_good", "PREEMPTED", 1, nodes="n2", exit_codes=ENDED),
    ExpectedStatus("preempted_politely", "PREEMPTED", 1, exit_codes=(None, *ENDED), nodes="n2")
    if GRACE_IS_PREEMPTION
    else ExpectedStatus("preempted_politely", "FAILED", 1, r"exit code 143 \(SIGTERM\)", (143,), nodes="n2"),
    ExpectedStatus("requeued", "COMPLETED", 0, exit_codes=(0,), restarts=1),
    ExpectedStatus("requeued_held", "PENDING", 4, ".*held.*", nodes=None, restarts=1),
    ExpectedStatus("held", "PENDING", 4, "JobHeld.*slipway release.*", nodes=None),
    ExpectedStatus("released", "COMPLETED", 0, exit_codes=(0,)),
    ExpectedStatus("never", "PENDING", 4, "DependencyNeverSatisfied.*slipway cancel.*", nodes=None),
    ExpectedStatus("lost_its_place", "FAILED", 1, "JobLaunchFailure.*"),
    ExpectedStatus(
        REFUSED, "NOT_SUBMITTED", 1, "Slurm refused the job: .*[Ii]nvalid partition.*nosuch.*", nodes=None
    ),
]


@pytest.mark.parametrize("expected", EVERY, ids=lambda expected: expected.run)
def test_status_reports_the_state(runs: SandboxRuns, expected: ExpectedStatus) -> None:
    done = runs.slipway("status", expected.run, "--json", "--exit-code")
    (row,) = json.loads(done.stdout)
    assert (row["state"], done.returncode) == (expected.state, expected.code), row
    assert re.fullmatch(expected.reason, row["reason"] or ""), row["reason"]
    assert row["exit_code"] in expected.exit_codes
    assert row["node_list"] == expected.nodes
    assert (row["job_id"], row["restarts"]) == (runs.jobs.get(expected.run), expected.restarts)
    if expected.nodes:
        assert re.fullmatch(CLOCK, row["elapsed"])


def test_the_table_has_a_line_for_each_run(runs: SandboxRuns) -> None:
    done = runs.slipway("status", "--all")
    hint = "to continue: slipway resume results/interrupted\n"
    assert (done.returncode, done.stderr) == (0, hint)
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()[1:]}
    for expected in EVERY:
        assert lines[expected.run][2:4] == [runs.jobs.get(expected.run, "-"), expected.state]
    assert runs.slipway("status", "--exit-code").returncode == 1, "the worst of all"


def states(runs: SandboxRuns, run: str) -> str:
    """Return the states that `status` went through."""
    names = [row["state"] for row in runs.history[run] if row["state"] != "COMPLETING"]
    return " ".join(state for state, _ in groupby(names))


@pytest.mark.parametrize("run", ["preempted", "requeued"])
def test_a_requeued_job_waits_and_goes_on(runs: SandboxRuns, run: str) -> None:
    assert re.search("RUNNING PENDING( RUNNING| COMPLETED| PENDING)* COMPLETED$", states(runs, run))
    waiting = [row for row in runs.history[run] if row["state"] == "PENDING" and row["restarts"] == 1]
    assert waiting[0]["reason"].startswith("BeginTime")
    log = runs.logs(run).stdout
    assert log.index("attempt 0") < log.index("attempt 1")
    (launch,) = json.loads(runs.slipway("history", run, "--json").stdout)
    attempts = [attempt["state"] for attempt in launch["attempts"]]
    assert (attempts[0], attempts[-1], len(attempts)) == (
        "REQUEUED",
        "COMPLETED",
        runs.rows[run]["restarts"] + 1,
    )


def test_a_held_job_was_waiting_and_a_suspended_one_running(runs: SandboxRuns) -> None:
    assert states(runs, "suspended").endswith("RUNNING SUSPENDED")
    reasons = [(row["reason"] or "").partition(":")[0] for row in runs.history["held"]]
    assert reasons[-2:] == ["PartitionDown", "JobHeldUser"]


def test_logs_of_a_job_that_ended(runs: SandboxRuns) -> None:
    done = runs.logs("completed")
    assert done.returncode == 0
    assert "hello\nof rank 0\n" in done.stdout
    last = runs.logs("completed", "-n", "1")
    assert last.stdout == done.stdout.splitlines(keepends=True)[-1]
    followed = runs.logs("completed", "--follow")
    assert (followed.returncode, followed.stdout) == (0, done.stdout)


def test_logs_of_a_job_that_runs(runs: SandboxRuns) -> None:
    done = runs.logs("running", "-n", "1")
    assert (done.returncode, done.stdout) == (0, "attempt 0\n")


@pytest.mark.parametrize(
    ("run", "code", "words"),
    [("failed", 1, "FAILED (exit code 3)"), ("timed_out", 1, "TIMEOUT"), ("interrupted", 75, "INTERRUPTED")],
)
def test_following_a_log_says_how_the_job_ended(runs: SandboxRuns, run: str, code: int, words: str) -> None:
    done = runs.logs(run, "--follow")
    assert f"job {runs.jobs[run]} is {words}" in done.stderr
    assert done.returncode == code


def test_the_log_of_a_job_says_why_slurm_ended_it(runs: SandboxRuns) -> None:
    for run, words in (("timed_out", "DUE TO TIME LIMIT"), ("preempted_for_good", "DUE TO PREEMPTION")):
        assert words in runs.logs(run).stdout


@pytest.mark.parametrize("run", ["cancelled_waiting", "held", "never", "deadline"])
def test_a_job_that_never_began_has_no_log(runs: SandboxRuns, run: str) -> None:
    done = runs.logs(run)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no log yet" in done.stderr
    assert runs.rows[run]["state"] in done.stderr


def test_history_reports_the_ends(runs: SandboxRuns) -> None:
    for run in ("failed", "node_failed", "cancelled", REFUSED):
        (launch,) = json.loads(runs.slipway("history", run, "--json").stdout)
        assert (launch["state"], launch["job_id"]) == (runs.rows[run]["state"], runs.jobs.get(run))


def test_a_run_is_found_by_the_id_of_its_job(runs: SandboxRuns) -> None:
    done = runs.slipway("status", runs.jobs["failed"], runs.jobs["running"], "--json")
    assert [row["run"] for row in json.loads(done.stdout)] == ["failed", "running"]
