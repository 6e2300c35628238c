"""Chains that were broken from outside, each in a way that once lost, doubled or misreported a job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chains.break_scenarios import SOMEBODY
from tests.chains.chain_runs import PREFIX, ChainRuns

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


def status_row(runs: ChainRuns, run: str) -> dict[str, Any]:
    (row,) = runs.ask_json("status", run)
    return dict(row)


def test_requeued_link_goes_on(chains: Any) -> None:
    """An administrator's requeue looks like a cancellation to the job that it ends."""
    runs = chains.wait_for("requeued")
    job = runs.jobs["requeued"]
    (waiting,) = json.loads(runs.answers["requeued"].stdout)
    assert (waiting["state"], waiting["job_id"]) == ("PENDING", job), runs.report("requeued")
    assert runs.begun_jobs("requeued") == [job, job], runs.report("requeued")
    first, second = runs.attempts("requeued")
    assert (first.job_id, first.number, first.verdict) == (job, 0, "continue")
    assert (second.job_id, second.number, second.verdict) == (job, 1, "done")
    assert status_row(runs, "requeued")["state"] == "COMPLETED"


def test_cancelled_link_that_may_be_requeued_ends_the_chain(chains: Any) -> None:
    runs = chains.wait_for("cancelled_with_requeue")
    assert runs.begun_jobs("cancelled_with_requeue") == [runs.jobs["cancelled_with_requeue"]]
    assert runs.end("cancelled_with_requeue") is not None, runs.report("cancelled_with_requeue")
    assert status_row(runs, "cancelled_with_requeue")["state"] == "CANCELLED"


def test_chain_is_cancelled_while_its_link_waits_to_begin_again(chains: Any) -> None:
    runs = chains.wait_for("cancelled_while_requeued")
    done = runs.answers["cancelled_while_requeued"]
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"cancelled job {runs.jobs['cancelled_while_requeued']} "), done
    assert len(runs.begun_jobs("cancelled_while_requeued")) == 1
    end = runs.end("cancelled_while_requeued")
    assert end and end.why.startswith("cancelled by"), runs.report("cancelled_while_requeued")
    assert status_row(runs, "cancelled_while_requeued")["state"] == "CANCELLED"


def test_link_that_leaves_at_once_is_no_success(chains: Any) -> None:
    runs = chains.wait_for("unbegun")
    job = runs.jobs["unbegun"]
    state = runs.slurm("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
    assert state.strip() == "FAILED", "what waits for its success does not go on"
    assert runs.begun_jobs("unbegun") == [] and runs.attempts("unbegun") == [], runs.report("unbegun")
    row = status_row(runs, "unbegun")
    assert (row["state"], row["reason"]) == ("CANCELLED", f"by {SOMEBODY}")
    assert runs.slipway("status", "unbegun", "--exit-code").returncode != 0
    (launch,) = runs.ask_json("history", "unbegun")
    assert launch["state"] == "CANCELLED"


def test_jobs_of_a_deleted_launch_leave_the_next_one_alone(chains: Any) -> None:
    runs = chains.wait_for("deleted")
    output = runs.command("squeue", "--noheader", "--states=all", "--format=%i %o", f"--name={PREFIX}deleted")
    command = dict(line.split(maxsplit=1) for line in output.stdout.splitlines())
    (launch,) = runs.ask_json("history", "deleted")
    own = {job for job, script in command.items() if launch["tag"] in script}
    others = set(command) - own
    assert len(others) >= 2, output
    # To cancel the link of old by its id would end the new launch.
    assert runs.answers["deleted"].returncode == 2, f"{runs.answers['deleted']}\n{runs.report('deleted')}"
    assert "of a launch that was removed" in runs.answers["deleted"].stderr
    begun = runs.begun_jobs("deleted")
    assert begun == [begun[0], runs.jobs["deleted"]], runs.report("deleted")
    marks = runs.launch_directory("deleted") / "marks"
    texts = {path.name: path.read_text() for path in marks.iterdir()}
    assert {name for name, text in texts.items() for job in others if job in name or job in text} == set()
    assert {attempt["job_id"] for attempt in launch["attempts"]} == {runs.jobs["deleted"]}
    row = status_row(runs, "deleted")
    assert (row["state"], row["job_id"]) == ("COMPLETED", runs.jobs["deleted"])


def test_missing_claims_hide_no_link(chains: Any) -> None:
    runs = chains.wait_for("full_disk")
    rows = json.loads(runs.answers["full_disk_status"].stdout)
    job = runs.begun_jobs("full_disk")[2]
    fields = [(row["state"], row["job_id"], row["link"], row["max_links"]) for row in rows]
    assert fields == [("RUNNING", job, 3, 9)] * 3, runs.report("full_disk")
    done = runs.answers["full_disk"]
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"cancelled job {job} of full_disk (launch 1, link 3/9)"), done
    assert runs.answers["full_disk_left"].stdout == "", runs.report("full_disk")
    assert len(runs.begun_jobs("full_disk")) == 3
    assert runs.end("full_disk") is not None
    assert status_row(runs, "full_disk")["state"] == "CANCELLED"


