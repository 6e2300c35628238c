"""Runs in every state that Slurm knows, on one sandbox: launched, provoked, and looked at as a user would."""

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

# Nothing is trained: what is looked at is the job around it.
STAGE = ["stages=[data_preparation]", "data_preparation.inputs=[/etc/hostname]", "cluster=sandbox"]
PREFIX = "run-"
# The launcher asks the interpreter of a job what it has; outside of a job these answer at once.
HEADER = "#!/bin/bash\n[[ ${SLURM_JOB_ID:-} ]] || exit 0\n"
PATIENCE_SECONDS = 240

Row = dict[str, Any]
Done = subprocess.CompletedProcess[str]


@dataclass
class SandboxRuns:
    """One sandbox with its runs.

    `jobs` has the id of each run's job. `rows` is what `slipway status --json` told last, by run, and `seen`
    each state of a run that it told, with the reason, in their order. `said` is what the verb answered that
    acted on a run.
    """

    directory: Path
    environment: dict[str, str]
    accounting: bool
    jobs: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    seen: dict[str, list[Row]] = field(default_factory=dict)
    said: dict[str, Done] = field(default_factory=dict)

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
        """Run a command of Slurm's, which must succeed, and return what it printed."""
        done = self.command(*words)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    def launch(self, run: str, body: str, *overrides: str, programs: Path | None = None) -> Done:
        """Launch a run whose payload is a script; `{other}` in an override is the id of another run's job."""
        payload = self.directory / f"{run}.sh"
        payload.write_text(HEADER + body)
        payload.chmod(0o755)
        named = [f"data_preparation.run.name={run}", f"cluster.job_name_prefix={PREFIX}"]
        chosen = [*STAGE, *named, f"cluster.python={payload}", *overrides]
        done = self.slipway("launch", *chosen, "--json", programs=programs)
        if done.returncode == 0:
            self.jobs[run] = json.loads(done.stdout)["job_id"]
        return done

    def submit(self, *options: object, script: str = "exec sleep 3600") -> str:
        """Submit a job that is none of ours; return its id."""
        line = shlex.join(["bash", "-c", script])
        told = self.slurm("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", line)
        return told.strip()

    def look(self, programs: Path | None = None) -> dict[str, Row]:
        """Every run, as `slipway status --json` tells it."""
        done = self.slipway("status", "--json", programs=programs)
        assert done.stdout, done.stderr
        return {row["run"]: row for row in json.loads(done.stdout)}

    def watch(self) -> None:
        """Look once, and remember what is new."""
        self.rows = self.look()
        for run, row in self.rows.items():
            told = self.seen.setdefault(run, [])
            if not told or (told[-1]["state"], told[-1]["reason"]) != (row["state"], row["reason"]):
                told.append(row)

    def state(self, run: str) -> str | None:
        row = self.rows.get(run)
        return row["state"] if row else None

    def has_begun(self, run: str) -> bool:
        """Return True if the payload of a run has said that it has begun."""
        return any("\nattempt " in log.read_text() for log in self.launch_directory(run).glob("log-*.out"))

    def wait_for(self, run: str, *, states: Sequence[str], task: str | None = None) -> Row:
        """Look until a run, or a task of it, is in one of the states, or too long has passed."""
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
    """A sandbox without runs, whose index is not the user's own."""
    env = {
        **os.environ,
        "TMPDIR": str(directory),
        "SLIPWAY_CACHE_DIR": str(directory / "cache"),
        "SLURM_CONF": sandbox.environment()["SLURM_CONF"],
        "COLUMNS": "250",
    }
    return SandboxRuns(directory, env, sandbox.options.accounting)
