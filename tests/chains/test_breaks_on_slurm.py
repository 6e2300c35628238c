"""Chains that were broken from outside, each in a way that once lost or doubled a job, or told it wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chains.break_scenarios import SOMEBODY
from tests.chains.chain_runs import PREFIX, ChainRuns

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


def row_of(runs: ChainRuns, run: str) -> dict[str, Any]:
    (row,) = runs.told_by("status", run)
    return dict(row)


def test_requeued_link_goes_on(chains: Any) -> None:
    """An administrator's requeue looks like a cancellation to the job that it ends."""
    runs = chains.ended("requeued")
    job = runs.jobs["requeued"]
    (waiting,) = json.loads(runs.said["requeued"].stdout)
    assert (waiting["state"], waiting["job_id"]) == ("PENDING", job), runs.told("requeued")
    assert runs.begun("requeued") == [job, job], runs.told("requeued")
    first, second = runs.attempts("requeued")
    assert (first.job_id, first.number, first.verdict) == (job, 0, "continue")
    assert (second.job_id, second.number, second.verdict) == (job, 1, "done")
    assert row_of(runs, "requeued")["state"] == "COMPLETED"


def test_cancelled_link_that_may_be_requeued_ends_the_chain(chains: Any) -> None:
    runs = chains.ended("cancelled_with_requeue")
    assert runs.begun("cancelled_with_requeue") == [runs.jobs["cancelled_with_requeue"]]
    assert runs.end("cancelled_with_requeue") is not None, runs.told("cancelled_with_requeue")
    assert row_of(runs, "cancelled_with_requeue")["state"] == "CANCELLED"


def test_chain_is_cancelled_while_its_link_waits_to_begin_again(chains: Any) -> None:
    runs = chains.ended("cancelled_while_requeued")
    done = runs.said["cancelled_while_requeued"]
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"cancelled job {runs.jobs['cancelled_while_requeued']} "), done
    assert len(runs.begun("cancelled_while_requeued")) == 1
    end = runs.end("cancelled_while_requeued")
    assert end and end.why.startswith("cancelled by"), runs.told("cancelled_while_requeued")
    assert row_of(runs, "cancelled_while_requeued")["state"] == "CANCELLED"


def test_link_that_leaves_at_once_is_no_success(chains: Any) -> None:
    runs = chains.ended("unbegun")
    job = runs.jobs["unbegun"]
    state = runs.slurm("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
    assert state.strip() == "FAILED", "what waits for its success does not go on"
    assert runs.begun("unbegun") == [] and runs.attempts("unbegun") == [], runs.told("unbegun")
    row = row_of(runs, "unbegun")
    assert (row["state"], row["reason"]) == ("CANCELLED", f"by {SOMEBODY}")
    assert runs.slipway("status", "unbegun", "--exit-code").returncode != 0
    (launch,) = runs.told_by("history", "unbegun")
    assert launch["state"] == "CANCELLED"


def test_jobs_of_a_deleted_launch_leave_the_next_one_alone(chains: Any) -> None:
    runs = chains.ended("deleted")
    told = runs.command("squeue", "--noheader", "--states=all", "--format=%i %o", f"--name={PREFIX}deleted")
    command = dict(line.split(maxsplit=1) for line in told.stdout.splitlines())
    (launch,) = runs.told_by("history", "deleted")
    own = {job for job, script in command.items() if launch["tag"] in script}
    others = set(command) - own
    assert len(others) >= 2, told
    # To cancel the link of old by its id would end the new launch.
    assert runs.said["deleted"].returncode == 2, f"{runs.said['deleted']}\n{runs.told('deleted')}"
    assert "of a launch that was removed" in runs.said["deleted"].stderr
    begun = runs.begun("deleted")
    assert begun == [begun[0], runs.jobs["deleted"]], runs.told("deleted")
    marks = runs.launch_directory("deleted") / "marks"
    texts = {path.name: path.read_text() for path in marks.iterdir()}
    assert {name for name, text in texts.items() for job in others if job in name or job in text} == set()
    assert {attempt["job_id"] for attempt in launch["lives"]} == {runs.jobs["deleted"]}
    row = row_of(runs, "deleted")
    assert (row["state"], row["job_id"]) == ("COMPLETED", runs.jobs["deleted"])


def test_missing_claims_hide_no_link(chains: Any) -> None:
    runs = chains.ended("full_disk")
    rows = json.loads(runs.said["full_disk_status"].stdout)
    job = runs.begun("full_disk")[2]
    seen = [(row["state"], row["job_id"], row["link"], row["max_links"]) for row in rows]
    assert seen == [("RUNNING", job, 3, 9)] * 3, runs.told("full_disk")
    done = runs.said["full_disk"]
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"cancelled job {job} of full_disk (launch 1, link 3/9)"), done
    assert runs.said["full_disk_left"].stdout == "", runs.told("full_disk")
    assert len(runs.begun("full_disk")) == 3
    assert runs.end("full_disk") is not None
    assert row_of(runs, "full_disk")["state"] == "CANCELLED"


def test_text_of_a_mark_is_no_code(chains: Any) -> None:
    runs = chains.ended("injected")
    assert not list(runs.work("injected").glob("PWNED*")), runs.told("injected")
    assert len(runs.begun("injected")) == 2, runs.told("injected")
    assert row_of(runs, "injected")["state"] == "COMPLETED"


def test_refused_save_ends_nothing(chains: Any) -> None:
    runs = chains.ended("suspended")
    refused = runs.said["suspended"]
    assert refused.returncode == 1, refused
    assert "SUSPENDED: nothing runs that could save" in refused.stdout + refused.stderr
    queue = dict(line.split() for line in runs.said["suspended_queue"].stdout.splitlines())
    assert queue.pop(runs.jobs["suspended"]) == "SUSPENDED"
    assert list(queue.values()) == ["PENDING"], runs.told("suspended")
    assert runs.said["suspended_end"].stdout == "None"
    again = runs.said["suspended_again"]
    assert again.returncode == 0, again
    assert len(runs.begun("suspended")) == 1, runs.told("suspended")
    (attempt,) = runs.attempts("suspended")
    assert (attempt.exit_code, attempt.signal) == (75, "USR1")
    assert runs.end("suspended") is not None


@pytest.mark.parametrize("run", ["cancelled_before_submission", "cancelled_before_answer"])
def test_chain_is_cancelled_while_its_next_link_is_submitted(chains: Any, run: str) -> None:
    runs = chains.ended(run)
    done = runs.said[run]
    assert done.returncode == 0, done
    assert runs.begun(run) == [], runs.told(run)
    assert runs.end(run) is not None
    assert row_of(runs, run)["state"] == "CANCELLED"
