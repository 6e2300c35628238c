"""Record the installed Slurm's answers to the launcher's questions, as data for the unit tests.

Boots a sandbox, submits one job for each way to wait, run and end, and writes the answers into a directory:
`scripts/debian_root.py SUITE .venv/bin/python scripts/record_slurm.py DIRECTORY` in each root file system.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launcher.sandbox.lifecycle import down, up
from launcher.sandbox.options import SandboxOptions
from launcher.schedulers.slurm import SlurmScheduler
from launcher.slurm.questions import _SACCT, _SQUEUE, questions
from launcher.slurm.records import SACCT_FORMAT, parse_sacct, parse_squeue

# The same on every machine: paths are part of the answers.
HERE = Path("/tmp/slipway-recording")
LIFE = '((${SLURM_RESTART_COUNT:-0})) && exit 0; touch "$0.began"; sleep 600'
# The body of each job's script and its header, by the tag of its launch.
JOBS = {
    "t-completed": ("exit 0", ""),
    "t-failed": ("exit 3", ""),
    "t-saved": ("exit 75", ""),
    "t-killed": ("kill -9 $$", ""),
    "t-cancelled": ("sleep 600", ""),
    "t-cancelled-waiting": ("exit 0", "--partition=cloud"),
    "t-running": ("sleep 600", ""),
    "t-pending": ("exit 0", "--partition=cloud"),
    "t-held": ("exit 0", "--hold"),
    "t-begin": ("exit 0", "--begin=now+1hour"),
    "t-never": ("exit 0", "--dependency=afterok:{t-failed}"),
    "t-requeued": (LIFE, "--requeue"),
    "t-requeue-held": (LIFE, "--requeue"),
    "t-timeout": ("sleep 600", ""),
    "t-node-failed": ("sleep 600", "--nodelist=n4 --no-requeue"),
    "t-launch-failed": ("exit 0", "--output=/dev/null/log"),
    "t-array": ("exit $SLURM_ARRAY_TASK_ID", "--array=0-2%1 --nodelist=n1"),
    "t-array-waiting": ("exit 0", "--array=0-4%1 --partition=cloud"),
}
CHAIN = "t-chain"  # three links, of which the first runs
TEST_ONLY = {
    "fine": ["--nodes=2"],
    "more nodes than there are": ["--nodes=40"],
    "more GPUs than a node has": ["--gres=gpu:9"],
    "no such partition": ["--partition=nosuch"],
    "no such node": ["--nodelist=nosuch"],
    "no such option": ["--no-such-option"],
    "drained nodes": ["--nodelist=n4"],
}


class Recorder:
    """A sandbox and the jobs in it."""

    def __init__(self, conf: str, target: Path) -> None:
        self.environment = {**os.environ, "SLURM_CONF": conf, "SLURM_BITSTR_LEN": "0"}
        self.scheduler = SlurmScheduler(conf)
        self.target = target
        self.jobs: dict[str, str] = {}
        self.ids: list[str] = []

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, input=stdin, capture_output=True, text=True, timeout=60
        )

    def submit(self, tag: str, body: str, options: str, link: int = 1, after: str | None = None) -> str:
        script = HERE / tag / "launches" / "1" / "recorded_submission.sh"
        script.parent.mkdir(parents=True, exist_ok=True)
        lines = ["--output=/dev/null", *options.format_map(self.jobs).split()]
        script.write_text("\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), body]) + "\n")
        self.ids.append(self.scheduler.submit(script, tag, link=link, after=after))
        return self.ids[-1]

    def state(self, tag: str) -> str:
        return self.run(
            "squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={self.jobs[tag]}"
        ).stdout

    def wait(self, tag: str, state: str) -> None:
        deadline = time.monotonic() + 90
        while state not in self.state(tag):
            if time.monotonic() > deadline:
                sys.exit(f"{tag} is not {state}: {self.state(tag)}")
            time.sleep(0.3)

    def scontrol(self, *words: str) -> None:
        self.run("scontrol", *words).check_returncode()

    def populate(self) -> None:
        """Submit all jobs, do to them what is to be done, and wait until each is as it stays."""
        for tag, (body, options) in JOBS.items():
            if "t-failed" in options:
                self.wait("t-failed", "FAILED")
            self.jobs[tag] = self.submit(tag, body, options)
        links = [self.submit(CHAIN, "sleep 600", "")]
        for link in (2, 3):
            links.append(self.submit(CHAIN, "sleep 600", "", link, f"afterany:{links[-1]}"))
        for tag in ("t-cancelled", "t-requeued", "t-requeue-held", "t-timeout", "t-node-failed", "t-running"):
            self.wait(tag, "RUNNING")
        time.sleep(1.1)
        self.scontrol("update", f"JobId={self.jobs['t-timeout']}", "EndTime=now+1")
        self.run("scancel", self.jobs["t-cancelled"], self.jobs["t-cancelled-waiting"])
        self.scontrol("requeue", self.jobs["t-requeued"])
        self.scontrol("requeuehold", self.jobs["t-requeue-held"])
        self.scontrol("update", "NodeName=n4", "State=DOWN", "Reason=recording")
        self.wait("t-requeued", "PENDING")
        time.sleep(1.1)
        self.scontrol("update", f"JobId={self.jobs['t-requeued']}", "StartTime=now")
        ends = {"t-requeued": "COMPLETED", "t-timeout": "TIMEOUT", "t-node-failed": "NODE_FAIL"}
        for tag, state in ends.items():
            self.wait(tag, state)
        deadline = time.monotonic() + 90
        queued = {record.of for record in parse_squeue(self.squeue())}
        # The accounting is late.
        while {record.of for record in parse_sacct(self.sacct()) if record.command} != queued:
            if time.monotonic() > deadline:
                sys.exit("the accounting does not know all jobs")
            time.sleep(1)

    def squeue(self) -> str:
        return self.run(*_SQUEUE).stdout

    def sacct(self) -> str:
        return self.run(*_SACCT, f"--format={SACCT_FORMAT}", f"--jobs={','.join(self.ids)}").stdout

    def record(self) -> None:
        self.write("squeue.txt", self.squeue())
        self.write("sacct.txt", self.sacct())
        self.write("show_job.txt", self.run("scontrol", "show", "job", "--oneliner").stdout)
        asked = questions(None, "root")
        for name in ("settings", "partitions", "nodes", "associations", "qos"):
            self.write(f"{name}.txt", self.run(*asked[name]).stdout)
        self.write("test_only.json", json.dumps(self.test_only(), indent=1) + "\n")
        one = self.jobs["t-running"]
        for name, command in {
            "squeue": ["squeue", "--json"],
            "scontrol": ["scontrol", "--json", "show", "job", one],
            "sacct": ["sacct", "--json", f"--jobs={one}"],
        }.items():
            told = self.run(*command)
            if told.returncode == 0 and told.stdout.startswith("{"):
                jobs = [job for job in json.loads(told.stdout)["jobs"] if str(job["job_id"]) == one]
                self.write(f"{name}.json", json.dumps({"jobs": jobs}, indent=1) + "\n")

    def test_only(self) -> dict[str, dict[str, object]]:
        self.scontrol("update", "NodeName=n4", "State=DRAIN", "Reason=recording")
        told = {}
        for name, options in TEST_ONLY.items():
            done = self.run("sbatch", "--test-only", *options, stdin="#!/bin/bash\ntrue\n")
            told[name] = {"options": options, "code": done.returncode, "stderr": done.stderr}
        return told

    def write(self, name: str, text: str) -> None:
        (self.target / name).write_text(text)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY")
    target = Path(sys.argv[1]).absolute()
    target.mkdir(parents=True, exist_ok=True)
    # Slurm tells the working directory of each job, and no path of this machine belongs into a record.
    os.chdir("/")
    shutil.rmtree(HERE, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix="slipway-")) / "sandbox"
    try:
        sandbox = up(
            SandboxOptions(
                directory=directory,
                gpu_type="a100",
                accounting=True,
                accounts=("team",),
                qos=("long",),
                cloud_nodes=16,
            )
        )
        recorder = Recorder(sandbox.environment()["SLURM_CONF"], target)
        recorder.populate()
        recorder.record()
    finally:
        down(directory)
        directory.parent.rmdir()
        shutil.rmtree(HERE, ignore_errors=True)


if __name__ == "__main__":
    main()
