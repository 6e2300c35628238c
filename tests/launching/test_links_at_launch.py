"""A chain that is submitted whole, for sites whose nodes have no sbatch; and the link number of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from launcher.drafting import Request, draft, drafts
from launcher.errors import UserError
from launcher.jobs.launches import Launch
from launcher.launching import launch, launch_stages
from launcher.launching.submission import Backoff, submit
from launcher.runs.manifest import read_manifest
from launcher.schedulers.base import FoundJobs, NoAnswer, Submission
from launcher.slurm.records import Record
from launcher.slurm.sbatch_options import combine_dependency
from launcher.slurm.states import Action
from slipway.common.node.marks import GIVEN_UP, claim, link_jobs
from tests.launching.fake_slurm import FakeSlurm, install, overrides, stages


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install(tmp_path, monkeypatch)


def launch_chain(tmp_path: Path, *more: str) -> Launch:
    request = Request(overrides(tmp_path, "resilience.links=4", *more), ["slipway", "launch"])
    return launch(draft(request), request)


def test_each_link_waits_for_the_one_before_it(tmp_path: Path, slurm: FakeSlurm) -> None:
    outcome = launch_chain(tmp_path, "resilience.submit=launch")
    tag = outcome.manifest.tag
    waits = "--dependency=afterany:{},singleton --kill-on-invalid-dep=yes"
    assert slurm.submitted() == [
        f"{tag}.1_submission.sh {tag}",
        f"{waits.format(101)} {tag}.2_submission.sh 2 {tag}",
        f"{waits.format(102)} {tag}.3_submission.sh 3 {tag}",
        f"{waits.format(103)} {tag}.4_submission.sh 4 {tag}",
    ]
    assert not outcome.warnings
    # Nobody else can know of the first job: it claims the launch itself, when it begins.
    claim(outcome.paths.directory, "101")
    assert link_jobs(outcome.paths.directory) == ["101", "102", "103", "104"]
    manifest = read_manifest(outcome.paths.directory)
    assert (manifest.job_id, manifest.links, manifest.from_job) == ("101", 4, False)


def test_by_default_a_link_submits_the_next_one_itself(tmp_path: Path, slurm: FakeSlurm) -> None:
    outcome = launch_chain(tmp_path)
    assert len(slurm.submitted()) == 1
    manifest = read_manifest(outcome.paths.directory)
    assert (manifest.links, manifest.from_job) == (4, True)


def test_a_refusal_cuts_the_chain_short_and_is_reported(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.refuse(" 3 2")  # link 3, and a tag, which begins with the year
    outcome = launch_chain(tmp_path, "resilience.submit=launch")
    (warning,) = outcome.warnings
    assert warning.startswith("the chain is 2 jobs long: link 3 of 4 was refused: Slurm refused the job: ")
    assert len(slurm.submitted()) == 3, "none that could not wait for the one before"
    assert read_manifest(outcome.paths.directory).job_id == "101"


def test_no_link_begins_where_the_first_cannot(tmp_path: Path, slurm: FakeSlurm) -> None:
    """Slurm cancels the first link if the stage before fails, and the second would begin after that end."""
    options = ["resilience.links=3", "resilience.submit=launch"]
    request = Request(stages(tmp_path, *options), ["slipway", "launch"])
    launch_stages(drafts(request), request)
    assert [line.split()[0] for line in slurm.submitted()[1:]] == [
        "--dependency=afterok:101,singleton",
        "--dependency=afterany:102,afterok:101,singleton",
        "--dependency=afterany:103,afterok:101,singleton",
    ]


def test_links_wait_for_the_stage_before_too() -> None:
    assert combine_dependency(None, "afterok:17") == "afterok:17"
    assert combine_dependency("singleton", "afterok:17") == "afterok:17,singleton"
    with pytest.raises(UserError, match=r"x.run.dependency='afterok:1\?afterok:2': alternatives"):
        combine_dependency("afterok:1?afterok:2", "afterok:17", "x.run.dependency")


@pytest.mark.parametrize(
    ("command", "tag", "link"),
    [
        # Since 23.02 the queue tells the script's path alone, the accounting all of sbatch's arguments.
        ("/a/submitted/tag.1_submission.sh", "tag", 1),
        ("/with 7/space 8/submitted/tag.12_submission.sh", "tag", 12),
        ("/a/submitted/tag.1_submission.sh tag", "tag", 1),
        ("/a/submitted/tag.2_submission.sh 2 tag", "tag", 2),
        ("sbatch --dependency=afterany:3 /a/submitted/tag.12_submission.sh 12 tag", "tag", 12),
        # A job with such a path among its arguments is not that launch's.
        ("/a/other.sh /a/submitted/tag.1_submission.sh other", "other", 1),
        ("/a/submitted/tag.1_submission.sh other", "other", 1),
        ("/a/submitted/tag.0_submission.sh", None, 1),
        # Jobs of launches from before scripts had such a name.
        ("/a/x_submission.sh tag", "tag", 1),
        ("/a/x_submission.sh 2 tag", "tag", 2),
        ("sbatch --dependency=afterany:3 /a/x_submission.sh 12 tag", "tag", 12),
        ("/with 7/space 8/x_submission.sh tag", "tag", 1),
        ("/with 7/space 8/x_submission.sh 3 tag", "tag", 3),
        ("x_submission.sh", None, 1),
        ("", None, 1),
    ],
)
def test_a_record_names_its_launch_and_link(command: str, tag: str | None, link: int) -> None:
    record = Record("17", "17", "RUNNING", None, None, None, None, 0, "me", command)
    assert (record.tag, record.link) == (tag, link)


class LossyScheduler:
    """A scheduler that takes submissions and loses its answers; it distinguishes the links."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, str | None]] = []
        self.cancelled: list[str] = []

    def submit(self, submission: Submission) -> str:
        self.submitted.append((submission.link, submission.after))
        raise NoAnswer("Slurm did not answer: Socket timed out")

    def find(self, submissions: Sequence[Submission]) -> FoundJobs:
        (submission,) = submissions
        jobs = [str(100 + i) for i, (link, _) in enumerate(self.submitted) if link == submission.link]
        return {submission.tag: {submission.link: jobs}} if jobs else {}

    def act(self, action: Action, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        assert action is Action.CANCEL
        self.cancelled += job_ids
        return {}


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.launching.submission.BACKOFF", Backoff(1.0, sleep=lambda _: None))


@pytest.mark.usefixtures("no_waiting")
def test_a_link_whose_answer_was_lost_is_found_among_the_others(tmp_path: Path) -> None:
    scheduler = LossyScheduler()
    script = tmp_path / "x_submission.sh"
    jobs = [
        submit(
            scheduler,  # type: ignore[arg-type]
            Submission("a-tag", script, "me", "2026-11-21T00:00:00Z", link, after),
        )
        for link, after in ((1, None), (2, "afterany:100"))
    ]
    assert jobs == ["100", "101"]
    assert scheduler.submitted == [(1, None), (2, "afterany:100")]
    assert scheduler.cancelled == []
    assert link_jobs(tmp_path) == ["100", "101"]


@pytest.mark.usefixtures("no_waiting")
def test_a_link_that_was_given_up_is_cancelled_and_leaves_the_others_alone(tmp_path: Path) -> None:
    claim(tmp_path, "99")
    claim(tmp_path, GIVEN_UP, 2)
    scheduler = LossyScheduler()
    submission = Submission("a-tag", tmp_path / "x_submission.sh", "me", "2026-11-21T00:00:00Z", 2)
    with pytest.raises(UserError, match="given this one up"):
        submit(scheduler, submission)  # type: ignore[arg-type]
    assert scheduler.cancelled == ["100"]
    assert link_jobs(tmp_path) == ["99"]
