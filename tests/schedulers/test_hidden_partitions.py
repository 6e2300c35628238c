"""Jobs and nodes of a hidden partition, which Slurm shows to users where it is asked for all."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from slipway.common.node.settings import Settings
from slipway.supervisor.job import Job
from slipway.supervisor.slurm import Slurm

TAG, NOBODY = "0123abcd", 65534
PACKAGES = ("launcher", "slipway", "scripts", "templates")
# The sandbox's partitions are its own; and these two have nothing that could be hidden.
OWN_CLUSTER, NOTHING_TO_HIDE = "launcher/sandbox/", {"config", "hostnames"}


def functions(path: Path) -> Iterator[ast.AST]:
    """Yield the functions of a file that have no function inside, and its statements outside of functions."""
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and not any(isinstance(n, kinds) for n in ast.walk(node) if n is not node):
            yield node
    yield from (node for node in tree.body if not isinstance(node, (*kinds, ast.ClassDef)))


def words(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def commands(node: ast.AST) -> Iterator[list[str]]:
    """Yield the constant words at the beginning of each list that begins as a question to Slurm."""
    for sequence in ast.walk(node):
        if isinstance(sequence, ast.List | ast.Tuple):
            texts = [
                n.value for n in sequence.elts if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            is_shown = texts[:1] == ["scontrol"] and "show" in texts and not NOTHING_TO_HIDE & {*texts}
            if texts[:1] in (["squeue"], ["sinfo"]) or is_shown:
                yield texts


def questions(repository: Path) -> list[tuple[str, list[str], bool]]:
    """Return the questions of the product: the place, the words, and if they are about all partitions."""
    return [
        (f"{path.relative_to(repository)}:{node.lineno}", texts, "--all" in words(node))  # type: ignore[attr-defined]
        for package in PACKAGES
        for path in sorted((repository / package).rglob("*.py"))
        if OWN_CLUSTER not in str(path) and path.name != "record_slurm.py"
        for node in functions(path)
        for texts in commands(node)
    ]


def test_each_question_is_about_hidden_partitions_too(repository: Path) -> None:
    asked = questions(repository)
    assert len(asked) >= 8, "the programs are called otherwise by now"
    assert {texts[0] for _, texts, _ in asked} == {"squeue", "sinfo", "scontrol"}
    assert [question for question in asked if not question[2]] == []
    for path in (repository / "templates").iterdir():
        text = path.read_text() if path.is_file() else ""
        assert not [word for word in ("squeue", "sinfo", "scontrol show job") if word in text], path


def as_nobody(question: str) -> str:
    """Ask the supervisor's question in a process of an ordinary user; return the answer's text."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            settings = Settings("x", 1, TAG, "/", "/x.sh", "/log-x_", "slurm", "megatron")
            slurm = Slurm(Job("1", "1.0", "1", 1, False, "/", settings, 0, dict(os.environ)))
            os.write(write, str(eval(question, {"slurm": slurm})).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        answer = stream.read().decode()
    os.waitpid(child, 0)
    return answer


@pytest.mark.slurm
@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_an_ordinary_user_sees_a_chain_in_a_hidden_partition(
    sandbox: Sandbox, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", sandbox.environment()["SLURM_CONF"])

    def run(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    script = short_directory / "submitted" / f"{TAG}.2_submission.sh"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    for directory in (short_directory, sandbox.directory, sandbox.directory.parent):
        if stat.S_IMODE(directory.stat().st_mode) == 0o700:
            directory.chmod(0o711)  # for the user to reach Slurm's configuration and munge
    run("scontrol", "create", "PartitionName=hidden", "Nodes=n1", "Hidden=YES", "State=DOWN")
    try:
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        job = run(*user, "sbatch", "--parsable", "--partition=hidden", "--output=/dev/null", str(script))
        try:
            assert as_nobody("slurm.find_submitted(2)") == job
            assert as_nobody(f"slurm.show_job('{job}').state") == "PENDING"
            assert as_nobody(f"slurm.squeue_state('{job}')") == "PENDING"
        finally:
            run("scancel", job)
    finally:
        subprocess.run(["scontrol", "delete", "PartitionName=hidden"], check=False)
