"""Requirements of a launch on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.checks.findings import Finding, Severity
from launcher.checks.gathering.host import SUPERVISOR_PYTHONS, host_facts, supervisor_python_problem
from launcher.checks.rules.launch import machine_problems
from launcher.drafting import Request, draft
from slipway.common.node.settings import OLDEST_PYTHON

ROOT = Path(__file__).resolve().parents[2]
SLURM = ["training=gpt3/126m", "cluster=bcm"]
BARE = ["training=gpt3/tiny", "cluster=local"]


def machine_findings(*overrides: str) -> list[Finding]:
    launch_draft = draft(Request(overrides=overrides, command=[]))
    return list(machine_problems(launch_draft.plan, host_facts(launch_draft)))


def warnings(*overrides: str) -> list[str]:
    return [
        finding.message for finding in machine_findings(*overrides) if finding.severity is Severity.WARNING
    ]


def error(*overrides: str) -> str:
    """Return the message of the only error."""
    (message,) = [
        finding.message for finding in machine_findings(*overrides) if finding.severity is Severity.ERROR
    ]
    return message


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_may_be_on_the_nodes_alone(programs: Path) -> None:
    for python in ("/no/such/python", "python3.99"):
        (message,) = warnings(*BARE, f"cluster.python={python}")
        assert message == f"cluster.python={python!r}: not on this machine; every node must have it"


def test_an_interpreter_that_is_not_there_is_refused(programs: Path) -> None:
    (programs / "python").touch()
    for name, words in (("pythn", "there is no such file"), ("python", "it may not be executed")):
        assert words in error(*BARE, f"cluster.python={programs}/{name}")


def test_an_interpreter_is_asked_in_the_jobs_environment(programs: Path) -> None:
    variable = "import os; print('missing:', os.environ['SAID'])"
    fake = write_script(programs / "python", f'exec {sys.executable} -c "{variable}"')
    assert "cannot import nothing" in error(*BARE, f"cluster.python={fake}", "env_vars.SAID=nothing")


@pytest.mark.parametrize(
    ("key", "way"),
    [
        ("cluster.setup=[module load torch]", "cluster.setup"),
        ("cluster.task_prefix=[shifter]", "cluster.task_prefix"),
        ("cluster.srun_args=[--environment=/x.toml]", "--environment of cluster.srun_args"),
        ("+cluster.spank.image=x", "cluster.spank"),
        ("cluster.srun_args=[--label,--container-mounts=/x]", None),
    ],
)
def test_libraries_that_the_job_may_bring_are_a_warning(programs: Path, key: str, way: str | None) -> None:
    fake = write_script(programs / "python", "echo missing: torch")
    words = (*BARE, f"cluster.python={fake}", key)
    if way is None:
        assert "cannot import torch" in error(*words)
        return
    (message,) = warnings(*words)
    assert f"cannot import torch on this machine; {way} may add it on the nodes" in message


@pytest.mark.parametrize("text", ["exit 1", "echo hello"])
def test_interpreter_that_does_not_answer_is_a_warning(programs: Path, text: str) -> None:
    (message,) = warnings(*BARE, f"cluster.python={write_script(programs / 'python', text)}")
    assert "could not determine whether" in message


def test_a_local_launch_says_that_it_has_no_container(programs: Path) -> None:
    image = "nvcr.io#nvidia/nemo:24.07"
    messages = warnings(*BARE, f"container={image}", "cluster.python=/bin/true")
    assert messages[0] == f"container={image!r}: not used: cluster.scheduler=local runs without containers"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "cluster.scheduler='allocation': this shell is in no allocation"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, "the allocation that this shell is in has 1"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, None),
        ({"SLURM_JOB_ID": "7"}, None),
    ],
)
def test_an_allocation_has_the_nodes_of_the_run(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str | None
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    overrides = (*SLURM, "cluster.scheduler=allocation", "training.trainer.num_nodes=2", "container=/x.sqsh")
    errors = [finding for finding in machine_findings(*overrides) if finding.severity is Severity.ERROR]
    assert [words in problem.message for problem in errors if words] == [True] * (words is not None)
    assert [problem.fix for problem in errors] == ["salloc --nodes=2 --ntasks-per-node=8"] * (
        words is not None
    )


def test_the_supervisor_has_this_machines_python() -> None:
    assert supervisor_python_problem() == ""


@pytest.mark.parametrize(
    "text, words",
    [
        ("echo 3.6.2", ""),
        ("echo 3.10.0", ""),
        ("echo 3.6.1", " is 3.6.1, older than 3.6.2"),
        ("echo 2.7.18", " is 2.7.18, older than 3.6.2"),
        ("exit 1", " does not say its version"),
    ],
)
def test_a_python_too_old_for_the_supervisor_is_reported(tmp_path: Path, text: str, words: str) -> None:
    path = str(write_script(tmp_path / "python3", text))
    assert supervisor_python_problem(["/no/such/python", path]) == (words and path + words)


def test_a_machine_without_python_is_reported(programs: Path) -> None:
    problem = supervisor_python_problem(["/no/such/python", "python3"])
    assert problem == "this machine has no /no/such/python, and no python3 on PATH"


def test_the_job_script_looks_for_the_same_pythons() -> None:
    text = (ROOT / "templates" / "supervisor.sh.j2").read_text()
    assert all(name in text for name in SUPERVISOR_PYTHONS)
    assert (
        f"sys.version_info < {OLDEST_PYTHON}" in (ROOT / "slipway" / "supervisor" / "__main__.py").read_text()
    )
