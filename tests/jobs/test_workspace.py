"""A workspace at a terminal: on a real Slurm, and on this machine without Slurm."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from control_project import SLIPWAY, Project

REPOSITORY = Path(__file__).resolve().parents[2]
_WORDS = ["stages=[workspace]", "training=gpt3/tiny", "training.trainer.devices=4"]

# The part of Pyxis: this srun drops its options and starts the rest on the node itself.
_SRUN = """#!/bin/bash
kept=()
for word in "$@"; do
    case $word in --container-* | --no-container-*) echo "$word" >>{seen} ;; *) kept+=("$word") ;; esac
done
exec {srun} "${{kept[@]}}"
"""


def type_into(text: str, *command: str | Path, **variables: str) -> tuple[str, int]:
    """Type a text into a terminal; return its output, and the exit code of the command."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], [str(word) for word in command], {**os.environ, "TERM": "dumb", **variables})
    os.write(terminal, text.encode())
    output, end = b"", time.monotonic() + 60
    while time.monotonic() < end and select.select([terminal], [], [], end - time.monotonic())[0]:
        try:
            output += os.read(terminal, 65536)
        except OSError:  # raised by Linux when the other end is closed
            break
    os.close(terminal)
    return output.decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_with_input(text: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def queued_jobs() -> str:
    states = "--states=PENDING,RUNNING"  # a job may take a moment to complete
    command = ["squeue", "--noheader", "--name=nemo-megatron-workspace", states, "--format=%i"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slurm
def test_a_workspace_is_a_shell_on_a_node(project: Project) -> None:
    key = project.directory / "key"
    key.write_text("s3cret\n")
    typed_lines = (
        'echo "it is $SLURM_JOB_NAME on $(hostname) with GPUs $CUDA_VISIBLE_DEVICES, in $PWD; $PYTHONPATH;'
        ' $(tty)"\n'
        'echo "queued: $(squeue --noheader --name=nemo-megatron-workspace --states=R --format=%i) is'
        ' $SLURM_JOB_ID"\n'
        'echo "secret: $HF_TOKEN $NOTE"; exit 5\n'
    )
    overrides = [*_WORDS, "cluster=sandbox", f"env_files.HF_TOKEN={key}", "env_vars.NOTE=noted"]
    overrides += ["cluster.gpus_per_node=4", "training.trainer.num_nodes=2"]
    # Neither variable has an effect: there is no such partition, and no such job.
    leaks = {"SALLOC_PARTITION": "nope", "SLURM_JOB_ID": "1", "PYTHONPATH": "/mine"}
    output, code = type_into(typed_lines, SLIPWAY, "launch", *overrides, **leaks)
    assert code == 5, output
    match = re.search(r"it is (\w+) on (n\d) with GPUs ([\d,]+), in (\S+); (\S+); /dev/pts/\d+\r", output)
    assert match is not None, output
    assert (match[1], match[3]) == ("interactive", "0,1,2,3")
    assert (match[4], match[5]) == (str(project.directory), f"{REPOSITORY}:/mine")
    job = re.search(r"queued: (\d+) is (\d+)\r", output)
    assert job is not None and job[1] == job[2] != "1"
    assert "secret: s3cret noted" in output
    assert "SALLOC_PARTITION=nope of your shell is not passed on to salloc" in output
    assert queued_jobs() == ""
    assert not (project.directory / "results").exists()


@pytest.mark.slurm
def test_a_workspace_takes_commands_from_a_pipe_and_prints_its_command(project: Project) -> None:
    typed_lines = 'echo "$(hostname) $CUDA_VISIBLE_DEVICES"; [[ -t 0 ]] || echo "no terminal"; exit 4\n'
    words = [*_WORDS, "cluster=sandbox", "workspace.gpus=1"]
    done = run_with_input(typed_lines, sys.executable, REPOSITORY / "launcher/main.py", *words)
    assert done.returncode == 4, done.stderr
    assert re.fullmatch(r"n\d 0\nno terminal\n", done.stdout)
    code, out, _ = project.slipway("launch", *words, "--print")
    assert code == 0
    script = project.directory / "workspace.sh"
    script.write_text(out)
    assert re.fullmatch(r"n\d 0\nno terminal\n", run_with_input(typed_lines, "bash", script).stdout)
    output, code = type_into("hostname; exit 6\n", "bash", "-c", out)  # as it is pasted
    assert code == 6 and re.search(r"\nn\d\r", output), output
    code, _, err = project.slipway("launch", *words, "cluster.partition=nope")
    assert code == 2 and "no partition nope" in err and queued_jobs() == ""
    code, out, _ = project.slipway("check", *words)
    assert code == 0 and "skipped" not in out


@pytest.mark.slurm
def test_a_workspace_in_the_current_allocation(project: Project) -> None:
    launch_command = f"{SLIPWAY} launch {' '.join(_WORDS)} cluster=interactive"
    typed_lines = (
        'echo "of $SLURM_JOB_ID on $(hostname) with $SLURM_NTASKS, GPUs $CUDA_VISIBLE_DEVICES"; exit 3\n'
    )
    command = [
        "salloc",
        "--nodes=2",
        "--ntasks-per-node=3",
        "--gpus-per-node=2",
        "bash",
        "-c",
        launch_command,
    ]
    output, code = type_into(typed_lines, *command)
    match = re.search(r"of (\d+) on n\d with 1, GPUs 0,1\r", output)
    assert code == 3 and match is not None, output
    assert f"Granted job allocation {match[1]}" in output


@pytest.mark.slurm
def test_pyxis_gets_its_flags(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The srun takes Pyxis' options and starts the rest on the node; tests/pyxis has the real one."""
    srun = subprocess.run(["which", "srun"], capture_output=True, text=True, check=True).stdout.strip()
    programs, flags_file = project.directory / "bin", project.directory / "seen"
    programs.mkdir()
    (programs / "srun").write_text(_SRUN.format(seen=flags_file, srun=srun))
    (programs / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (project.directory / "data").mkdir()
    words = [*_WORDS, "cluster=sandbox", "container=nvcr.io/nvidia/nemo:24.07"]
    words += ["cluster.srun_args=['--no-container-mount-home']", "--no-check=cluster.pyxis"]
    done = run_with_input("echo $PYTHONPATH on $(hostname)\n", SLIPWAY, "launch", *words)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"/opt/slipway on n\d\n", done.stdout)
    directory = project.directory
    mounts = [f"{directory}/results:{directory}/results", f"{directory}/data:{directory}/data:ro"]
    mounts += [f"{REPOSITORY}/slipway:/opt/slipway/slipway"]
    assert flags_file.read_text().splitlines() == [
        "--container-image=nvcr.io#nvidia/nemo:24.07",
        f"--container-mounts={','.join(mounts)}",
        "--container-env=MASTER_ADDR,MASTER_PORT,TRANSFORMERS_OFFLINE,TORCH_NCCL_AVOID_RECORD_STREAMS,"
        "NCCL_NVLS_ENABLE",
        "--no-container-mount-home",
    ]
    assert (directory / "results").is_dir()  # Pyxis mounts nothing that is not there


def test_a_workspace_without_slurm(local_project: Project) -> None:
    directory = local_project.directory
    words = [*_WORDS, "cluster=local", "container=/x.sqsh"]
    done = run_with_input("echo $PWD; exit 9\n", SLIPWAY, "launch", *words)
    assert (done.returncode, done.stdout) == (9, f"{directory}\n"), done.stderr
    assert "container='/x.sqsh': not used" in done.stderr
    output, code = type_into("tty; exit 8\n", SLIPWAY, "launch", *words)
    assert code == 8 and "/dev/pts/" in output
