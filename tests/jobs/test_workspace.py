"""A workspace on a real Slurm: somebody sits at a terminal and types; on this machine, without Slurm, too."""

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

# Pyxis' part: it starts what comes after its options, here on the node itself.
_SRUN = """#!/bin/bash
kept=()
for word in "$@"; do
    case $word in --container-* | --no-container-*) echo "$word" >>{seen} ;; *) kept+=("$word") ;; esac
done
exec {srun} "${{kept[@]}}"
"""


def typed(text: str, *command: str | Path, **variables: str) -> tuple[str, int]:
    """Type a text into a terminal; return its output, and the exit code of the command."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], [str(word) for word in command], {**os.environ, "TERM": "dumb", **variables})
    os.write(terminal, text.encode())
    shown, end = b"", time.monotonic() + 60
    while time.monotonic() < end and select.select([terminal], [], [], end - time.monotonic())[0]:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # what Linux says of the other end when it is closed
            break
    os.close(terminal)
    return shown.decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def piped(text: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def queued() -> str:
    states = "--states=PENDING,RUNNING"  # a job may take a moment to complete
    command = ["squeue", "--noheader", "--name=nemo-megatron-workspace", states, "--format=%i"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slurm
def test_a_shell_on_a_node(project: Project) -> None:
    key = project.directory / "key"
    key.write_text("s3cret\n")
    look = (
        'echo "it is $SLURM_JOB_NAME on $(hostname) with GPUs $CUDA_VISIBLE_DEVICES, in $PWD; $PYTHONPATH;'
        ' $(tty)"\n'
        'echo "queued: $(squeue --noheader --name=nemo-megatron-workspace --states=R --format=%i) is'
        ' $SLURM_JOB_ID"\n'
        'echo "secret: $HF_TOKEN $NOTE"; exit 5\n'
    )
    overrides = [*_WORDS, "cluster=sandbox", f"env_files.HF_TOKEN={key}", "env_vars.NOTE=noted"]
    overrides += ["cluster.gpus_per_node=4", "training.trainer.num_nodes=2"]
    # Neither variable is minded: there is no such partition, and no such job.
    leaks = {"SALLOC_PARTITION": "nope", "SLURM_JOB_ID": "1", "PYTHONPATH": "/mine"}
    shown, code = typed(look, SLIPWAY, "launch", *overrides, **leaks)
    assert code == 5, shown
    found = re.search(r"it is (\w+) on (n\d) with GPUs ([\d,]+), in (\S+); (\S+); /dev/pts/\d+\r", shown)
    assert found is not None, shown
    assert (found[1], found[3]) == ("interactive", "0,1,2,3")
    assert (found[4], found[5]) == (str(project.directory), f"{REPOSITORY}:/mine")
    job = re.search(r"queued: (\d+) is (\d+)\r", shown)
    assert job is not None and job[1] == job[2] != "1"
    assert "secret: s3cret noted" in shown
    assert "SALLOC_PARTITION=nope of your shell is not passed on to salloc" in shown
    assert queued() == ""
    assert not (project.directory / "results").exists()


@pytest.mark.slurm
def test_commands_from_a_pipe_and_the_printed_command(project: Project) -> None:
    look = 'echo "$(hostname) $CUDA_VISIBLE_DEVICES"; [[ -t 0 ]] || echo "no terminal"; exit 4\n'
    words = [*_WORDS, "cluster=sandbox", "workspace.gpus=1"]
    done = piped(look, sys.executable, REPOSITORY / "launcher/main.py", *words)
    assert done.returncode == 4, done.stderr
    assert re.fullmatch(r"n\d 0\nno terminal\n", done.stdout)
    code, out, _ = project.slipway("launch", *words, "--print")
    assert code == 0
    script = project.directory / "workspace.sh"
    script.write_text(out)
    assert re.fullmatch(r"n\d 0\nno terminal\n", piped(look, "bash", script).stdout)
    shown, code = typed("hostname; exit 6\n", "bash", "-c", out)  # as it is pasted
    assert code == 6 and re.search(r"\nn\d\r", shown), shown
    code, _, err = project.slipway("launch", *words, "cluster.partition=nope")
    assert code == 2 and "no partition nope" in err and queued() == ""
    code, out, _ = project.slipway("check", *words)
    assert code == 0 and "skipped" not in out


@pytest.mark.slurm
def test_in_the_allocation_that_one_is_in(project: Project) -> None:
    inside = f"{SLIPWAY} launch {' '.join(_WORDS)} cluster=interactive"
    look = 'echo "of $SLURM_JOB_ID on $(hostname) with $SLURM_NTASKS, GPUs $CUDA_VISIBLE_DEVICES"; exit 3\n'
    command = ["salloc", "--nodes=2", "--ntasks-per-node=3", "--gpus-per-node=2", "bash", "-c", inside]
    shown, code = typed(look, *command)
    found = re.search(r"of (\d+) on n\d with 1, GPUs 0,1\r", shown)
    assert code == 3 and found is not None, shown
    assert f"Granted job allocation {found[1]}" in shown


@pytest.mark.slurm
def test_flags_for_pyxis(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an srun that takes Pyxis' options and starts the rest on the node; the real one: tests/pyxis."""
    srun = subprocess.run(["which", "srun"], capture_output=True, text=True, check=True).stdout.strip()
    programs, seen = project.directory / "bin", project.directory / "seen"
    programs.mkdir()
    (programs / "srun").write_text(_SRUN.format(seen=seen, srun=srun))
    (programs / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (project.directory / "data").mkdir()
    words = [*_WORDS, "cluster=sandbox", "container=nvcr.io/nvidia/nemo:24.07"]
    words += ["cluster.srun_args=['--no-container-mount-home']", "--no-check=cluster.pyxis"]
    done = piped("echo $PYTHONPATH on $(hostname)\n", SLIPWAY, "launch", *words)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"/opt/slipway on n\d\n", done.stdout)
    here = project.directory
    mounts = [f"{here}/results:{here}/results", f"{here}/data:{here}/data:ro"]
    mounts += [f"{REPOSITORY}/{name}:/opt/slipway/{name}" for name in ("trainer", "arithmetic", "corpus")]
    assert seen.read_text().splitlines() == [
        "--container-image=nvcr.io#nvidia/nemo:24.07",
        f"--container-mounts={','.join(mounts)}",
        "--container-env=MASTER_ADDR,MASTER_PORT,TRANSFORMERS_OFFLINE,TORCH_NCCL_AVOID_RECORD_STREAMS,"
        "NCCL_NVLS_ENABLE",
        "--no-container-mount-home",
    ]
    assert (here / "results").is_dir()  # Pyxis mounts nothing that is not there


def test_without_slurm(local_project: Project) -> None:
    here = local_project.directory
    words = [*_WORDS, "cluster=local", "container=/x.sqsh"]
    done = piped("echo $PWD; exit 9\n", SLIPWAY, "launch", *words)
    assert (done.returncode, done.stdout) == (9, f"{here}\n"), done.stderr
    assert "container='/x.sqsh': not used" in done.stderr
    shown, code = typed("tty; exit 8\n", SLIPWAY, "launch", *words)
    assert code == 8 and "/dev/pts/" in shown
