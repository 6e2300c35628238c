"""Mistakes on the command line and on this machine, in the process of the test and in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.mistakes.places import LOCAL, MOCK, Places, Rows, assert_mistake, run

SIZE = "training=gpt3/126m"

LAUNCHING: Rows = [
    (
        [SIZE, "container=null", "engine=nemo"],
        ["there is no Slurm here", "slipway sandbox up", "cluster=local"],
    ),
    ([*LOCAL, MOCK, "cluster.python=@bare"], ["cannot import torch, megatron", "[train]"]),
    (
        ["cluster=sandbox", "training=gpt3/tiny", "cluster.python=@bare"],
        ["cluster.python='@bare'", "container=..."],
    ),
    ([*LOCAL, MOCK, "cluster.python=@images/python3"], ["@images/python3': there is no such file"]),
    (
        [*LOCAL, MOCK, "cluster.python=/bin/true", "base_results_dir=@file/x"],
        ["@file/x", "a directory", "base_results_dir=..."],
    ),
]

OTHER_VERBS: Rows = [
    (["status", "no_such_run"], ["no_such_run"]),
    (["logs", "no_such_run"], ["there is no run 'no_such_run'"]),
    (["plot", "no_such_run"], ["there is no run 'no_such_run'"]),
    (["follow", "no_such_run"], ["there is no run 'no_such_run'"]),
    (["data", "tokenize", "no_such_file"], ["no_such_file: no such file or directory"]),
    (["data", "tokenize", "@file", "cluster=bmc"], ["cluster=bmc", "did you mean 'bcm'"]),
    (["sandbox", "up", "--nodes=0"], ["--nodes 0"]),
    (["lanch"], ["lanch: there is no such verb", "did you mean 'launch'"]),
    (["gpu-check", "cluster=local"], ["there is no such verb", "python -m benchmarks.gpu_check"]),
    (["training=gpt3/5b"], ["slipway launch training=gpt3/5b"]),
    (["launch", "--cluster=bcm"], ["--cluster=bcm", "write overrides without dashes: cluster=bcm"]),
    (["launch", "-training=gpt3/5b"], ["write overrides without dashes: training=gpt3/5b"]),
    (["launch", "--nodes"], ["unrecognized arguments: --nodes"]),
    (["launch", "training=gpt3/5b", "--no-check=X", "a=b", "--expl"], ["unrecognized arguments: --expl\n"]),
    (
        ["launch", "training=gpt3/5b", "--no-chek=X", "a=b"],
        ["arguments: --no-chek=X", "did you mean --no-check"],
    ),
    (["generate", "--prompt", "x"], ['in place of --prompt: slipway generate RUN "a text']),
    (["launch", "training=gpt3/tiny", "--steps", "3"], ["--steps: training.trainer.max_steps=N"]),
    (["launch", "training=gpt3/tiny", "--steps=3"], ["--steps: training.trainer.max_steps=N"]),
    (["launch", "training=tiny"], ["did you mean 'gpt3/tiny' or 't5/tiny'?"]),
    (["launch", "training=llama3_8b"], ["did you mean 'llama/llama3_8b'?"]),
    (["resume"], ["no RUN: a run's name"]),
    (["data", "audit"], ["no RUN: a run's name"]),
    (["convert", "--to", "hf"], ["no source", "name a run"]),
    (["history", "mine", "1"], ["did you mean --launch 1?"]),
    (["data", "show", "corpus", "3"], ["did you mean --document 3?"]),
    (["diff", "first", "second"], ["there is no run 'first'"]),
    (["launch", "--dryrun"], ["unrecognized arguments: --dryrun", "did you mean --dry-run?"]),
]

ROWS = [*((["launch", *row], words) for row, words in LAUNCHING), *OTHER_VERBS]


@pytest.mark.parametrize(("arguments", "words"), ROWS, ids=lambda value: ascii(" ".join(value))[:60])
def test_command_line_mistake_is_reported_and_nothing_is_written(
    arguments: list[str],
    words: list[str],
    places: Places,
    cwd: Path,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_mistake(arguments, words, places, cwd, repository, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["training=gpt3/5B"], "training=gpt3/5B: there is no such choice"),
        (["cluster.exclusive=maybe"], "from the command line: cluster.exclusive=maybe"),
        (["env_vars.X=\udcff"], r"env_vars.X=\udcff: this override is not valid UTF-8"),
    ],
)
def test_mistake_in_a_process_of_its_own_has_no_traceback(
    arguments: list[str], words: str, cwd: Path, repository: Path
) -> None:
    command = [sys.executable, str(repository / "launcher/main.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(cwd.iterdir()) == []


def test_deleted_current_directory_is_reported(cwd: Path, repository: Path) -> None:
    program = (
        "import os, sys; os.mkdir('x'); os.chdir('x'); os.rmdir('../x'); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, str(repository / "launcher/main.py"), "--dry-run"]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "slipway: the current directory was deleted\n  cd to one that exists\n"


def test_full_disk_is_reported(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path_factory.mktemp("disk")
    environment = {**os.environ, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, env=environment).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a small disk cannot be mounted here")
    try:
        launch = ["launch", *LOCAL, MOCK, "--no-check=space.checkpoints", "cluster.python=/bin/true"]
        assert run([*launch, f"base_results_dir={disk}/results"]) == 2
    finally:
        subprocess.run(["umount", str(disk)], check=True, env=environment)
    output = capsys.readouterr()
    assert "no space left" in output.err.lower()
    assert f"{disk}/results" in output.err
    assert "Traceback" not in output.err


def test_bug_keeps_its_traceback(cwd: Path, repository: Path) -> None:
    program = """
import sys
from launcher import drafting
from launcher.cli.app import main
from launcher.config.compose import compose
from launcher.errors import UserError
def bug(*arguments, **named):
    raise ValueError("a bug of ours")
drafting.plan_launch = bug
sys.exit(main(["launch", "--dry-run"]))
"""
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" in done.stderr
    assert "ValueError: a bug of ours" in done.stderr
    assert list(cwd.iterdir()) == []
