"""A chain is cancelled as a whole; `hold` acts on the link that waits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from control_project import write_launch

from launcher.cli.app import main
from launcher.errors import UserError
from launcher.runs.manifest import read_manifest, write_manifest
from launcher.runs.provenance import user
from launcher.schedulers.base import FoundJobs, JobRef, JobStatus, NoAnswer, Submission
from launcher.schedulers.chain_status import status_of_chain
from launcher.slurm.states import Action, State
from slipway.common.node.marks import cancelled_by, chain_end, claim, link_jobs
from slipway.supervisor.dependent_stages import NAME as STAGES_FILE

Capsys = pytest.CaptureFixture[str]

RUNNING = JobStatus(State.RUNNING, nodes="n1", elapsed="00:10:00")
PENDING = JobStatus(State.PENDING, "Dependency: it waits for another job")
HELD = JobStatus(State.PENDING, "JobHeldUser: held")
TIMEOUT = JobStatus(State.TIMEOUT, nodes="n1", elapsed="00:30:00")
CANCELLED = JobStatus(State.CANCELLED, "by me")


@dataclass
class ChainScheduler:
    """A scheduler that knows jobs by their ids; `lost` are jobs without a claim."""

    jobs: dict[str, JobStatus] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    errors: dict[str, UserError] = field(default_factory=dict)
    acts: list[tuple[str, str]] = field(default_factory=list)
    ended_first: list[bool] = field(default_factory=list)

    def statuses(self, refs: Sequence[JobRef]) -> list[JobStatus]:
        return [status_of_chain(ref, [self.jobs[job] for job in ref.links.values()]) for ref in refs]

    def find(self, submissions: Sequence[Submission]) -> FoundJobs:
        """Return all jobs as the links, in their order."""
        (submission,) = submissions
        return {submission.tag: {link: [job] for link, job in enumerate([*self.jobs, *self.lost], 1)}}

    def act(self, action: Action, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        if action in (Action.CANCEL, Action.SAVE):
            self.ended_first += [chain_end(DIRECTORY) is not None for _ in job_ids]
        self.acts += [(action.name.lower(), job_id) for job_id in job_ids]
        errors = {job_id: self.errors[job_id] for job_id in job_ids if job_id in self.errors}
        status = {Action.CANCEL: CANCELLED, Action.HOLD: HELD}.get(action)
        if status is not None:
            self.jobs |= dict.fromkeys((job_id for job_id in job_ids if job_id not in errors), status)
        return errors


DIRECTORY = Path("results/a/launches/17")


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ChainScheduler:
    """The scheduler of the run `a`, a chain of at most five jobs, of which 18 runs and 19 waits."""
    fake = ChainScheduler({"17": TIMEOUT, "18": RUNNING, "19": PENDING})
    monkeypatch.setattr("launcher.schedulers.scheduler_for", lambda *_: fake)
    monkeypatch.chdir(tmp_path)
    write_launch("a", 17)
    write_manifest(DIRECTORY, replace(read_manifest(DIRECTORY), links=5))
    for link, job in enumerate(fake.jobs, 1):
        claim(DIRECTORY, job, link)
    marks = DIRECTORY / "marks"
    for job in ("17", "18"):
        (marks / f"{job}.0.started.json").write_text(json.dumps({"started": 1.0, "nodes": "n1"}))
    (marks / "17.0.ended.json").write_text(json.dumps({"exit_code": 143, "ended": 2.0}))
    return fake


def test_a_chain_is_ended_before_its_jobs_are(scheduler: ChainScheduler, capsys: Capsys) -> None:
    """The next link would otherwise begin when the current one has ended."""
    assert main(["cancel", "a"]) == 0
    assert scheduler.acts == [("cancel", "19"), ("cancel", "18")] and all(scheduler.ended_first)
    end = chain_end(DIRECTORY)
    assert end and (end.by, end.why) == (user(), f"cancelled by {user()}")
    assert [cancelled_by(DIRECTORY, job) for job in ("17", "18", "19")] == [None, user(), user()]
    output = capsys.readouterr().out
    assert output == "cancelled job 18 of a (launch 17, link 2/5): it was RUNNING on n1 for 00:10:00\n"
    assert main(["cancel", "a"]) == 0
    assert "it is over: CANCELLED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        '{"after": [{"run": "b", "directory": 5, "tag": "b-1"}]}',
        '{"after": [{"run": "b", "directory": "/b", "tag": "b-1", "needs_success": null}]}',
        '{"repeated": [{"run": "b", "directory": "/b", "tag": "b-1", "script": "/b.sh", "every": 0}]}',
        '{"before": [], "after": "b"}',
        '{"before": 5}',
        "[]",
        "no JSON",
    ],
)
def test_cancel_warns_of_damaged_stages(scheduler: ChainScheduler, capsys: Capsys, content: str) -> None:
    (DIRECTORY / STAGES_FILE).write_text(content)
    assert main(["cancel", "a"]) == 0
    assert scheduler.acts == [("cancel", "19"), ("cancel", "18")]
    warning = capsys.readouterr().err
    assert "launches/17/stages.json cannot be read" in warning
    assert "stages that wait for a are not cancelled" in warning


def test_a_link_without_a_record_is_cancelled_too(scheduler: ChainScheduler) -> None:
    scheduler.lost = ["20"]
    assert main(["cancel", "18"]) == 0, "the id of any link names the chain"
    assert scheduler.acts == [("cancel", "20"), ("cancel", "19"), ("cancel", "18")]


def test_save_lets_the_link_that_runs_save(scheduler: ChainScheduler, capsys: Capsys) -> None:
    assert main(["cancel", "--save", "a"]) == 0
    assert scheduler.acts == [("save", "18"), ("cancel", "19")]
    assert scheduler.ended_first == [False, True]
    assert capsys.readouterr().out.startswith("asked job 18 of a (launch 17, link 2/5) to save and exit")


def test_refused_save_ends_nothing(scheduler: ChainScheduler, capsys: Capsys) -> None:
    scheduler.errors["18"] = UserError("job 18 is SUSPENDED: no running task can save a checkpoint")
    assert main(["cancel", "--save", "a"]) == 1
    assert scheduler.acts == [("save", "18")] and chain_end(DIRECTORY) is None
    scheduler.errors["18"] = NoAnswer("Slurm did not answer")
    assert main(["cancel", "--save", "a"]) == 3
    assert scheduler.jobs["19"] is PENDING and chain_end(DIRECTORY) is None


def test_refused_cancellation_ends_nothing(scheduler: ChainScheduler) -> None:
    """Slurm refuses to cancel a colleague's run, in a directory that both may write."""
    scheduler.errors |= {job: UserError(f"job {job} was not cancelled: denied") for job in ("18", "19")}
    assert main(["cancel", "a"]) == 1
    assert scheduler.acts == [("cancel", "19"), ("cancel", "18")] and chain_end(DIRECTORY) is None
    del scheduler.errors["19"]
    assert main(["cancel", "a"]) == 1
    assert chain_end(DIRECTORY) is not None, "its next link is gone"