def test_a_link_that_begins_early_waits_for_the_one_before(chains: Any) -> None:
    runs = chains.wait_for("begun_early")
    log = runs.log("begun_early")
    assert "left no word" not in log, runs.report("begun_early")
    first, second = runs.attempts("begun_early")
    assert (first.exit_code, first.verdict, second.verdict) == (75, "continue", "done")
    assert runs.begun_jobs("begun_early") == [first.job_id, second.job_id]
    assert status_row(runs, "begun_early")["state"] == "COMPLETED"


def test_a_link_whose_limit_was_cut_saves_before_that_ends(chains: Any) -> None:
    """Slurm's own signal, 300 seconds before the end, comes at once."""
    runs = chains.wait_for("cut_short")
    report = runs.report("cut_short")
    first, second = runs.attempts("cut_short")
    assert (first.exit_code, first.rule, second.verdict) == (75, "saved", "done"), report
    assert first.started is not None and first.ended is not None
    assert 30 <= first.ended - first.started <= 60, report
    assert "Slurm granted 60 seconds: the tasks save 15 seconds before the end" in runs.log("cut_short")
    assert "00:01:00 (1:00:00 asked for)" in runs.answers["cut_short"].stdout
    row = status_row(runs, "cut_short")
    assert (row["time_limit"], row["granted_limit"]) == ("1:00:00", "01:00:00"), report


def test_text_of_a_mark_is_no_code(chains: Any) -> None:
    runs = chains.wait_for("injected")
    assert not list(runs.work("injected").glob("PWNED*")), runs.report("injected")
    assert len(runs.begun_jobs("injected")) == 2, runs.report("injected")
    assert status_row(runs, "injected")["state"] == "COMPLETED"


def test_refused_save_ends_nothing(chains: Any) -> None:
    runs = chains.wait_for("suspended")
    refusal = runs.answers["suspended"]
    assert refusal.returncode == 1, refusal
    assert "SUSPENDED: no running task can save a checkpoint" in refusal.stdout + refusal.stderr
    queue = dict(line.split() for line in runs.answers["suspended_queue"].stdout.splitlines())
    assert queue.pop(runs.jobs["suspended"]) == "SUSPENDED"
    assert list(queue.values()) == ["PENDING"], runs.report("suspended")
    assert runs.answers["suspended_end"].stdout == "None"
    second_cancel = runs.answers["suspended_again"]
    assert second_cancel.returncode == 0, second_cancel
    assert len(runs.begun_jobs("suspended")) == 1, runs.report("suspended")
    (attempt,) = runs.attempts("suspended")
    assert (attempt.exit_code, attempt.signal) == (75, "USR1")
    assert runs.end("suspended") is not None


@pytest.mark.parametrize("run", ["cancelled_before_submission", "cancelled_before_answer"])
def test_chain_is_cancelled_while_its_next_link_is_submitted(chains: Any, run: str) -> None:
    runs = chains.wait_for(run)
    done = runs.answers[run]
    assert done.returncode == 0, done
    assert runs.begun_jobs(run) == [], runs.report(run)
    assert runs.end(run) is not None
    assert status_row(runs, run)["state"] == "CANCELLED"
