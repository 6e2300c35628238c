"""Dependencies of stages and of links in a real Slurm; no job begins here."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.drafting import Request, drafts
from launcher.jobs.launches import Launch
from launcher.launching import launch_stages
from launcher.runs.paths import submitted_name
from launcher.runs.provenance import user
from launcher.sandbox.lifecycle import Sandbox
from launcher.schedulers.base import JobRef, Submission
from launcher.schedulers.slurm import SlurmScheduler
from launcher.slurm.states import Action, State


class PendingLaunches:
    """Launches in a partition whose nodes never come."""

    def __init__(self, sandbox: Sandbox, directory: Path) -> None:
        self.conf = sandbox.environment()["SLURM_CONF"]
        self.scheduler = SlurmScheduler(self.conf)
        self.directory = directory
        self.tags: list[str] = []

    def launch(self, *more: str) -> list[Launch]:
        python = self.directory / "python"
        python.write_text("#!/bin/bash\necho missing:\n")
        python.chmod(0o755)
        cluster_options = ["cluster=sandbox", f"cluster.slurm_conf={self.conf}", "cluster.partition=cloud"]
        run_options = [
            f"cluster.python={python}",
            "cluster.gpu_request=none",
            f"base_results_dir={self.directory}/results",
        ]
        request = Request(
            [
                "training=gpt3/tiny",
                "training.model.data.data_impl=mock",
                *cluster_options,
                *run_options,
                *more,
            ],
            ["slipway", "launch"],
        )
        launches = launch_stages(drafts(request), request)
        self.tags += [launch.manifest.tag for launch in launches]
        return launches

    def jobs(self, launch: Launch, link: int | None = None) -> list[str]:
        manifest = launch.manifest
        submission = Submission(manifest.tag, launch.paths.script, manifest.user, manifest.created)
        links = self.scheduler.find([submission]).get(manifest.tag, {})
        return [job for number, jobs in sorted(links.items()) for job in jobs if link in (None, number)]

    def state(self, ref: JobRef) -> State:
        return self.scheduler.statuses([ref])[0].state

    def dependency(self, job_id: str) -> str:
        output = self.run("squeue", "--noheader", "--Format=Dependency:200", f"--jobs={job_id}")
        return output.strip().replace("(unfulfilled)", "")

    def run(self, *command: str) -> str:
        environment = {"PATH": "/usr/bin:/bin", "SLURM_CONF": self.conf}
        return subprocess.run(
            command, check=True, env=environment, timeout=60, capture_output=True, text=True
        ).stdout


@pytest.fixture
def pending(plain_sandbox: Sandbox, tmp_path: Path) -> Iterator[PendingLaunches]:
    launches = PendingLaunches(plain_sandbox, tmp_path)
    try:
        yield launches
    finally:
        submissions = [Submission(tag, tmp_path, user(), "2026-01-01T00:00:00Z") for tag in launches.tags]
        links_by_tag = launches.scheduler.find(submissions)
        jobs = [job for links in links_by_tag.values() for job_ids in links.values() for job in job_ids]
        if jobs:
            launches.run("scancel", *jobs)


@pytest.mark.slurm
def test_the_links_of_a_chain_are_distinguished(pending: PendingLaunches) -> None:
    (launch,) = pending.launch("resilience.links=3", "resilience.submit=launch")
    first = launch.manifest.job_id
    jobs = pending.jobs(launch)
    assert len(jobs) == 3
    assert [pending.jobs(launch, link) for link in (1, 2, 3, 4)] == [[jobs[0]], [jobs[1]], [jobs[2]], []]
    assert jobs[0] == first
    for before, job in pairwise(jobs):
        assert sorted(pending.dependency(job).split(",")) == [f"afterany:{before}", "singleton"]
    assert pending.scheduler.locate(jobs[2]) == submitted_name(launch.paths.script, launch.manifest.tag, 3)


@pytest.mark.slurm
def test_a_stage_whose_parent_failed_does_not_wait_forever(pending: PendingLaunches, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text\n")
    text = f"data_preparation.inputs=[{tmp_path}/text.txt]"
    chain = ["resilience.links=2", "resilience.submit=launch"]
    parent, child = pending.launch("stages=[data_preparation,training]", text, *chain)
    assert parent.manifest.job_id is not None
    jobs = pending.jobs(child)
    assert len(jobs) == 2
    assert f"afterok:{parent.manifest.job_id}" in pending.dependency(jobs[0])
    refs = [JobRef({1: job}, child.paths.directory, child.manifest.tags) for job in jobs]
    assert {pending.state(ref) for ref in refs} == {State.PENDING}
    assert pending.scheduler.act(Action.CANCEL, [parent.manifest.job_id]) == {}
    deadline = time.monotonic() + 120
    while State.PENDING in {pending.state(ref) for ref in refs}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert {pending.state(ref) for ref in refs} == {State.CANCELLED}
