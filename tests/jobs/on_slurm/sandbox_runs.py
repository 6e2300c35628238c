"""Runs in every state that Slurm knows, on one sandbox: launched, provoked, and read as a user would."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.sandbox.lifecycle import Sandbox
from tests.forked_slipway import run_forked

# Nothing is trained: the tests look at the job around the payload.
STAGE = ["stages=[data_preparation]", "data_preparation.inputs=[/etc/hostname]", "cluster=sandbox"]
PREFIX = "run-"
# The launcher asks the interpreter of a job for its modules; outside of a job the payloads answer at once.
HEADER = "#!/bin/bash\n[[ ${SLURM_JOB_ID:-} ]] || exit 0\n"
PATIENCE_SECONDS = 240

Row = dict[str, Any]
Done = subprocess.CompletedProcess[str]


@dataclass
class SandboxRuns:
    """One sandbox with its runs.

    `jobs` has the id of each run's job. `rows` is the last answer of `slipway status --json`, by run, and
    `history` has a row for each new state or reason of a run, in their order. `answers` has the answer of the
    verb that acted on a run.
    """

    directory: Path
    environment: dict[str, str]
    accounting: bool
    jobs: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    history: dict[str, list[Row]] = field(default_factory=dict)
    answers: dict[str, Done] = field(default_factory=dict)

    def command(self, *words: object) -> Done:
        """Run a command as the user would."""
        command = [str(word) for word in words]
        return subprocess.run(
            command, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=90
        )

    def slipway(self, *words: object, programs: Path | None = None) -> Done:
        """Run `slipway` as the user would; `programs` is a folder in front of the others on PATH."""
        env = self.environment
        if programs is not None:
            env = {**env, "PATH": f"{programs}:{env['PATH']}"}
        return run_forked(words, cwd=self.directory, env=env, timeout=90)

    def slurm(self, *words: object) -> str:
        """Run a command of Slurm's, which must succeed, and return its output."""
        done = self.command(*words)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    def launch(self, run: str, body: str, *overrides: str, programs: Path | None = None) -> Done:
        """Launch a run whose payload is a script; `{other}` in an override is the id of another run's job."""
        payload = self.directory / f"{run}.sh"
        payload.write_text(HEADER + body)
        payload.chmod(0o755)
        name_overrides = [f"data_preparation.run.name={run}", f"cluster.job_name_prefix={PREFIX}"]
        all_overrides = [*STAGE, *name_overrides, f"cluster.python={payload}", *overrides]
        done = self.slipway("launch", *all_overrides, "--json", programs=programs)
        if done.returncode == 0:
            self.jobs[run] = json.loads(done.stdout)["job_id"]
        return done

    def submit(self, *options: object, script: str = "exec sleep 3600") -> str:
        """Submit a job that is none of ours; return its id."""
        line = shlex.join(["bash", "-c", script])
        output = self.slurm("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", line)
        return output.strip()

    def read_rows(self, programs: Path | None = None) -> dict[str, Row]:
        """Return the row of each run in `slipway status --json`."""
        done = self.slipway("status", "--json", programs=programs)
        assert done.stdout, done.stderr
        return {row["run"]: row for row in json.loads(done.stdout)}

    def watch(self) -> None:
        """Read the rows once, and record the new ones."""
        self.rows = self.read_rows()
        for run, row in self.rows.items():
            recorded = self.history.setdefault(run, [])
            if not recorded or (recorded[-1]["state"], recorded[-1]["reason"]) != (
                row["state"],
                row["reason"],
            ):
                recorded.append(row)

    def state(self, run: str) -> str | None:
        row = self.rows.get(run)
        return row["state"] if row else None

    def has_begun(self, run: str) -> bool:
        """Return True if the payload of a run has said that it has begun."""
        return any("\nattempt " in log.read_text() for log in self.launch_directory(run).glob("log-*.out"))

    def wait_for(self, run: str, *, states: Sequence[str], task: str | None = None) -> Row:
        """Watch until a run, or a task of it, is in one of the states, or time is up; return its row."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            self.watch()
            row = self.rows[run]
            if (row["tasks"].get(task) if task else row["state"]) in states:
                break
            time.sleep(0.3)
        return self.rows[run]

    def logs(self, run: str, *options: str) -> Done:
        return self.slipway("logs", run, *options)

    def launch_directory(self, run: str) -> Path:
        return self.directory / "results" / run / "launches" / "1"


def open_runs(directory: Path, sandbox: Sandbox) -> SandboxRuns:
    """Return the runs of a sandbox, none so far, whose index is not the user's own."""
    env = {
        **os.environ,
        "TMPDIR": str(directory),
        "SLIPWAY_CACHE_DIR": str(directory / "cache"),
        "SLURM_CONF": sandbox.environment()["SLURM_CONF"],
        "COLUMNS": "250",
    }
    return SandboxRuns(directory, env, sandbox.options.accounting)
