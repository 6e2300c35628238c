"""Chains of jobs on a real Slurm, each interrupted in its own way."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from slipway.common.node.marks import JobAttempt
from tests.chains.rewound_directories import LINKS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]

# The step in the names of NeMo's checkpoints and of Megatron-LM's.
STEP = re.compile(r"(?:step=|iter_)(\d+)")


def codes(attempts: list[JobAttempt]) -> list[int | None]:
    return [attempt.exit_code for attempt in attempts]


def verdicts(attempts: list[JobAttempt]) -> list[str | None]:
    return [attempt.verdict for attempt in attempts]


def test_a_chain_goes_on_over_its_time_limit(chains: Any) -> None:
    runs = chains.wait_for("limited")
    attempts = runs.attempts("limited")
    assert len(runs.begun_jobs("limited")) == 3, runs.report("limited")
    assert [attempt.link for attempt in attempts] == [1, 2, 3]
    assert codes(attempts)[0] == 75
    assert codes(attempts)[2] == 0
    assert verdicts(attempts) == ["continue", "continue", "done"]
    assert attempts[0].signal == "USR1"
    assert attempts[1].state == "TIMEOUT"
    assert [attempt.checkpoint for attempt in attempts] == [None, 3, 5]
    assert [attempt.failures for attempt in attempts] == [0, 0, 0]


def test_a_chain_goes_on_after_a_preemption(chains: Any) -> None:
    """A preemption does not count as a failure, even where one is too many."""
    runs = chains.wait_for("preempted")
    attempts = runs.attempts("preempted")
    assert len(runs.begun_jobs("preempted")) == 3, runs.report("preempted")
    assert verdicts(attempts) == ["continue", "continue", "done"]
    assert (attempts[0].exit_code, attempts[0].signal) == (75, "USR1")
    assert attempts[1].state == "PREEMPTED"
    assert [attempt.checkpoint for attempt in attempts] == [None, 3, 3]
    assert [attempt.failures for attempt in attempts] == [0, 0, 0]


def test_signal_to_script_is_not_passed_to_its_tasks(chains: Any) -> None:
    runs = chains.wait_for("termed")
    first, second = runs.attempts("termed")
    assert (first.exit_code, first.signal, first.verdict) == (75, "TERM", "continue"), runs.report("termed")
    assert (second.checkpoint, second.verdict) == (3, "done")


def test_a_chain_leaves_a_node_that_died_under_it(chains: Any) -> None:
    runs = chains.wait_for("bereft")
    first, second = runs.attempts("bereft")
    assert (first.nodes, second.nodes) == ("n3,n4", "n3,n5"), runs.report("bereft")
    assert (first.state, first.verdict, first.excluded) == ("NODE_FAIL", "exclude", "n4")
    assert (second.verdict, second.checkpoint) == ("done", 3)
    assert "n4" in (second.avoids or "").split(",")
    rows = (runs.directory / "results" / "bereft" / "excluded_nodes.tsv").read_text().splitlines()
    assert [row.split("\t")[0] for row in rows] == ["n4"]


def test_a_chain_outlives_the_node_of_its_script(chains: Any) -> None:
    """The link leaves no mark of its end; the next one records it."""
    runs = chains.wait_for("orphaned")
    first, second = runs.attempts("orphaned")
    assert (first.nodes, second.nodes) == ("n6", "n7"), runs.report("orphaned")
    assert (first.exit_code, first.state) == (None, "NODE_FAIL")
    assert first.verdict in ("continue", "exclude")
    assert first.why
    assert (second.verdict, second.checkpoint, second.failures) == ("done", 3, 0)


def test_a_chain_that_gets_nowhere_stops_and_says_why(chains: Any) -> None:
    runs = chains.wait_for("crashing")
    attempts = runs.attempts("crashing")
    # Three links got on, two of them with lower steps, and so three of six did not.
    assert len(runs.begun_jobs("crashing")) == 6, runs.report("crashing")
    assert verdicts(attempts) == ["continue"] * 5 + ["stop"]
    assert [attempt.checkpoint for attempt in attempts] == [None, 1000, 400, 600, 600, 600]
    end = runs.end("crashing")
    assert end.why.startswith("3 links in a row ended without a new checkpoint")
    assert end.by == f"job {runs.job('crashing', 6)}"
    assert end.why in runs.log("crashing")


@pytest.mark.parametrize("engine", ["nemo", "megatron_lm"])
def test_a_chain_of_another_trainer_that_went_back_goes_on(chains: Any, engine: str) -> None:
    """The directories are of real trainings, whose highest step is from before the way back."""
    run = f"rewound_{engine}"
    runs = chains.wait_for(run)
    attempts = runs.attempts(run)
    assert verdicts(attempts) == ["continue"] * LINKS + ["done"], runs.report(run)
    assert [attempt.failures for attempt in attempts] == [0] * (LINKS + 1)
    directory = runs.directory / "results" / run / "checkpoints"
    highest = max(int(number) for path in directory.iterdir() for number in STEP.findall(path.name))
    steps = [attempt.checkpoint or 0 for attempt in attempts]
    assert steps == sorted(set(steps)), "each link saved a step of its own"
    assert steps[-1] < highest


def test_chain_ends_after_a_mistake_of_the_user(chains: Any) -> None:
    runs = chains.wait_for("mistaken")
    assert len(runs.begun_jobs("mistaken")) == 1, runs.report("mistaken")
    assert [(attempt.exit_code, attempt.verdict) for attempt in runs.attempts("mistaken")] == [(2, "stop")]
    assert runs.end("mistaken").by == f"job {runs.job('mistaken', 1)}"


def test_finished_chain_needs_no_further_link(chains: Any) -> None:
    runs = chains.wait_for("finished")
    assert runs.begun_jobs("finished") == runs.links("finished")[:1], runs.report("finished")
    assert verdicts(runs.attempts("finished")) == ["done"]
    states = runs.slurm("squeue", "--noheader", "--states=all", "--format=%T", "--name=chain-finished")
    assert sorted(states.split()) == ["CANCELLED", "COMPLETED"]


def test_cancelling_a_run_ends_the_whole_chain(chains: Any) -> None:
    runs = chains.wait_for("cancelled")
    assert runs.answers["cancelled"].returncode == 0, runs.answers["cancelled"]
    assert len(runs.begun_jobs("cancelled")) == 2, runs.report("cancelled")
    assert runs.end("cancelled") is not None
    states = runs.slurm("squeue", "--noheader", "--states=all", "--format=%i %T", "--name=chain-cancelled")
    state_of = dict(line.split() for line in states.splitlines())
    assert [state_of[job] for job in runs.links("cancelled")] == ["FAILED", "CANCELLED", "CANCELLED"]
    (row,) = runs.ask_json("status", "cancelled")
    assert row["state"] == "CANCELLED"


def test_cancelled_link_is_the_last(chains: Any) -> None:
    runs = chains.wait_for("cut_off")
    assert len(runs.begun_jobs("cut_off")) == 1, runs.report("cut_off")
    assert runs.end("cut_off") is not None
    (row,) = runs.ask_json("status", "cut_off")
    assert row["state"] == "CANCELLED"


def test_nodes_without_slurms_commands_can_be_links(chains: Any) -> None:
    runs = chains.wait_for("bare")
    attempts = runs.attempts("bare")
    assert len(runs.begun_jobs("bare")) == 2, runs.report("bare")
    assert len(runs.links("bare")) == 4, "all were submitted at launch"
    assert [(attempt.link, attempt.verdict) for attempt in attempts] == [(1, "continue"), (2, "done")]
    called = runs.directory / "bare-programs" / "called"
    assert "sbatch" not in (called.read_text() if called.exists() else "")


@pytest.mark.parametrize(("run", "is_found"), [("unanswered", True), ("twins", False)])
def test_a_lost_answer_makes_no_second_link_of_a_number(chains: Any, run: str, is_found: bool) -> None:
    runs = chains.wait_for(run)
    folder = "forgetful-programs" if is_found else "twin-programs"
    lost_job = (runs.directory / folder / "lost").read_text().strip()
    assert lost_job.isdecimal(), "the second link was submitted"
    assert (lost_job == runs.links(run)[1]) == is_found, runs.report(run)
    assert [(attempt.link, attempt.verdict) for attempt in runs.attempts(run)] == [
        (1, "continue"),
        (2, "done"),
    ]
    assert runs.begun_jobs(run) == runs.links(run)[:2]
    second_job_left = "leaves without doing anything" in runs.log(run)
    assert second_job_left != is_found


def test_a_failed_stage_leaves_nothing_that_waits_for_it(chains: Any) -> None:
    runs = chains.wait_for("fatherless")
    done = runs.answers["fatherless"]
    assert done.returncode == 0, done
    jobs = json.loads(done.stdout)
    assert len(jobs if isinstance(jobs, list) else jobs["launches"]) == 2
    assert len(runs.begun_jobs("fatherless")) == 1, "only the first stage began"
    rows = {row["run"]: row["state"] for row in runs.ask_json("status", "fatherless_data", "fatherless")}
    assert rows == {"fatherless_data": "FAILED", "fatherless": "CANCELLED"}


@pytest.mark.parametrize(
    "run", ["limited", "preempted", "bereft", "orphaned", "bare", "unanswered", "finished"]
)
def test_status_and_logs_show_a_chain_as_one_run(chains: Any, run: str) -> None:
    """Status has one line for the chain, whatever became of its links, and there is one log."""
    runs = chains.wait_for(run)
    (row,) = runs.ask_json("status", run)
    assert row["state"] == "COMPLETED", runs.report(run)
    assert row["job_id"] == runs.begun_jobs(run)[-1]
    log = runs.slipway("logs", run, "-n", "100000")
    for job in runs.begun_jobs(run):
        assert f"Job {job}: run {run}, launch 1" in log.stdout, log
