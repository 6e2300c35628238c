"""Chains of jobs on a real Slurm, each interrupted in its own way."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from supervisor.marks import JobAttempt
from tests.chains.rewound_directories import LINKS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]

# In the names of NeMo's checkpoints and of Megatron-LM's.
STEP = re.compile(r"(?:step=|iter_)(\d+)")


def codes(lives: list[JobAttempt]) -> list[int | None]:
    return [life.exit_code for life in lives]


def verdicts(lives: list[JobAttempt]) -> list[str | None]:
    return [life.verdict for life in lives]


def test_a_chain_goes_on_over_its_time_limit(chains: Any) -> None:
    yard = chains.ended("limited")
    lives = yard.lives("limited")
    assert len(yard.begun("limited")) == 3, yard.told("limited")
    assert [life.link for life in lives] == [1, 2, 3]
    assert codes(lives)[0] == 75
    assert codes(lives)[2] == 0
    assert verdicts(lives) == ["continue", "continue", "done"]
    assert lives[0].signal == "USR1"
    assert lives[1].state == "TIMEOUT"
    assert [life.checkpoint for life in lives] == [None, 3, 5]
    assert [life.failures for life in lives] == [0, 0, 0]


def test_a_chain_goes_on_after_a_preemption(chains: Any) -> None:
    """And it does not count as a failure, even where one is too many."""
    yard = chains.ended("preempted")
    lives = yard.lives("preempted")
    assert len(yard.begun("preempted")) == 3, yard.told("preempted")
    assert verdicts(lives) == ["continue", "continue", "done"]
    assert (lives[0].exit_code, lives[0].signal) == (75, "USR1")
    assert lives[1].state == "PREEMPTED"
    assert [life.checkpoint for life in lives] == [None, 3, 3]
    assert [life.failures for life in lives] == [0, 0, 0]


def test_what_ends_the_script_leaves_its_tasks_to_slurm(chains: Any) -> None:
    yard = chains.ended("termed")
    first, second = yard.lives("termed")
    assert (first.exit_code, first.signal, first.verdict) == (75, "TERM", "continue"), yard.told("termed")
    assert (second.checkpoint, second.verdict) == (3, "done")


def test_a_chain_leaves_a_node_that_died_under_it(chains: Any) -> None:
    yard = chains.ended("bereft")
    first, second = yard.lives("bereft")
    assert (first.nodes, second.nodes) == ("n3,n4", "n3,n5"), yard.told("bereft")
    assert (first.state, first.verdict, first.excluded) == ("NODE_FAIL", "exclude", "n4")
    assert (second.verdict, second.checkpoint) == ("done", 3)
    assert "n4" in (second.avoids or "").split(",")
    rows = (yard.directory / "results" / "bereft" / "excluded_nodes.tsv").read_text().splitlines()
    assert [row.split("\t")[0] for row in rows] == ["n4"]


def test_a_chain_outlives_the_node_of_its_script(chains: Any) -> None:
    """The link leaves no word of its end, and the next one puts it on record."""
    yard = chains.ended("orphaned")
    first, second = yard.lives("orphaned")
    assert (first.nodes, second.nodes) == ("n6", "n7"), yard.told("orphaned")
    assert (first.exit_code, first.state) == (None, "NODE_FAIL")
    assert first.verdict in ("continue", "exclude")
    assert first.why
    assert (second.verdict, second.checkpoint, second.failures) == ("done", 3, 0)


def test_a_chain_that_gets_nowhere_stops_and_says_why(chains: Any) -> None:
    yard = chains.ended("crashing")
    lives = yard.lives("crashing")
    # Three links got on, two of them with lower steps, and so three of six did not.
    assert len(yard.begun("crashing")) == 6, yard.told("crashing")
    assert verdicts(lives) == ["continue"] * 5 + ["stop"]
    assert [life.checkpoint for life in lives] == [None, 1000, 400, 600, 600, 600]
    end = yard.end("crashing")
    assert end.why.startswith("3 links in a row ended without a new checkpoint")
    assert end.by == f"job {yard.job('crashing', 6)}"
    assert end.why in yard.log("crashing")


@pytest.mark.parametrize("engine", ["nemo", "megatron_lm"])
def test_a_chain_of_another_trainer_that_went_back_goes_on(chains: Any, engine: str) -> None:
    """Its directories are those of real trainings, in which the highest step is of before the way back."""
    run = f"rewound_{engine}"
    yard = chains.ended(run)
    lives = yard.lives(run)
    assert verdicts(lives) == ["continue"] * LINKS + ["done"], yard.told(run)
    assert [life.failures for life in lives] == [0] * (LINKS + 1)
    directory = yard.directory / "results" / run / "checkpoints"
    highest = max(int(number) for path in directory.iterdir() for number in STEP.findall(path.name))
    steps = [life.checkpoint or 0 for life in lives]
    assert steps == sorted(set(steps)), "each link saved a step of its own"
    assert steps[-1] < highest


def test_a_mistake_is_not_made_again(chains: Any) -> None:
    yard = chains.ended("mistaken")
    assert len(yard.begun("mistaken")) == 1, yard.told("mistaken")
    assert [(life.exit_code, life.verdict) for life in yard.lives("mistaken")] == [(2, "stop")]
    assert yard.end("mistaken").by == f"job {yard.job('mistaken', 1)}"


def test_what_is_done_needs_no_further_link(chains: Any) -> None:
    yard = chains.ended("finished")
    assert yard.begun("finished") == yard.links("finished")[:1], yard.told("finished")
    assert verdicts(yard.lives("finished")) == ["done"]
    states = yard.slurm("squeue", "--noheader", "--states=all", "--format=%T", "--name=chain-finished")
    assert sorted(states.split()) == ["CANCELLED", "COMPLETED"]


def test_cancelling_a_run_ends_the_whole_chain(chains: Any) -> None:
    yard = chains.ended("cancelled")
    assert yard.said["cancelled"].returncode == 0, yard.said["cancelled"]
    assert len(yard.begun("cancelled")) == 2, yard.told("cancelled")
    assert yard.end("cancelled") is not None
    states = yard.slurm("squeue", "--noheader", "--states=all", "--format=%i %T", "--name=chain-cancelled")
    told = dict(line.split() for line in states.splitlines())
    assert [told[job] for job in yard.links("cancelled")] == ["FAILED", "CANCELLED", "CANCELLED"]
    (row,) = yard.told_by("status", "cancelled")
    assert row["state"] == "CANCELLED"


def test_a_link_that_somebody_cancelled_is_the_last(chains: Any) -> None:
    yard = chains.ended("cut_off")
    assert len(yard.begun("cut_off")) == 1, yard.told("cut_off")
    assert yard.end("cut_off") is not None
    (row,) = yard.told_by("status", "cut_off")
    assert row["state"] == "CANCELLED"


def test_nodes_without_slurms_commands_can_be_links(chains: Any) -> None:
    yard = chains.ended("bare")
    lives = yard.lives("bare")
    assert len(yard.begun("bare")) == 2, yard.told("bare")
    assert len(yard.links("bare")) == 4, "all were submitted at launch"
    assert [(life.link, life.verdict) for life in lives] == [(1, "continue"), (2, "done")]
    called = yard.directory / "bare-programs" / "called"
    assert "sbatch" not in (called.read_text() if called.exists() else "")


@pytest.mark.parametrize(("run", "is_found"), [("unanswered", True), ("twins", False)])
def test_a_lost_answer_makes_no_second_link_of_a_number(chains: Any, run: str, is_found: bool) -> None:
    yard = chains.ended(run)
    folder = "forgetful-programs" if is_found else "twin-programs"
    lost = (yard.directory / folder / "lost").read_text().strip()
    assert lost.isdecimal(), "the second link was submitted"
    assert (lost == yard.links(run)[1]) == is_found, yard.told(run)
    assert [(life.link, life.verdict) for life in yard.lives(run)] == [(1, "continue"), (2, "done")]
    assert yard.begun(run) == yard.links(run)[:2]
    left = "leaves without doing anything" in yard.log(run)
    assert left != is_found


def test_a_failed_stage_leaves_nothing_that_waits_for_it(chains: Any) -> None:
    yard = chains.ended("fatherless")
    done = yard.said["fatherless"]
    assert done.returncode == 0, done
    jobs = json.loads(done.stdout)
    assert len(jobs if isinstance(jobs, list) else jobs["launches"]) == 2
    assert len(yard.begun("fatherless")) == 1, "only the first stage began"
    rows = {row["run"]: row["state"] for row in yard.told_by("status", "fatherless_data", "fatherless")}
    assert rows == {"fatherless_data": "FAILED", "fatherless": "CANCELLED"}


@pytest.mark.parametrize(
    "run", ["limited", "preempted", "bereft", "orphaned", "bare", "unanswered", "finished"]
)
def test_a_chain_is_one_run(chains: Any, run: str) -> None:
    """One line in the status, whatever became of its links, and one log."""
    yard = chains.ended(run)
    (row,) = yard.told_by("status", run)
    assert row["state"] == "COMPLETED", yard.told(run)
    assert row["job_id"] == yard.begun(run)[-1]
    log = yard.slipway("logs", run, "-n", "100000")
    for job in yard.begun(run):
        assert f"Job {job}: run {run}, launch 1" in log.stdout, log
