"""A cluster whose sbatch fails, for tests of how a launcher copes with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.runs.manifest import Manifest, read_manifest
from launcher.sandbox.lifecycle import Sandbox
from tests.forked_slipway import run_forked
from tests.runs.faulty_sbatch import accepted_jobs, install, plan

SLIPWAY = Path(sys.executable).with_name("slipway")

# The job records that it ran. A launcher asks an interpreter with `-c` which modules it can import.
PAYLOAD = """#!/bin/bash
[[ $1 == -c ]] || echo "$SLURM_JOB_ID" >>{ran}/$SLURM_JOB_NAME
"""


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster whose sbatch fails, and the environment of the user who launches there."""

    directory: Path
    environment: dict[str, str]

    def arguments(self, run: str, *overrides: str) -> list[str]:
        stage = ["stages=[data_preparation]", "data_preparation.inputs=[/etc/hostname]", "cluster=sandbox"]
        names = [f"data_preparation.run.name={run}", "cluster.job_name_prefix=faulty-"]
        return ["launch", *stage, f"cluster.python={self.directory}/payload", *names, *overrides]

    def faults(self, run: str) -> Path:
        return self.directory / "faults" / run

    def manifest(self, run: str, launch: int = 1) -> Manifest:
        return read_manifest(self.directory / "results" / run / "launches" / str(launch))

    def launch(self, run: str, *overrides: str, faults: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Start `slipway launch`."""
        environment = self.environment | {"FAULTS": str(plan(self.faults(run), faults))}
        return subprocess.Popen(
            # A background process of a shell, as these tests may be, ignores Ctrl-C, and with nohup SIGHUP.
            ["env", "--default-signal=INT,HUP", SLIPWAY, *self.arguments(run, *overrides)],
            cwd=self.directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def launch_all(
        self, runs: dict[str, Sequence[str]], seconds: float = 60.0, *overrides: str
    ) -> dict[str, tuple[int, str]]:
        """Launch runs at once, each with its faults; return the exit code and the output of each."""
        outputs = {run: self.directory / f"{run}.txt" for run in runs}
        jobs = [
            {
                "arguments": self.arguments(run, *overrides),
                "environment": {"FAULTS": str(plan(self.faults(run), faults))},
                "output": str(outputs[run]),
            }
            for run, faults in runs.items()
        ]
        repository = str(Path(__file__).resolve().parents[2])
        done = subprocess.run(
            [sys.executable, "-m", "tests.runs.forked_launchers", str(seconds)],
            input=json.dumps(jobs),
            cwd=self.directory,
            env={**self.environment, "PYTHONPATH": repository},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        codes = [int(line) for line in done.stdout.split()]
        return {run: (code, outputs[run].read_text()) for run, code in zip(runs, codes, strict=True)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start another verb."""
        return subprocess.Popen(
            [SLIPWAY, *arguments],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def code(self, *arguments: str) -> int:
        """Return the exit code of another verb."""
        return outcomes(self.start(*arguments))[0]

    def status(self) -> dict[str, dict[str, Any]]:
        done = run_forked(["status", "--json"], cwd=self.directory, env=self.environment, timeout=120)
        return {row["run"]: row for row in json.loads(done.stdout)}

    def queue(self) -> dict[str, tuple[str, str]]:
        """Return name and state of each job by its id, from Slurm itself."""
        command = ["squeue", "--noheader", "--states=all", "--Format=JobID:|,Name:|,State:|"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        rows = [[part.strip() for part in line.split("|")] for line in done.stdout.splitlines()]
        return {
            job: (name.removeprefix("faulty-"), state) for job, name, state, *_ in rows if "faulty-" in name
        }

    def payload_jobs(self, run: str) -> list[str]:
        """Return the ids of the jobs whose payload ran, once for each time."""
        path = self.directory / "ran" / f"faulty-{run}"
        return path.read_text().split() if path.exists() else []


@contextmanager
def faulty_site(tmp_path: Path, sandbox: Sandbox) -> Iterator[Site]:
    """Install the wrapper and the payload; cancel the jobs that are left in the queue."""
    install(tmp_path / "bin")
    (tmp_path / "ran").mkdir()
    (tmp_path / "payload").write_text(PAYLOAD.format(ran=tmp_path / "ran"))
    (tmp_path / "payload").chmod(0o755)
    environment = {
        **os.environ,
        "SLURM_CONF": sandbox.environment()["SLURM_CONF"],
        "REAL_SLURM_CONF": sandbox.environment()["SLURM_CONF"],
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
    }
    site = Site(tmp_path, environment)
    try:
        yield site
    finally:
        jobs = [job for run in (tmp_path / "faults").glob("*") for job in accepted_jobs(run)]
        if jobs:
            subprocess.run(["scancel", *jobs], env=environment, capture_output=True)


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.2)
    return value


def outcomes(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err
