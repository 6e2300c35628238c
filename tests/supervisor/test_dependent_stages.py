"""The stages around a training: real marks on disk, and a fake Slurm queue."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipway.common.node import marks
from slipway.common.node.settings import ChainSettings, Settings
from slipway.supervisor.dependent_stages import NAME, DependentStages, Repeated, Stage, Stages, to_json
from slipway.supervisor.job import Job, Leave
from slipway.supervisor.link import Link
from slipway.supervisor.slurm import Answer, JobRecord, QueuedJob

CHAIN, AFTER = "0000aaaa", "0000bbbb"


class Queue:
    """A fake queue of Slurm, by the tags of launches; ``None`` gives no answer."""

    def __init__(self, job_id: str, **jobs: dict[int, QueuedJob] | None) -> None:
        self.job_id, self.jobs = job_id, jobs
        self.cancelled: list[str] = []
        self.dependencies: dict[str, str] = {}
        self.is_lost = False  # the answers about a submission

    def queued_jobs(self, tag: str) -> dict[int, QueuedJob] | None:
        jobs = self.jobs.get(f"of_{tag}", {})
        return None if jobs is None else dict(jobs)

    def update_dependency(self, job_id: str, dependency: str) -> bool:
        self.dependencies[job_id] = dependency
        return True

    def cancel(self, job_ids: Sequence[str]) -> bool:
        self.cancelled += job_ids
        return True

    def submit(self, script: str, arguments: Sequence[str], flags: Sequence[str]) -> Answer:
        return Answer(None, "", "timed out") if self.is_lost else Answer(0, "99", "")

    def find_submitted(self, link: int) -> str | None:
        return None

    def show_job(self, job_id: str) -> JobRecord:
        return JobRecord("RUNNING")

    def state_of(self, job_id: str) -> str:
        return "NODE_FAIL"

    def down_nodes(self, hosts: Sequence[str]) -> list[str]:
        return []


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipway.supervisor.link.time.sleep", lambda seconds: None)


def job_of(directory: Path, job_id: str, tag: str, link: int = 1, links: int = 1) -> Job:
    (directory / "marks").mkdir(parents=True, exist_ok=True)
    script = str(directory / "x_submission.sh")
    chain = ChainSettings(links=links)
    settings = Settings(
        "x", 1, tag, str(directory.parent), script, f"{directory}/log-x_", "slurm", "megatron", chain=chain
    )
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": job_id}
    return Job(job_id, f"{job_id}.0", job_id, link, False, str(directory), settings, 0, environment)


def write_stages(directory: Path, stages: Stages) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / NAME).write_text(to_json(stages))


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Write the stages of a chain, and of a stage that needs its success; return the chain's directory."""
    directory, after = tmp_path / "chain/launches/1", tmp_path / "after/launches/1"
    write_stages(directory, Stages(after=(Stage("after", str(after), AFTER),)))
    write_stages(after, Stages(before=Stage("chain", str(directory), CHAIN)))
    return directory


def stage_after(chain: Path) -> Path:
    return chain.parents[2] / "after/launches/1"


def leave_end(chain: Path, job_id: str, **fields: Any) -> None:
    (chain / "marks").mkdir(exist_ok=True)
    assert marks.leave(chain, f"{job_id}.0", marks.ENDED, CHAIN, {"ended": 5, **fields})


def waiting_job(job_id: str) -> dict[int, QueuedJob]:
    return {1: QueuedJob(job_id, "PENDING", "afterany:17")}


# --- the stage begins ---


