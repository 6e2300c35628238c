"""Chains that were broken from outside, each in a way that once lost or doubled a job, or told it wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chains.break_scenarios import SOMEBODY
from tests.chains.chain_yard import PREFIX, Yard

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


def row_of(yard: Yard, run: str) -> dict[str, Any]:
    (row,) = yard.told_by("status", run)
    return dict(row)


def test_requeued_link_goes_on(chains: Any) -> None:
    """An administrator's requeue looks like a cancellation to the job that it ends."""
    yard = chains.ended("requeued")
    job = yard.jobs["requeued"]
    (waiting,) = json.loads(yard.said["requeued"].stdout)
    assert (waiting["state"], waiting["job_id"]) == ("PENDING", job), yard.told("requeued")
    assert yard.begun("requeued") == [job, job], yard.told("requeued")
    first, second = yard.lives("requeued")
    assert (first.job_id, first.number, first.verdict) == (job, 0, "continue")
    assert (second.job_id, second.number, second.verdict) == (job, 1, "done")
    assert row_of(yard, "requeued")["state"] == "COMPLETED"


def test_cancelled_link_that_may_be_requeued_ends_the_chain(chains: Any) -> None:
    yard = chains.ended("cancelled_with_requeue")
    assert yard.begun("cancelled_with_requeue") == [yard.jobs["cancelled_with_requeue"]]
    assert yard.end("cancelled_with_requeue") is not None, yard.told("cancelled_with_requeue")
    assert row_of(yard, "cancelled_with_requeue")["state"] == "CANCELLED"


def test_chain_is_cancelled_while_its_link_waits_to_begin_again(chains: Any) -> None:
    yard = chains.ended("cancelled_while_requeued")
    done = yard.said["cancelled_while_requeued"]
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"cancelled job {yard.jobs['cancelled_while_requeued']} "), done
    assert len(yard.begun("cancelled_while_requeued")) == 1
    end = yard.end("cancelled_while_requeued")
    assert end and end.why.startswith("cancelled by"), yard.told("cancelled_while_requeued")
    assert row_of(yard, "cancelled_while_requeued")["state"] == "CANCELLED"


def test_link_that_leaves_at_once_is_no_success(chains: Any) -> None:
    yard = chains.ended("unbegun")
    job = yard.jobs["unbegun"]
    state = yard.slurm("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
    assert state.strip() == "FAILED", "what waits for its success does not go on"
    assert yard.begun("unbegun") == [] and yard.lives("unbegun") == [], yard.told("unbegun")
    row = row_of(yard, "unbegun")
    assert (row["state"], row["reason"]) == ("CANCELLED", f"by {SOMEBODY}")
    assert yard.slipway("status", "unbegun", "--exit-code").returncode != 0
    (launch,) = yard.told_by("history", "unbegun")
    assert launch["state"] == "CANCELLED"


def test_jobs_of_a_deleted_launch_leave_the_next_one_alone(chains: Any) -> None:
    yard = chains.ended("deleted")
    told = yard.command("squeue", "--noheader", "--states=all", "--format=%i %o", f"--name={PREFIX}deleted")
    command = dict(line.split(maxsplit=1) for line in told.stdout.splitlines())
    (launch,) = yard.told_by("history", "deleted")
    own = {job for job, script in command.items() if launch["tag"] in script}
    others = set(command) - own
    assert len(others) >= 2, told
    # To cancel the link of old by its id would end the new launch.
    assert yard.said["deleted"].returncode == 2, f"{yard.said['deleted']}\n{yard.told('deleted')}"
    assert "of a launch that was removed" in yard.said["deleted"].stderr
    begun = yard.begun("deleted")
    assert begun == [begun[0], yard.jobs["deleted"]], yard.told("deleted")
    marks = yard.launch_directory("deleted") / "marks"
    texts = {path.name: path.read_text() for path in marks.iterdir()}
    assert {name for name, text in texts.items() for job in others if job in name or job in text} == set()
    assert {life["job_id"] for life in launch["lives"]} == {yard.jobs["deleted"]}
    row = row_of(yard, "deleted")
    assert (row["state"], row["job_id"]) == ("COMPLETED", yard.jobs["deleted"])


def test_missing_claims_hide_no_link(chains: Any) -> None:
    yard = chains.ended("full_disk")
    rows = json.loads(yard.said["full_disk_status"].stdout)
    runs = yard.begun("full_disk")[2]
    seen = [(row["state"], row["job_id"], row["link"], row["max_links"]) for row in rows]
    assert seen == [("RUNNING", runs, 3, 9)] * 3, yard.told("full_disk")
    done = yard.said["full_disk"]
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"cancelled job {runs} of full_disk (launch 1, link 3/9)"), done
    assert yard.said["full_disk_left"].stdout == "", yard.told("full_disk")
    assert len(yard.begun("full_disk")) == 3
    assert yard.end("full_disk") is not None
    assert row_of(yard, "full_disk")["state"] == "CANCELLED"


def test_text_of_a_mark_is_no_code(chains: Any) -> None:
    yard = chains.ended("injected")
    assert not list(yard.work("injected").glob("PWNED*")), yard.told("injected")
    assert len(yard.begun("injected")) == 2, yard.told("injected")
    assert row_of(yard, "injected")["state"] == "COMPLETED"


def test_refused_save_ends_nothing(chains: Any) -> None:
    yard = chains.ended("suspended")
    refused = yard.said["suspended"]
    assert refused.returncode == 1, refused
    assert "SUSPENDED: nothing runs that could save" in refused.stdout + refused.stderr
    queue = dict(line.split() for line in yard.said["suspended_queue"].stdout.splitlines())
    assert queue.pop(yard.jobs["suspended"]) == "SUSPENDED"
    assert list(queue.values()) == ["PENDING"], yard.told("suspended")
    assert yard.said["suspended_end"].stdout == "None"
    again = yard.said["suspended_again"]
    assert again.returncode == 0, again
    assert len(yard.begun("suspended")) == 1, yard.told("suspended")
    (life,) = yard.lives("suspended")
    assert (life.exit_code, life.signal) == (75, "USR1")
    assert yard.end("suspended") is not None


@pytest.mark.parametrize("run", ["cancelled_before_submission", "cancelled_before_answer"])
def test_chain_is_cancelled_while_its_next_link_is_submitted(chains: Any, run: str) -> None:
    yard = chains.ended(run)
    done = yard.said[run]
    assert done.returncode == 0, done
    assert yard.begun(run) == [], yard.told(run)
    assert yard.end(run) is not None
    assert row_of(yard, run)["state"] == "CANCELLED"
