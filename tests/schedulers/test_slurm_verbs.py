"""Actions on Slurm's jobs: answers of its commands that say too little, and effects on a real Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.runs.paths import submitted_name
from launcher.runs.provenance import new_tag, user
from launcher.sandbox.lifecycle import Sandbox
from launcher.schedulers.base import JobRef, JobStatus, Submission
from launcher.schedulers.job_status import ANOTHER_JOB
from launcher.schedulers.slurm import SlurmScheduler
from launcher.schedulers.slurm import act as act_on_jobs
from launcher.slurm.commands import Answer, Retry, SchedulerSilent
from launcher.slurm.records import Record
from launcher.slurm.states import Action, State


def record(word: str, reason: str | None = None, job_id: str = "7", raw_id: str = "7") -> Record:
    return Record(job_id, raw_id, word, reason, None, None, None, 0, "ada", "/x_submission.sh t")


ARRAY = [
    record("COMPLETED", None, "7_0", "8"),
    record("RUNNING", None, "7_1", "9"),
    record("PENDING", "JobHeldUser", "7_2", "10"),
    record("PENDING", "JobArrayTaskLimit", "7_[3-5%1]", "7"),
]


def act(
    action: Action, records: Sequence[Record], run: Callable[[Sequence[str]], Answer]
) -> UserError | None:
    """Act on job 7, of which the queue has the same records however often it is asked."""
    return act_on_jobs(action, ["7"], run, lambda job_ids: {"7": records}).get("7")


@pytest.mark.parametrize(
    ("action", "records", "command"),
    [
        (Action.CANCEL, [record("PENDING")], "scancel 7"),
        (Action.CANCEL, ARRAY, "scancel 7"),
        (Action.SAVE, [record("RUNNING")], "scancel --batch --signal=USR1 7"),
        (Action.SAVE, ARRAY, "scancel --batch --signal=USR1 9"),
        (Action.HOLD, [record("PENDING")], "scontrol uhold 7"),
        (Action.HOLD, ARRAY, "scontrol uhold 7_[3-5]"),
        (Action.HOLD, ARRAY[:3], "scontrol uhold 7_2"),
        (Action.RELEASE, [record("PENDING", "JobHeldUser")], "scontrol release 7"),
        (Action.RELEASE, [record("PENDING", "None,JobHeldAdmin")], "scontrol release 7"),
        (Action.RELEASE, [record("PENDING", "job requeued in held state")], "scontrol release 7"),
        (Action.RELEASE, [record("SPECIAL_EXIT")], "scontrol release 7"),
        (Action.RELEASE, ARRAY, "scontrol release 7_2"),
    ],
)
def test_each_action_runs_its_command(action: Action, records: Sequence[Record], command: str) -> None:
    commands: list[str] = []

    def run(command: Sequence[str]) -> Answer:
        commands.append(" ".join(command))
        return Answer(0, "", "")

    assert act(action, records, run) is None
    assert commands == [command]


@pytest.mark.parametrize(
    ("action", "records", "message"),
    [
        (Action.CANCEL, [], "Slurm's queue does not have job 7: it is over, or never was"),
        (Action.CANCEL, [record("COMPLETED")], "job 7 is over already: COMPLETED"),
        (Action.SAVE, [record("PENDING")], "job 7 is PENDING: no running task can save a checkpoint"),
        (Action.SAVE, [record("TIMEOUT")], "job 7 is over already: TIMEOUT"),
        (Action.HOLD, [record("RUNNING")], "job 7 has begun: only a job that waits can be held"),
        (Action.RELEASE, [record("PENDING", "Priority")], "job 7 is not held: it is PENDING"),
        (Action.RELEASE, [record("RUNNING")], "job 7 is not held: it is RUNNING"),
    ],
)
def test_actions_without_effect_are_refused(action: Action, records: Sequence[Record], message: str) -> None:
    def run(command: Sequence[str]) -> Answer:
        raise AssertionError(command)

    error = act(action, records, run)
    assert error and error.message == message


# As scancel and scontrol of Slurm 22.05 said it to another user.
@pytest.mark.parametrize(
    ("action", "reason", "message", "hint"),
    [
        (
            Action.CANCEL,
            None,
            "scancel: error: Kill job error on job id 7: Access/permission denied",
            "ada's",
        ),
        (
            Action.HOLD,
            None,
            "Invalid user id for job 7\nslurm_suspend error: Invalid user id",
            "the job is ada's: ada can, or an administrator",
        ),
        (
            Action.RELEASE,
            "JobHeldAdmin",
            "Access/permission denied for job 7",
            "an administrator held it",
        ),
    ],
)
def test_a_refusal_is_reported_in_slurms_words(
    action: Action, reason: str | None, message: str, hint: str
) -> None:
    error = act(action, [record("PENDING", reason)], lambda command: Answer(1, "", message))
    assert error and error.message.startswith(f"job 7 was not {action.value}: ")
    assert hint in str(error)


def test_save_that_no_job_got_is_refused() -> None:
    """A complaint that names no job concerns all jobs; without any message the job is over."""
    running = [record("RUNNING")]
    error = act(Action.SAVE, running, lambda command: Answer(1, "", "scancel: error: it broke"))
    assert error and error.message == "job 7 was not told to save: it broke"
    assert act(Action.SAVE, running, lambda command: Answer(1, "", "")) is None


def test_save_that_none_of_several_jobs_got_is_refused_for_each() -> None:
    records = {job_id: [record("RUNNING", None, job_id, job_id)] for job_id in ("7", "8")}
    broken = Answer(1, "", "scancel: error: it broke")
    errors = act_on_jobs(Action.SAVE, ["7", "8"], lambda command: broken, lambda job_ids: records)
    assert [error.message for error in errors.values()] == [
        "job 7 was not told to save: it broke",
        "job 8 was not told to save: it broke",
    ]


def test_hold_that_is_refused_is_no_success_where_the_job_is_held_already() -> None:
    records = [record("PENDING", "JobHeldUser")]
    error = act(Action.HOLD, records, lambda command: Answer(1, "", "Access/permission denied"))
    assert error and error.message == "job 7 was not held: Access/permission denied"


SCRIPT = """#!/bin/bash
#SBATCH --output="{directory}/log-%j.out"
#SBATCH --partition={partition}
{header}
trap 'exit 75' USR1
echo ready >"{directory}/ready"
sleep {seconds} & wait $!
"""


class RealSlurm:
    """A scheduler of a sandbox, and the jobs submitted to it."""

    def __init__(self, sandbox: Sandbox, directory: Path) -> None:
        self.environment = sandbox.environment()
        self.scheduler = SlurmScheduler(self.environment["SLURM_CONF"])
        self.directory = directory
        self.jobs: list[str] = []

    def submit(
        self, partition: str = "cloud", header: str = "", tag: str | None = None, seconds: float = 100
    ) -> JobRef:
        directory = self.directory / f"run {len(self.jobs)}" / "launches" / "1"
        directory.mkdir(parents=True)
        script = directory / "x_submission.sh"
        script.write_text(
            SCRIPT.format(directory=directory, partition=partition, header=header, seconds=seconds)
        )
        tag = tag or new_tag()
        job_id = self.scheduler.submit(Submission(tag, script, user(), datetime.now(UTC).isoformat()))
        self.jobs.append(job_id)
        return JobRef({1: job_id}, directory, [tag])

    def status(self, ref: JobRef) -> JobStatus:
        (status,) = self.scheduler.statuses([ref])
        return status

    def act(self, action: Action, job_id: str) -> None:
        """Act on a job; raise the error of that."""
        for error in self.scheduler.act(action, [job_id]).values():
            raise error

    def wait(self, ref: JobRef, *states: State) -> JobStatus:
        deadline = time.monotonic() + 60
        while (status := self.status(ref)).state not in states:
            assert time.monotonic() < deadline, status
            time.sleep(0.1)
        return status

    def run(self, *command: str, check: bool = True) -> None:
        environment = {"PATH": "/usr/bin:/bin", "SLURM_CONF": self.environment["SLURM_CONF"]}
        subprocess.run(command, check=check, env=environment, timeout=60)


@pytest.fixture
def slurm(plain_sandbox: Sandbox, tmp_path: Path) -> Iterator[RealSlurm]:
    slurm = RealSlurm(plain_sandbox, tmp_path)
    try:
        yield slurm
    finally:
        if slurm.jobs:
            slurm.run("scancel", *slurm.jobs)


@pytest.mark.slurm
def test_a_job_that_waits_is_held_released_and_cancelled(slurm: RealSlurm) -> None:
    scheduler, ref = slurm.scheduler, slurm.submit()
    job = ref.job_id
    assert scheduler.locate(job) == submitted_name(ref.launch_dir / "x_submission.sh", ref.submitted_tag)
    slurm.act(Action.HOLD, job)
    assert slurm.status(ref).reason == "JobHeldUser: held, `slipway release RUN` lets it go"
    with pytest.raises(UserError, match="no running task can save a checkpoint"):
        slurm.act(Action.SAVE, job)
    slurm.act(Action.RELEASE, job)
    assert "Held" not in (slurm.status(ref).reason or "")
    with pytest.raises(UserError, match="is not held: it is PENDING"):
        slurm.act(Action.RELEASE, job)
    slurm.act(Action.CANCEL, job)
    assert slurm.wait(ref, State.CANCELLED).exit_code is None
    for action in Action:
        with pytest.raises(UserError, match=f"job {job} is over already: CANCELLED"):
            slurm.act(action, job)
    # An id of which this Slurm knows nothing, and one that is another job's.
    assert scheduler.locate("3") is None
    with pytest.raises(UserError, match="Slurm's queue does not have job 3"):
        slurm.act(Action.CANCEL, "3")
    reused = slurm.status(replace(ref, tags=[new_tag()]))
    assert (reused.state, reused.reason) == (State.UNKNOWN, ANOTHER_JOB)


@pytest.mark.slurm
def test_a_job_that_runs_saves_and_leaves(slurm: RealSlurm) -> None:
    ref = slurm.submit("gpu")
    slurm.wait(ref, State.RUNNING)
    while not (ref.launch_dir / "ready").exists():
        time.sleep(0.05)
    with pytest.raises(UserError, match="has begun: only a job that waits can be held"):
        slurm.act(Action.HOLD, ref.job_id)
    slurm.run("scontrol", "requeue", ref.job_id)
    requeued = slurm.wait(ref, State.PENDING)
    assert requeued.restarts == 1
    (ref.launch_dir / "ready").unlink()
    time.sleep(1.1)  # slurmd takes no job that begins in the second in which it was killed
    # The end of the first attempt takes its time.
    for _ in range(100):
        slurm.run("scontrol", "update", f"jobid={ref.job_id}", "StartTime=now", check=False)
        if slurm.status(ref).state is State.RUNNING and (ref.launch_dir / "ready").exists():
            break
        time.sleep(0.2)
    slurm.act(Action.SAVE, ref.job_id)
    ended = slurm.wait(ref, State.INTERRUPTED)
    assert (ended.exit_code, ended.restarts) == (75, 1)


@pytest.mark.slurm
def test_an_array_is_held_saved_and_cancelled(slurm: RealSlurm) -> None:
    ref = slurm.submit("gpu", "#SBATCH --array=0-3%1")
    scheduler, job = slurm.scheduler, ref.job_id
    status = slurm.wait(ref, State.RUNNING)
    assert status.reason == "tasks: 1 RUNNING, 3 PENDING"
    slurm.act(Action.HOLD, job)
    assert "3 PENDING; 1-3: JobHeldUser: held" in (slurm.status(ref).reason or "")
    slurm.act(Action.RELEASE, job)
    while not (ref.launch_dir / "ready").exists():
        time.sleep(0.05)
    slurm.act(Action.SAVE, job)
    deadline = time.monotonic() + 30
    while slurm.status(ref).tasks["0"] is not State.INTERRUPTED:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    slurm.act(Action.CANCEL, job)
    ended = slurm.wait(ref, State.CANCELLED)
    assert list(ended.tasks) == ["0", "1", "2", "3"]
    assert scheduler.locate(job) == submitted_name(ref.launch_dir / "x_submission.sh", ref.submitted_tag)


@pytest.mark.slurm
def test_all_jobs_of_a_tag_are_found(slurm: RealSlurm) -> None:
    tag = new_tag()
    refs = [slurm.submit(tag=tag), slurm.submit(tag=tag), slurm.submit(header="#SBATCH --array=0-1%1")]
    now = datetime.now(UTC).isoformat()
    submissions = [
        Submission(name, Path("/x_submission.sh"), owner, now)
        for name, owner in (
            (tag, user()),
            (refs[2].submitted_tag, user()),
            (new_tag(), "nobody-of-that-name"),
        )
    ]
    first, second, array = (ref.job_id for ref in refs)
    assert slurm.scheduler.find(submissions) == {
        tag: {1: [first, second]},
        refs[2].submitted_tag: {1: [array]},
    }


@pytest.mark.slurm
def test_a_controller_that_does_not_answer_is_reported(slurm: RealSlurm) -> None:
    """The message says how often and how long it was asked; the job is there as before."""
    ref = slurm.submit()
    conf = Path(slurm.environment["SLURM_CONF"])
    pid_file = re.search("^SlurmctldPidFile=(.*)$", conf.read_text(), re.MULTILINE)
    assert pid_file
    controller = int(Path(pid_file[1]).read_text())
    short_retry = Retry(first_pause=0.1, last_start=1.0, answer_timeout=0.4)
    scheduler = SlurmScheduler(str(conf), short_retry)
    os.kill(controller, signal.SIGSTOP)
    try:
        with pytest.raises(
            SchedulerSilent, match=r"Slurm does not answer: no answer within 0 s \(squeue, asked \d times"
        ):
            scheduler.statuses([ref])
        error = scheduler.act(Action.CANCEL, [ref.job_id])[ref.job_id]
        assert isinstance(error, SchedulerSilent) and "Slurm does not answer" in error.message
    finally:
        os.kill(controller, signal.SIGCONT)
    assert slurm.status(ref).state is State.PENDING


@pytest.mark.slurm
def test_jobs_that_only_the_accounting_knows_are_found(accounting_sandbox: Sandbox, tmp_path: Path) -> None:
    """The queue has each job once; the accounting has all of its attempts, and the way to its script."""
    slurm = RealSlurm(accounting_sandbox, tmp_path)
    ref = slurm.submit("gpu", seconds=0)
    slurm.wait(ref, State.COMPLETED)
    questions = slurm.scheduler._questions
    deadline = time.monotonic() + 60
    while not [
        attempt
        for attempt in questions.accounting([ref.job_id])
        if attempt.state is State.COMPLETED and attempt.command
    ]:
        assert time.monotonic() < deadline, "the accounting is late"
        time.sleep(0.3)
    questions.queue = lambda job_ids: []  # type: ignore[method-assign]
    questions.queue_of = lambda users: []  # type: ignore[method-assign]
    assert slurm.status(ref) == JobStatus(
        State.COMPLETED, None, slurm.status(ref).nodes, slurm.status(ref).elapsed, 0
    )
    assert slurm.scheduler.locate(ref.job_id) == submitted_name(
        ref.launch_dir / "x_submission.sh", ref.submitted_tag
    )
    submission = Submission(
        ref.submitted_tag, Path("/x_submission.sh"), user(), datetime.now(UTC).isoformat()
    )
    assert slurm.scheduler.find([submission]) == {ref.submitted_tag: {1: [ref.job_id]}}