def test_stage_runs_after_a_link_that_was_killed_before_its_verdict(chain: Path) -> None:
    leave_end(chain, "17", exit_code=0)
    DependentStages(job_of(stage_after(chain), "20", AFTER), Queue("20")).require_done()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{"exit_code": 75}, {"exit_code": 0, "verdict": "stop", "why": "it was cancelled"}]
)
def test_stage_leaves_after_a_link_that_is_not_done(chain: Path, fields: dict[str, Any]) -> None:
    leave_end(chain, "17", **fields)
    with pytest.raises(Leave, match="chain, which it waited for, is not done"):
        DependentStages(job_of(stage_after(chain), "20", AFTER), Queue("20")).require_done()  # type: ignore[arg-type]
    (attempt,) = marks.read_attempts(stage_after(chain))
    assert (attempt.verdict, attempt.exit_code) == ("stop", 1)


# --- the links of the chain ---


def test_next_link_completes_the_mark_of_one_killed_before_its_verdict(chain: Path) -> None:
    job = job_of(chain, "18", CHAIN, link=2, links=3)
    marks.claim(chain, "17")
    leave_end(chain, "17", exit_code=0, link=1)
    with pytest.raises(Leave, match="all is done"):
        Link(job, Queue("18")).begin()  # type: ignore[arg-type]
    (attempt,) = marks.read_attempts(chain)
    assert (attempt.verdict, attempt.exit_code, attempt.ended) == ("done", 0, 5)


def failed_link(chain: Path, queue: Queue) -> Queue:
    """End the first link of a chain after its tasks failed, while answers to submissions are lost."""
    job = job_of(chain, "17", CHAIN, links=3)
    queue.is_lost = True
    Link(job, queue).end(1, [], None)  # type: ignore[arg-type]
    return queue


def test_stage_is_cancelled_where_no_next_link_exists(chain: Path) -> None:
    queue = failed_link(chain, Queue("17", of_0000aaaa={}, of_0000bbbb=waiting_job("20")))
    assert queue.cancelled == ["20"]


@pytest.mark.parametrize("jobs", [None, {2: QueuedJob("18", "PENDING")}])
def test_stage_is_kept_where_the_next_link_may_exist(chain: Path, jobs: dict[int, QueuedJob] | None) -> None:
    queue = failed_link(chain, Queue("17", of_0000aaaa=jobs, of_0000bbbb=waiting_job("20")))
    assert queue.cancelled == []
    if jobs:
        assert queue.dependencies == {"20": "afterany:17:18"}


# --- the launcher submits the stage late ---


class Clock:
    """Time that passes while something sleeps or asks Slurm; the stage is submitted at a moment of it."""

    def __init__(self, queue: Queue, submitted: float, slowness: float = 0) -> None:
        self._queue, self._submitted, self._slowness = queue, submitted, slowness
        self.now = 0.0

    def time(self) -> float:
        return 1e9 + self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._slowness
        if self.now >= self._submitted:
            self._queue.jobs[f"of_{AFTER}"] = waiting_job("20")


NEVER = 1e6


@pytest.mark.parametrize(
    ("age", "submitted", "slowness", "waited"),
    [
        (0, 5, 0, (5, 8)),
        (0, NEVER, 0, (120, 128)),
        (0, NEVER, 30, (120, 160)),  # squeue takes its time
        (100, NEVER, 0, (20, 28)),
        (200, 5, 0, (0, 0)),
        (-9999, NEVER, 0, (120, 128)),  # the clocks of two machines differ
        (None, NEVER, 0, (0, 0)),  # the launch was deleted
    ],
)
def test_link_waits_for_a_stage_that_a_new_launch_may_still_submit(
    chain: Path,
    monkeypatch: pytest.MonkeyPatch,
    age: float | None,
    submitted: float,
    slowness: float,
    waited: tuple[float, float],
) -> None:
    queue = Queue("17", of_0000bbbb=None if slowness else {})
    clock = Clock(queue, submitted, slowness)
    monkeypatch.setattr("slipway.supervisor.dependent_stages.time", clock)
    dependents = DependentStages(job_of(chain, "17", CHAIN, links=9), queue)  # type: ignore[arg-type]
    if age is None:
        (chain / NAME).unlink()
    else:
        os.utime(chain / NAME, (clock.time() - age,) * 2)
    dependents.wait_until_submitted()
    assert waited[0] <= clock.now <= waited[1]


