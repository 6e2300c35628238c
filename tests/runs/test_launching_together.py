"""Twenty launches of one run name at once: twenty launch directories, none mixed, none lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.runs.manifest import read_manifest
from launcher.sandbox.lifecycle import Sandbox

COUNT = 20
STAGE = ["training=gpt3/tiny", "cluster=sandbox", "training.model.data.data_impl=mock"]


def run(*command: object, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slurm
def test_twenty_simultaneous_launches_of_one_run_are_kept_apart(
    tmp_path: Path, repository: Path, sandbox: Sandbox
) -> None:
    env = {**os.environ, "SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    # A partition that is down: the jobs stay in the queue, to be looked at.
    chosen = [*STAGE, "cluster.partition=cloud", "cluster.job_name_prefix=together-"]
    program = [sys.executable, "-m", "tests.runs.launch_together", COUNT]
    run(*program, *chosen, cwd=tmp_path, env={**env, "PYTHONPATH": str(repository)})
    queue = ["squeue", "--noheader", "--name=together-gpt3_tiny", "--Format=JobID:|,Command:|,STDOUT:|"]
    jobs = [line.strip().split("|") for line in run(*queue, cwd=tmp_path, env=env).splitlines()]
    try:
        run_dir = tmp_path / "results" / "gpt3_tiny"
        launches = {int(path.name): path for path in (run_dir / "launches").iterdir()}
        assert sorted(launches) == list(range(1, COUNT + 1)), "a directory for each, and nothing else"
        manifests = {number: read_manifest(path) for number, path in launches.items()}
        assert {manifest.launch for manifest in manifests.values()} == set(launches)
        assert len({manifest.tag for manifest in manifests.values()}) == COUNT
        assert {manifest.command[-1] for manifest in manifests.values()} == {
            f"launcher={number}" for number in range(COUNT)
        }
        in_queue = {job.strip(): (command, log) for job, command, log, *_ in jobs}
        assert {manifest.job_id for manifest in manifests.values()} == set(in_queue)
        for number, directory in launches.items():
            manifest = manifests[number]
            assert manifest.job_id is not None
            command, log = in_queue[manifest.job_id]
            # Before Slurm 23.02 followed by the script's arguments.
            assert command.partition(" ")[0] == f"{directory}/submitted/{manifest.tag}.1_submission.sh"
            assert log.startswith(f"{directory}/")
            assert (directory / "launcher.log").read_text() == f"Submitted batch job {manifest.job_id}\n"
            for path in [*directory.glob("*.sh"), *directory.glob("*.yaml")]:
                assert set(re.findall(r"/launches/(\d+)", path.read_text())) <= {str(number)}, path
        assert (run_dir / "newest").resolve() == launches[COUNT]
        links = [path for path in run_dir.iterdir() if path.is_symlink() and "log-" not in path.name]
        assert {path.resolve().parent for path in links if path.name != "newest"} == {launches[COUNT]}
    finally:
        run("scancel", *(job for job, *_ in jobs), cwd=tmp_path, env=env)
