"""Secrets given by reference, on a real Slurm: the tasks have them, and nobody else can read them."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command

# In two parts, as a launch keeps what differs from the commit.
VALUE = "S3CRET" + "value7"
# The secrets by their variables in the job, each of a form of its own.
SECRETS = {
    "HF_TOKEN": f"hf_{VALUE}AbCdEfGhIjKlMnOpQ",
    "WANDB_API_KEY": hashlib.sha1(VALUE.encode()).hexdigest(),
    "https_proxy": f"http://me:{VALUE}proxy@proxy.example:3128",
    "GIT_MIRROR": f"https://{VALUE}git@host.example/x.git",
    "MY_STUFF": f"plain{VALUE}",
}
# Variables of the launching shell: sbatch passes them on, and no key refers to them.
SHELL = {"HF_TOKEN": f"hf_{VALUE}OfTheShellAbCdEfGh", "DB_PASSWORD": f"shell{VALUE}"}
# Each task prints the checksums of its secrets, and waits for the file `go`.
PAYLOAD = """#!/bin/bash
[[ ${SLURM_JOB_ID:-} ]] || exit 0
for name in NAMES; do echo "$name=$(printf '%s' "${!name}" | sha256sum | cut -c -64)"; done
touch HERE/begun-$SLURM_PROCID
until [[ -e HERE/go ]]; do sleep 0.1; done
"""


class Processes(threading.Thread):
    """A thread that records the command lines of all processes of this machine, which is all of the nodes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.command_lines: set[bytes] = set()
        self.finished = threading.Event()

    def run(self) -> None:
        while not self.finished.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    self.command_lines.add(path.read_bytes())


@contextmanager
def watch_processes() -> Iterator[set[bytes]]:
    processes = Processes()
    processes.start()
    try:
        yield processes.command_lines
    finally:
        processes.finished.set()
        processes.join()


@pytest.mark.slurm
def test_a_secret_by_reference_reaches_the_job_alone(tmp_path: Path, sandbox: Sandbox) -> None:
    results, cache = tmp_path / "results", tmp_path / "cache"
    words = _overrides(tmp_path)
    slurm_conf = sandbox.environment()["SLURM_CONF"]
    printed = []

    def slipway(*command: str, check: int | None = 0) -> str:
        variables = {**SHELL, "SLURM_CONF": slurm_conf, "SLIPWAY_CACHE_DIR": str(cache)}
        done = run_command(SLIPWAY, *command, cwd=tmp_path, check=check, **variables)
        printed.append(done.stdout + done.stderr)
        return done.stdout

    def slurm(*command: str) -> str:
        done = run_command(*command, cwd=tmp_path, SLURM_CONF=slurm_conf)
        printed.append(done.stdout + done.stderr)
        return done.stdout

    with watch_processes() as command_lines:
        slipway("launch", *words, "env_vars.HF_TOKEN='${oc.env:HF_TOKEN}'", check=2)
        assert "env_files={HF_TOKEN: " in printed[-1]
        job = json.loads(slipway("launch", *words, "--json"))["job_id"]
        marks = results / "secret" / "launches" / "1" / "marks"
        _wait_for(marks / "job.2", tmp_path / "begun-0", tmp_path / "begun-1")
        next_job = (marks / "job.2").read_text().strip()
        for job_id in (job, next_job):
            assert f"JobId={job_id}" in slurm("scontrol", "show", "job", "-d", job_id)
            assert "supervisor.pyz" in slurm("scontrol", "write", "batch_script", job_id, "-")
        slurm("scontrol", "show", "step", job)
        slurm("squeue", "--all", "--format=%all")
        slipway("status", "--json")
        slipway("attach", "secret", "--", "true")
        secret_files = _files_with(sandbox.options.directory, SECRETS)
        shell_files = _files_with(sandbox.options.directory, SHELL)
        readable = [path for path in shell_files if path.stat().st_mode & 0o077]
        (tmp_path / "go").touch()
        _wait_for(marks / f"{job}.0.ended.json")
    if sandbox.options.accounting:
        assert job in slurm("sacct", "--format=ALL", "--parsable2", f"--jobs={job},{next_job}")
    for verb in ("history", "logs", "verify"):
        slipway(verb, "secret", check=None)
    slipway("render", f"--launch-dir={marks.parent}")

    log = "\n".join(path.read_text() for path in marks.parent.glob("log-*"))
    for name, value in SECRETS.items():
        assert log.count(f"{name}={hashlib.sha256(value.encode()).hexdigest()}") == 2, log
    assert any(b"slipway.trainer.pretrain" in line for line in command_lines)
    secrets = [value.encode() for value in (*SECRETS.values(), *SHELL.values())]
    assert [line for line in command_lines if any(value in line for value in secrets)] == []
    assert [text for text in printed if any(value in text.encode() for value in secrets)] == []
    for directory in (results, cache):
        assert _files_with(directory, SECRETS) + _files_with(directory, SHELL) == []
    assert secret_files == []
    # Slurm keeps the shell's environment, for its own user and root alone.
    assert {path.name for path in shell_files} == {"environment"}
    assert readable == []


def _overrides(directory: Path) -> list[str]:
    """Write the files of the secrets and the payload; return the overrides of the launch."""
    files, python = directory / "files", directory / "python"
    files.mkdir(mode=0o700)
    for name, value in SECRETS.items():
        (files / name).write_text(f"{value}\n")
    python.write_text(PAYLOAD.replace("NAMES", " ".join(SECRETS)).replace("HERE", str(directory)))
    python.chmod(0o755)
    return [
        *("cluster=sandbox", "training=gpt3/tiny", "training.model.data.data_impl=mock"),
        *("training.trainer.num_nodes=2", "training.trainer.devices=1"),
        *("training.model.tensor_model_parallel_size=1", "training.run.name=secret", "resilience.links=2"),
        *(f"cluster.python={python}", f"wandb_api_key_file={files}/WANDB_API_KEY"),
        *(f"env_files.{name}={files}/{name}" for name in SECRETS if name != "WANDB_API_KEY"),
    ]


def _files_with(directory: Path, secrets: Mapping[str, str]) -> list[Path]:
    """Return the files below a directory that hold a secret; Slurm removes some of them meanwhile."""
    values = [value.encode() for value in secrets.values()]
    paths = []
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and any(value in path.read_bytes() for value in values):
                paths.append(path)
    return paths


def _wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.1)
