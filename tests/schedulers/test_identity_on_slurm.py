"""The launch of each job: forty jobs of ten launches and two users, lost answers, and reused ids."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.runs.provenance import new_tag, user
from launcher.sandbox import Reporter, daemons, state
from launcher.sandbox.daemons import DaemonStarter
from launcher.sandbox.lifecycle import Sandbox
from launcher.schedulers.base import JobRef, Submission
from launcher.schedulers.job_status import ANOTHER_JOB
from launcher.schedulers.slurm import SlurmScheduler
from launcher.slurm.states import State
from tests.sandbox.fixtures import booted

pytestmark = pytest.mark.slurm

LINKS = 4
# Root, who boots a sandbox, and a user that every machine has; `nobody` is refused since Slurm 26.05.
USERS = (user(), "daemon")
SCRIPT = """#!/bin/bash
#SBATCH --partition={partition}
#SBATCH --output=/dev/null
#SBATCH --uid={user}
exit 0
"""


@dataclass
class ChainOfJobs:
    """The launcher's record of a launch whose links were all submitted."""

    script: Path
    user: str
    begins: bool
    tag: str = field(default_factory=new_tag)
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    jobs: list[str] = field(default_factory=list)

    @property
    def ref(self) -> JobRef:
        links = dict(enumerate(self.jobs, 1))
        return JobRef(links, self.script.parent, [self.tag], max_links=LINKS)

    def links(self, most: int = LINKS) -> dict[int, list[str]]:
        return {link: [job] for link, job in enumerate(self.jobs[:most], 1)}

    @property
    def submission(self) -> Submission:
        return Submission(self.tag, self.script, self.user, self.since)


class Cluster:
    """A Slurm of its own, whose controller can lose all that it knows."""

    def __init__(self, sandbox: Sandbox, directory: Path) -> None:
        self.sandbox = sandbox
        self.directory = directory
        self.scheduler = SlurmScheduler(sandbox.environment()["SLURM_CONF"])

    @property
    def accounting(self) -> bool:
        return self.sandbox.options.accounting

    def launch(self, name: str, user: str, begins: bool) -> ChainOfJobs:
        """Submit the links of a launch, whose jobs run at once or wait in a partition that is down."""
        script = self.directory / name / "launches" / "1" / "x_submission.sh"
        script.parent.mkdir(parents=True)
        script.write_text(SCRIPT.format(partition="gpu" if begins else "cloud", user=user))
        chain = ChainOfJobs(script, user, begins)
        for link in range(1, LINKS + 1):
            after = f"afterany:{chain.jobs[-1]}" if chain.jobs else None
            chain.jobs.append(self.scheduler.submit(replace(chain.submission, link=link, after=after)))
        return chain

    def launch_ten(self, prefix: str, beginning: int) -> list[ChainOfJobs]:
        """Launch for both users in turn; the jobs of the first `beginning` launches run."""
        return [self.launch(f"{prefix}-{n}", USERS[n % 2], n < beginning) for n in range(10)]

    def states(self, chains: list[ChainOfJobs]) -> dict[str, dict[str, tuple[State, str | None]]]:
        """Return state and reason of each job, by the tag of its launch, with one call for all."""
        statuses = self.scheduler.statuses([chain.ref for chain in chains])
        jobs_of = {}
        for chain, status in zip(chains, statuses, strict=True):
            assert status.chain is not None
            jobs_of[chain.tag] = {
                job: (job_status.state, job_status.reason) for job, job_status in status.chain.jobs.items()
            }
        return jobs_of

    def lose_state(self) -> None:
        """Kill the controller, remove what it saved, and start it again: it counts jobs from the first id."""
        record = state.load(self.sandbox.directory)
        assert record is not None
        controller = record.daemons["slurmctld"]
        os.kill(controller.pid, signal.SIGKILL)
        wait_until(lambda: not controller.is_alive)
        shutil.rmtree(record.paths.controller_state)
        record.paths.controller_state.mkdir()
        daemons._start_controller(DaemonStarter(record, Reporter()))


def wait_until(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(params=[False, True], ids=["plain", "accounting"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with booted(accounting=request.param) as sandbox:
        sandbox.directory.parent.chmod(0o755)  # Slurm runs a copy of the script, as its user
        yield Cluster(sandbox, tmp_path)


def test_each_job_is_known_or_reported_as_unknown(cluster: Cluster) -> None:
    scheduler, chains = cluster.scheduler, cluster.launch_ten("first", beginning=2)
    jobs = [job for chain in chains for job in chain.jobs]
    assert len(set(jobs)) == 40

    # Lost answers: the links of all launches are looked for by one question.
    submissions = [chain.submission for chain in chains]
    jobs_by_tag = {chain.tag: chain.links() for chain in chains}
    assert scheduler.find([*submissions, replace(submissions[0], tag=new_tag())]) == jobs_by_tag
    assert scheduler.find([replace(submissions[0], tag=new_tag())]) == {}

    def as_expected() -> bool:
        states = cluster.states(chains)
        return all(
            job_state is (State.COMPLETED if chain.begins else State.PENDING)
            for chain in chains
            for job_state, _ in states[chain.tag].values()
        )

    wait_until(as_expected)
    # A reference of another launch with these ids learns nothing of the jobs.
    strangers = [replace(chain, tag=new_tag()) for chain in chains]
    states = cluster.states(strangers)
    assert {
        job_state_and_reason for job_states in states.values() for job_state_and_reason in job_states.values()
    } == {(State.UNKNOWN, ANOTHER_JOB)}

    if cluster.accounting:  # it learns of jobs late
        questions = scheduler._questions
        wait_until(
            lambda: {record.parent_id for record in questions.accounting(jobs) if record.command} == {*jobs}
        )
        ended = [job for chain in chains if chain.begins for job in chain.jobs]
        wait_until(lambda: {record.state for record in questions.accounting(ended)} == {State.COMPLETED})
    cluster.lose_state()
    second_chains = cluster.launch_ten("second", beginning=0)
    assert {job for chain in second_chains for job in chain.jobs} == {*jobs}, "the ids are used again"
    states = cluster.states([*chains, *second_chains])
    for chain in second_chains:
        assert {job_state for job_state, _ in states[chain.tag].values()} == {State.PENDING}
    for chain in chains:
        expected = [(State.UNKNOWN, ANOTHER_JOB)]
        if cluster.accounting and chain.begins:
            expected = [(State.COMPLETED, None)]
        elif cluster.accounting:
            # A controller that begins anew lets the database close what it has open.
            expected = [(State.CANCELLED, None), (State.UNKNOWN, "accounted PENDING, but not in the queue")]
        assert {*states[chain.tag].values()} <= {*expected}
    # Asked for a span of time, sacct leaves out jobs whose turn never came: those after a first that waits.
    old = {c.tag: c.links(LINKS if c.begins else 1) for c in chains} if cluster.accounting else {}
    new = {chain.tag: chain.links() for chain in second_chains}
    assert scheduler.find([chain.submission for chain in (*chains, *second_chains)]) == old | new