@pytest.mark.parametrize("claimant", ["20", marks.GIVEN_UP])
def test_link_waits_for_no_stage_that_is_submitted_or_given_up(
    chain: Path, monkeypatch: pytest.MonkeyPatch, claimant: str
) -> None:
    queue = Queue("17")
    clock = Clock(queue, NEVER)
    monkeypatch.setattr("slipway.supervisor.dependent_stages.time", clock)
    marks.claim(stage_after(chain), claimant)
    os.utime(chain / NAME, (clock.time(),) * 2)
    DependentStages(job_of(chain, "17", CHAIN, links=9), queue).wait_until_submitted()  # type: ignore[arg-type]
    assert clock.now == 0


@pytest.mark.parametrize(
    ("code", "from_job", "waited", "dependencies"),
    [
        (1, True, 7, {"20": "afterany:17:18"}),
        (0, True, 0, {}),  # the stage begins when this job is over, whenever it is submitted
        (1, False, 0, {}),  # the stage is submitted after all links, and waits for them
    ],
)
def test_link_that_fails_tells_a_stage_that_is_submitted_late(
    chain: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    from_job: bool,
    waited: float,
    dependencies: dict[str, str],
) -> None:
    queue = Queue("17")
    clock = Clock(queue, 5)
    monkeypatch.setattr("slipway.supervisor.dependent_stages.time", clock)
    job = job_of(chain, "17", CHAIN, links=9)
    settings = job.settings._replace(chain=ChainSettings(links=9, from_job=from_job))
    link = Link(job._replace(settings=settings), queue)  # type: ignore[arg-type]
    os.utime(chain / NAME, (clock.time(),) * 2)
    marks.claim(chain, "18", 2)
    link.end(code, [], None)
    assert (clock.now, queue.dependencies) == (waited, dependencies)


# --- stages that look at each n-th checkpoint ---


def write_repeated_stage(tmp_path: Path) -> Path:
    directory, after = tmp_path / "training/launches/1", tmp_path / "after/launches/1"
    (after / "marks").mkdir(parents=True)
    write_stages(directory, Stages(repeated=(Repeated("after", str(after), AFTER, str(after / "x.sh"), 1),)))
    return directory


def test_last_link_lets_the_stage_wait_for_a_job_whose_submission_was_interrupted(tmp_path: Path) -> None:
    training = write_repeated_stage(tmp_path)
    jobs = {1: QueuedJob("20", "PENDING", "afterok:17"), 2: QueuedJob("21", "PENDING", "after:17")}
    queue = Queue("17", of_0000bbbb=jobs)
    Link(job_of(training, "17", CHAIN), queue).end(0, [], None)  # type: ignore[arg-type]
    assert queue.dependencies == {"20": "afterok:17,afterany:21"}


def test_last_link_changes_nothing_where_the_stage_waits_for_its_jobs(tmp_path: Path) -> None:
    training = write_repeated_stage(tmp_path)
    jobs = {
        1: QueuedJob("20", "PENDING", "afterok:17,afterany:21"),
        2: QueuedJob("21", "RUNNING", "after:17"),
    }
    queue = Queue("17", of_0000bbbb=jobs)
    Link(job_of(training, "17", CHAIN), queue).end(0, [], None)  # type: ignore[arg-type]
    assert queue.dependencies == {}


def test_checkpoints_are_read_only_where_they_are_counted(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(chain, "17", CHAIN, links=3)
    queue = Queue("17", of_0000bbbb=waiting_job("20"))
    marks.claim(chain, "18", 2)
    link = Link(job, queue)  # type: ignore[arg-type]

    def fail(directory: str | None, engine: str) -> None:
        raise OSError("a file system that hangs")

    monkeypatch.setattr("slipway.common.node.checkpoints.progress", fail)
    (hook,) = link.hooks()
    assert json.loads(json.dumps(hook.call(job))) == {AFTER: ["17", "18"]}