@pytest.mark.parametrize("state", [State.FAILED, State.COMPLETING])
def test_chain_that_looks_over_is_ended_too(
    scheduler: ChainScheduler, state: State, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link may live without a claim, and without a record in Slurm a moment ago."""
    scheduler.jobs |= {"18": JobStatus(state), "19": JobStatus(State.FAILED)}
    monkeypatch.setattr(scheduler, "find", lambda submissions: {})
    assert main(["cancel", "a"]) == 0
    # Nobody cancelled what was over; one that ends just now may still submit its next link.
    assert (chain_end(DIRECTORY) is None) == state.is_final and scheduler.acts == []
    phrase = "it is over" if state.is_final else "it is ending"
    assert f"{phrase}: " in capsys.readouterr().out
    scheduler.jobs["20"] = PENDING
    monkeypatch.setattr(scheduler, "find", lambda submissions: {submissions[0].tag: {1: ["17"], 4: ["20"]}})
    assert main(["cancel", "a"]) == 0
    assert scheduler.acts == [("cancel", "20")]
    output = capsys.readouterr().out
    assert output.startswith("cancelled job 20 of a") or f"{phrase} (cancelled of its chain: 20): " in output
    assert link_jobs(DIRECTORY) == ["17", "18", "19", "20"], "it is on record now, so that its end is told"


def test_a_waiting_link_that_is_not_cancelled_stops_no_cancellation(
    scheduler: ChainScheduler, capsys: Capsys
) -> None:
    scheduler.errors["19"] = UserError("job 19 is over already")
    assert main(["cancel", "a"]) == 0
    assert scheduler.acts[-1] == ("cancel", "18")
    scheduler.jobs["18"], scheduler.errors["19"] = RUNNING, NoAnswer("Slurm did not answer")
    scheduler.jobs["19"] = PENDING
    assert main(["cancel", "a"]) == 3, "whether it is gone is not known"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_refusal_counts_if_the_end_cannot_be_written(scheduler: ChainScheduler) -> None:
    (DIRECTORY / "marks").chmod(0o500)
    scheduler.errors["19"] = UserError("job 19 was not cancelled: Access/permission denied")
    assert main(["cancel", "a"]) == 1


def test_waiting_link_is_the_one_held(scheduler: ChainScheduler, capsys: Capsys) -> None:
    assert main(["hold", "a"]) == 0
    assert scheduler.acts == [("hold", "19")]
    assert capsys.readouterr().out.startswith(
        "held job 19, the next link of job 18 of a (launch 17, link 2/5)"
    )
    assert main(["hold", "a"]) == 0
    assert "it is held already" in capsys.readouterr().out and len(scheduler.acts) == 1
    assert main(["release", "a"]) == 0
    assert scheduler.acts[-1] == ("release", "19")
    scheduler.jobs["19"], scheduler.jobs["18"] = HELD, TIMEOUT
    assert main(["release", "a"]) == 0
    assert scheduler.acts[-1] == ("release", "19")


def test_the_last_link_cannot_be_held(scheduler: ChainScheduler, capsys: Capsys) -> None:
    (DIRECTORY / "marks" / "job.3").unlink()
    assert main(["hold", "a"]) == 2
    assert "cancel --save" in capsys.readouterr().err


def test_attach_takes_the_running_link(scheduler: ChainScheduler, capsys: Capsys) -> None:
    assert main(["attach", "a", "--outside", "--print"]) == 0
    output = capsys.readouterr().out
    assert "--jobid=18 " in output and "--nodelist=n1 " in output


def test_lost_link_is_found_and_reported(scheduler: ChainScheduler, capsys: Capsys) -> None:
    """The answer to its submission was lost within the job, which died before it could look for it."""
    (DIRECTORY / "marks" / "job.3").unlink()
    scheduler.jobs["18"] = JobStatus(State.NODE_FAIL)
    del scheduler.jobs["19"]
    assert main(["status", "a", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["link"]) == ("NODE_FAIL", 2)
    assert row["reason"] == "link 2 of 5, and the next one is not known"
    scheduler.jobs["19"] = PENDING
    assert main(["status", "a", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["link"], row["job_id"]) == ("PENDING", 3, "19")
    assert row["reason"].endswith("; link 2 was NODE_FAIL")
    scheduler.jobs |= {"19": JobStatus(State.FAILED), "20": RUNNING}
    assert main(["status", "a", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["link"], row["job_id"]) == ("RUNNING", 4, "20"), "of two the claims are missing"


def test_numbers_beyond_a_chain_are_no_links(scheduler: ChainScheduler, capsys: Capsys) -> None:
    claim(DIRECTORY, "30", 6)
    (DIRECTORY / "marks" / "31.0.started.json").write_text(json.dumps({"started": 1.0, "link": 10**12}))
    assert main(["status", "a", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert [link["job_id"] for link in row["links"]] == ["17", "18", "19"]
