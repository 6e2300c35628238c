"""A launcher whose answer is lost, step by step, with prepared answers and no waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from launcher.errors import NOT_KNOWN, UserError
from launcher.launching import submission
from launcher.schedulers.base import FoundJobs, NoAnswer, Submission
from launcher.slurm.states import Action
from slipway.common.node.marks import GIVEN_UP, claim, job_of

LOST = NoAnswer("Slurm did not answer: Socket timed out")
BUSY = UserError("squeue failed: Socket timed out")


class Clock:
    """A clock that advances with each sleep, and a little with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


class Answers:
    """A scheduler that gives prepared answers; the last of each kind is repeated."""

    def __init__(
        self, submissions: Iterable[str | UserError], looks: Iterable[Sequence[str] | UserError]
    ) -> None:
        self.submissions, self.looks = list(submissions), list(looks)
        self.calls: list[str] = []

    def submit(self, submission: Submission) -> str:
        self.calls.append("submit")
        answer = self.submissions.pop(0) if len(self.submissions) > 1 else self.submissions[0]
        if isinstance(answer, UserError):
            raise answer
        return answer

    def find(self, submissions: Sequence[Submission]) -> FoundJobs:
        self.calls.append("find")
        answer = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(answer, UserError):
            raise answer
        return {submissions[0].tag: {1: answer}} if answer else {}

    def act(self, action: Action, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        assert action is Action.CANCEL
        self.calls += [f"cancel {job_id}" for job_id in job_ids]
        return {}


def submit_with(scheduler: Answers, directory: Path, seconds: float = 60.0) -> tuple[str, list[str]]:
    """Submit, with a clock of the test; return the job and the messages."""
    clock, messages = Clock(), list[str]()
    pending = Submission("a-tag", directory / "job_submission.sh", "me", "2026-11-21T00:00:00Z")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission, "BACKOFF", submission.Backoff(seconds, clock, clock.sleep))
        patch.setattr(submission._logger, "warning", lambda text, *values: messages.append(text % values))
        job = submission.submit(scheduler, pending)  # type: ignore[arg-type]
    assert clock.now < seconds + 1
    return job, messages


def test_answer_is_enough_without_further_questions(tmp_path: Path) -> None:
    scheduler = Answers(["17"], [BUSY])
    assert submit_with(scheduler, tmp_path) == ("17", [])
    assert scheduler.calls == ["submit"]


def test_a_refusal_is_not_tried_again(tmp_path: Path) -> None:
    scheduler = Answers([UserError("Slurm refused the job: invalid partition")], [BUSY])
    with pytest.raises(UserError, match="invalid partition"):
        submit_with(scheduler, tmp_path)
    assert scheduler.calls == ["submit"]


def test_a_job_that_is_found_is_not_submitted_again(tmp_path: Path) -> None:
    scheduler = Answers([LOST], [BUSY, BUSY, ["17"]])
    job, messages = submit_with(scheduler, tmp_path)
    assert job == "17"
    assert scheduler.calls == ["submit", "find", "find", "find"]
    assert messages[0] == "Slurm did not answer: Socket timed out; looking for the job by its tag ..."
    assert messages[1:] == [
        "squeue failed: Socket timed out; looking for the job by its tag ...",
        "still no answer; looking for the job by its tag ...",
    ]


def test_nothing_is_submitted_again_while_the_queue_is_unknown(tmp_path: Path) -> None:
    scheduler = Answers([LOST], [BUSY])
    with pytest.raises(NoAnswer) as raised:
        submit_with(scheduler, tmp_path)
    assert raised.value.exit_code == NOT_KNOWN
    assert scheduler.calls.count("submit") == 1
    assert 5 < scheduler.calls.count("find") < 15, "a minute, ever more patiently"
    assert job_of(tmp_path) is None, "should it be a job after all, it may run"


def test_missing_job_is_submitted_again_a_limited_number_of_times(tmp_path: Path) -> None:
    scheduler = Answers([LOST, LOST, "19"], [[], [], ["19"]])
    job, messages = submit_with(scheduler, tmp_path)
    assert job == "19"
    assert messages.count("there is no such job; submitting it again ...") == 2
    hopeless = Answers([LOST], [[]])
    with pytest.raises(NoAnswer, match="Socket timed out"):
        submit_with(hopeless, tmp_path)
    assert 5 < hopeless.calls.count("submit") < 15
    assert hopeless.calls[-1] == "find", "the last submission was looked for, too"


def test_oldest_of_two_jobs_is_kept_and_claims_the_launch(tmp_path: Path) -> None:
    scheduler = Answers([LOST, "19"], [[], ["17", "19"]])
    assert submit_with(scheduler, tmp_path)[0] == "17"
    assert scheduler.calls[-1] == "cancel 19"
    assert job_of(tmp_path) == "17"


def test_a_job_that_began_is_kept_though_it_is_younger(tmp_path: Path) -> None:
    claim(tmp_path, "19")
    scheduler = Answers([LOST, "19"], [[], ["17", "19"]])
    assert submit_with(scheduler, tmp_path)[0] == "19"
    assert scheduler.calls[-1] == "cancel 17"


def test_the_job_on_record_claims_the_launch_although_nobody_can_be_asked(tmp_path: Path) -> None:
    """Otherwise an older job, unknown to the launcher, could begin in its place."""
    assert submit_with(Answers([LOST, "19"], [[], BUSY]), tmp_path)[0] == "19"
    assert job_of(tmp_path) == "19"


@pytest.mark.parametrize("began", [True, False])
def test_refused_second_submission_keeps_a_job_that_began(tmp_path: Path, began: bool) -> None:
    """The first one may have taken the user's last place in the queue, and be invisible yet."""
    refusal = UserError("Slurm refused the job: job submit limit")
    if began:
        claim(tmp_path, "17")
        assert submit_with(Answers([LOST, refusal], [[], BUSY]), tmp_path)[0] == "17"
    else:
        with pytest.raises(UserError, match="submit limit"):
            submit_with(Answers([LOST, refusal], [[], []]), tmp_path)
        assert claim(tmp_path, "17") == GIVEN_UP, "no job of it may begin any more"


def test_job_is_found_when_the_second_submission_is_refused_because_of_it(tmp_path: Path) -> None:
    refusal = UserError("Slurm refused the job: job submit limit")
    assert submit_with(Answers([LOST, refusal], [[], ["17"]]), tmp_path)[0] == "17"


def test_launch_given_up_by_another_launcher_is_over(tmp_path: Path) -> None:
    claim(tmp_path, GIVEN_UP)
    scheduler = Answers([LOST], [["17"]])
    with pytest.raises(UserError, match="given this one up"):
        submit_with(scheduler, tmp_path)
    assert scheduler.calls[-1] == "cancel 17"


def test_a_claim_is_made_once_and_whole(tmp_path: Path) -> None:
    assert job_of(tmp_path) is None
    assert claim(tmp_path, "17") == "17"
    assert claim(tmp_path, "18") == "17"
    assert claim(tmp_path, GIVEN_UP) == "17"
    assert job_of(tmp_path) == "17"
    assert [path.name for path in (tmp_path / "marks").iterdir()] == ["job"]


def test_a_claim_that_cannot_be_made_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "marks").write_text("a file, where a directory should be")
    assert claim(tmp_path, "17") == "17"
    assert job_of(tmp_path) is None
