"""A directory to launch in; the payload of its jobs waits for the signal to save, or for four minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.cli.app import main
from launcher.runs.manifest import Manifest, read_manifest, write_manifest
from slipway.common.node.marks import read_attempts
from tests.job_marks import end_marks

SLIPWAY = Path(sys.executable).with_name("slipway")

_PAYLOAD = """#!/bin/bash
[[ $1 != -c ]] || exit 0 # asked by the launcher what it has
# As the trainer does it, all ranks save before the first of them leaves: srun then ends the others.
trap 'trap "" TERM; echo "rank $RANK saves"; sleep 1; exit 75' USR1
echo "rank $RANK trains"
for ((second = 0; second < 240; second++)); do
    (cd / && exec sleep 1) & # a helper, with the same environment
    wait $!
done
"""


@dataclass
class Project:
    """A directory whose jobs are launched through the command's own `main`, in the test's process."""

    directory: Path
    cluster: str
    capsys: pytest.CaptureFixture[str]
    jobs: list[str] = field(default_factory=list)
    told: str = ""

    @property
    def payload(self) -> Path:
        path = self.directory / "payload"
        if not path.exists():
            path.write_text(_PAYLOAD)
            path.chmod(0o755)
        return path

    def slipway(self, *words: str) -> tuple[int, str, str]:
        """Run a command line; return its exit code, stdout and stderr."""
        self.capsys.readouterr()
        code = main(list(words))
        output = self.capsys.readouterr()
        return code, output.out, output.err

    def launch(self, *overrides: str, name: str = "run") -> str:
        """Launch the payload as one task; return the job's id."""
        stage = ["stages=[data_preparation]", "data_preparation.inputs=[/etc/hostname]"]
        return self._launch(*stage, f"data_preparation.run.name={name}", *overrides)

    def launch_ranks(self, *overrides: str, name: str = "run") -> str:
        """Launch the payload as a training of two nodes with two ranks each; one job of it at a time."""
        size = ["training.trainer.num_nodes=2", "training.trainer.devices=2"]
        size += ["training=gpt3/tiny", "training.model.data.data_impl=mock", f"training.run.name={name}"]
        return self._launch(*size, *overrides)

    def _launch(self, *overrides: str) -> str:
        words = [*overrides, self.cluster, f"cluster.python={self.payload}", "--json"]
        code, out, err = self.slipway("launch", *words)
        assert code == 0, err
        self.told = err
        self.jobs.append(str(json.loads(out)["job_id"]))
        return self.jobs[-1]

    def launch_dir(self, number: int = 1, name: str = "run") -> Path:
        return self.directory / "results" / name / "launches" / str(number)

    def log(self, number: int = 1, name: str = "run") -> str:
        return "".join(path.read_text() for path in self.launch_dir(number, name).glob("log-*.out"))

    def wait_until_it_trains(self, number: int = 1, name: str = "run", ranks: int = 1) -> None:
        wait_until(lambda: self.log(number, name).count(" trains") == ranks)

    def state(self, job_id: str) -> str:
        """Return a job's state and reason in Slurm's words."""
        command = ["squeue", "--noheader", "--states=all", "--array", f"--jobs={job_id}", "--format=%T %r"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def tag(self, number: int = 1) -> str:
        return read_manifest(self.launch_dir(number)).tag

    def nodes(self, number: int = 1) -> list[str]:
        """Return the nodes of a launch: one that another test has just left may not be free yet."""
        return str(read_attempts(self.launch_dir(number))[-1].nodes).split(",")

    def end_marks(self, number: int = 1, name: str = "run") -> list[dict[str, Any]]:
        return end_marks(self.launch_dir(number, name))

    def cancel_all(self) -> None:
        if self.cluster == "cluster=sandbox" and self.jobs:
            subprocess.run(["scancel", *self.jobs], capture_output=True)
        elif self.cluster == "cluster=local":
            for job in self.jobs:
                # The tasks are a process group of their own.
                with suppress(psutil.NoSuchProcess):
                    supervisor = psutil.Process(int(job))
                    for process in (*supervisor.children(recursive=True), supervisor):
                        with suppress(psutil.NoSuchProcess):
                            process.kill()


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def write_launch(name: str, number: int) -> Path:
    """Write launch `number` of a run, whose job has that number as its id; return its directory."""
    directory = Path("results") / name / "launches" / str(number)
    directory.mkdir(parents=True)
    manifest = Manifest(
        run=name,
        launch=number,
        tag=f"{name}-{number}",
        stage="training",
        engine="megatron",
        scheduler="slurm",
        job_name=name,
        nodes=2,
        tasks_per_node=2,
        time_limit="00:30:00",
        command=["slipway", "launch"],
        overrides=[],
        choices={},
        created="2026-11-21T12:00:00+00:00",
        version="0.1.0",
        user="u",
        host="login",
        job_id=str(number),
    )
    write_manifest(directory, manifest)
    return directory.absolute()
