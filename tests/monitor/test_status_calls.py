"""`slipway status` asks a real Slurm as often for forty jobs as for ten."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from monitor_samples import JOB_NAME, Runs

from launcher.runs.paths import submitted_name
from launcher.runs.write import link_or_copy
from launcher.sandbox.lifecycle import Sandbox

pytestmark = pytest.mark.slurm

SLIPWAY = Path(sys.executable).with_name("slipway")
COUNTED = ("squeue", "sacct", "scontrol", "sinfo")


@pytest.fixture
def jobs(runs: Runs, plain_sandbox: Sandbox) -> Iterator[list[str]]:
    """Forty jobs, each of its own run: every fourth is cancelled at once, the others wait forever."""
    environment = plain_sandbox.environment()
    submitted: list[str] = []
    try:
        for number in range(40):
            directory = runs.launch(f"r{number}", tag=f"calls-{number}", job_id=None)
            script = directory / f"{JOB_NAME}_submission.sh"
            script.write_text("#!/bin/bash\n#SBATCH --partition=cloud --output=/dev/null\n")
            script_link = submitted_name(script, f"calls-{number}")
            link_or_copy(script_link, script)
            command = ["sbatch", "--parsable", str(script_link), f"calls-{number}"]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            submitted.append(done.stdout.strip())
            fields = {"job_id": submitted[-1], "slurm_conf": environment["SLURM_CONF"]}
            manifest = json.loads((directory / "launcher.json").read_text())
            (directory / "launcher.json").write_text(json.dumps(manifest | fields))
        subprocess.run(["scancel", *submitted[::4]], env=environment, check=True)
        yield submitted
    finally:
        subprocess.run(["scancel", *submitted], env=environment, check=False, capture_output=True)


def test_the_number_of_questions_is_constant(
    runs: Runs, jobs: list[str], plain_sandbox: Sandbox, tmp_path: Path
) -> None:
    environment, log = plain_sandbox.environment(), tmp_path / "calls"
    wrappers = tmp_path / "bin"
    wrappers.mkdir()
    for name in COUNTED:
        real = shutil.which(name, path=environment["PATH"])
        (wrappers / name).write_text(f'#!/bin/bash\necho {name} >>{log}\nexec {real} "$@"\n')
        (wrappers / name).chmod(0o755)
    call_environment = {**os.environ, **environment, "PATH": f"{wrappers}:{environment['PATH']}"}

    def status(number: int) -> tuple[dict[str, str], list[str]]:
        log.write_text("")
        command = [SLIPWAY, "status", *(str(runs.base / f"r{index}") for index in range(number)), "--json"]
        done = subprocess.run(
            command, env=call_environment, check=True, capture_output=True, text=True, timeout=60
        )
        states = {item["job_id"]: item["state"] for item in json.loads(done.stdout)}
        return states, sorted(log.read_text().split())

    states_of_few, calls_for_few = status(10)
    states_of_many, calls_for_many = status(40)
    # The second squeue asks for the ends of jobs that left no mark.
    assert calls_for_few == calls_for_many == ["sacct", "squeue", "squeue"]
    assert (list(states_of_few), list(states_of_many)) == (jobs[:10], jobs)
    cancelled = set(jobs[::4])
    assert states_of_many == {job: "CANCELLED" if job in cancelled else "PENDING" for job in jobs}
