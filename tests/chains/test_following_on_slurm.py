"""A stage after a chain, on a real Slurm whose links are killed, cancelled and used up."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.runs.provenance import user
from tests.chains.chain_runs import ChainRuns
from tests.chains.following_scenarios import AFTER

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


def stage_jobs(runs: ChainRuns, run: str) -> list[list[str]]:
    """Return the jobs of the stage that did something, each with the number of links that still ran."""
    path = runs.work(run) / "after"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def stage_state(runs: ChainRuns, run: str) -> tuple[str, str]:
    (row,) = runs.ask_json("status", AFTER.format(run))
    return row["state"], row["reason"] or ""


@pytest.mark.parametrize(
    ("run", "links"),
    [
        ("continued", ["continue", "continue", "done"]),
        ("killed_when_done", ["done"]),
        ("submitted_late", ["continue", "done"]),
        ("without_commands", ["continue", "done"]),
    ],
)
def test_stage_runs_once_after_the_link_that_is_done(chains: Any, run: str, links: list[str]) -> None:
    runs = chains.wait_for(run)
    assert [attempt.verdict for attempt in runs.attempts(run)] == links, runs.report(run)
    ((job, running),) = stage_jobs(runs, run)
    assert running == "0"
    assert stage_state(runs, run)[0] == "COMPLETED"
    assert runs.links(AFTER.format(run)) == [job]


def test_status_names_the_chain_that_a_stage_waits_for(chains: Any) -> None:
    runs = chains.wait_for("continued")
    assert "Dependency: it waits for the end of continued" in runs.answers["continued"].stdout


@pytest.mark.parametrize(
    ("run", "state", "reason"),
    [
        ("given_up", "CANCELLED", "2 links in a row ended without a new checkpoint"),
        ("used_up", "CANCELLED", "its tasks failed"),
        ("called_off", "CANCELLED", f"by {user()}"),
        ("called_off_waiting", "FAILED", "called_off_waiting, which it waited for, is not done"),
    ],
)
def test_stage_does_nothing_after_a_chain_that_is_not_done(
    chains: Any, run: str, state: str, reason: str
) -> None:
    runs = chains.wait_for(run)
    assert stage_jobs(runs, run) == []
    (found_state, why), history = stage_state(runs, run), runs.slipway("history", AFTER.format(run)).stdout
    assert found_state == state, runs.report(run)
    assert reason in f"{why} {history}"


def test_repeated_stage_looks_at_new_checkpoints_one_job_at_a_time(chains: Any) -> None:
    runs, run = chains.wait_for("repeated"), "repeated"
    assert [attempt.verdict for attempt in runs.attempts(run)] == ["continue", "done"], runs.report(run)
    first, second, last = runs.links(AFTER.format(run))[1:] + runs.links(AFTER.format(run))[:1]
    lines = stage_jobs(runs, run)
    assert [line[:2] for line in lines] == [
        [word, job] for job in (first, second, last) for word in ("begin", "end")
    ], runs.report(AFTER.format(run))
    assert lines[-1][2] == "6"  # the job after the training sees all checkpoints


def test_jobs_of_a_repeated_stage_are_tracked(chains: Any) -> None:
    runs, run = chains.wait_for("repeated"), AFTER.format("repeated")
    last, first, second = runs.links(run)
    running = runs.answers["repeated_running"].stdout
    assert "RUNNING" in running and first in running
    (launch,) = runs.ask_json("history", run)
    # Marks have whole seconds: two that begin in the same one may stand in either order.
    assert launch["attempts"][0]["job_id"] == first
    assert sorted((attempt["link"], attempt["job_id"]) for attempt in launch["attempts"]) == [
        (1, last),
        (2, first),
        (3, second),
    ]
    assert stage_state(runs, "repeated")[0] == "COMPLETED"
    assert f"Job {first}: " in runs.slipway("logs", run, "--link", "2").stdout


def test_refused_job_of_a_repeated_stage_holds_up_nothing(chains: Any) -> None:
    runs, run = chains.wait_for("refused"), "refused"
    assert [attempt.verdict for attempt in runs.attempts(run)] == ["done"], runs.report(run)
    warning = "warning: refused_after was not submitted after a checkpoint: sbatch: error"
    assert runs.log(run).count(warning) == 1
    assert len(stage_jobs(runs, run)) == 1
    assert stage_state(runs, run)[0] == "COMPLETED"
