"""Rows of the doctor's table: equal lines of machines are merged, and answers of nodes are put together."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from launcher.checks.findings import Finding, Severity
from launcher.cli import doctor
from launcher.cli.doctor import plain_lines
from launcher.doctor.examination import Examination, apply_rules, environment_here, environment_of
from launcher.doctor.facts import machine_of
from launcher.doctor.nodes import Answers, pyxis_words, read, srun_command, start
from launcher.doctor.probe import MARK, answer_lines, gather
from launcher.doctor.report import lacking, merged, missing, ok, thing, unknown, warning
from launcher.drafting import Request, drafts
from launcher.errors import UserError
from tests.doctor.machines import FILE, GIB, ON_PYXIS, machine, slurm


def test_equal_lines_are_one_row_with_the_least_room() -> None:
    def line(free: int, severity: Severity = Severity.OK) -> Finding:
        return thing("enroot.data", "/scratch (xfs)", severity=severity, free=free)

    rows = merged([("here", [ok("slurm", "yes")]), ("n1", [line(7)]), ("n2", [line(5)]), ("n3", [line(6)])])
    assert [(row.id, row.where, row.free) for row in rows] == [
        ("slurm", ("here",), None),
        ("enroot.data", ("n1", "n2", "n3"), 5),
    ]
    separate = merged([("n1", [line(7)]), ("n2", [line(7, Severity.WARNING)])])
    assert [row.where for row in separate] == [("n1",), ("n2",)]


def test_needed_rows_are_lacking_or_unknown() -> None:
    lines = [
        missing("pyxis", "not there", needed=True),
        missing("enroot", "not there"),
        unknown("nodes", "silent", needed=True),
        ok("slurm", "there", needed=True),
    ]
    rows = merged([("here", lines)])
    assert [row.id for row in lacking(rows)] == ["pyxis"]
    assert [row.id for row in lacking(rows, Severity.UNKNOWN)] == ["nodes"]


def test_pipe_gets_a_line_for_each_thing_and_its_fix() -> None:
    lines = [
        ok("slurm", "23.11", "not shown"),
        warning("enroot.data", "/scratch", "move it", free=3 * GIB),
        missing("pyxis", "none", needed=True),
    ]
    assert list(plain_lines(merged([("here", lines)]), has_nodes=False)) == [
        "slurm        ok        23.11",
        "pyxis        missing!  none",
        "enroot.data  warning   /scratch; 3.0 GiB free",
        "                       -> move it",
    ]
    many = merged([(f"n{number}", lines[:1]) for number in range(1, 9)])
    assert list(plain_lines(many, has_nodes=True)) == ["slurm  n1, n2, ... (8)  ok  23.11"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_narrow_terminal_keeps_the_status_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"COLUMNS": "44", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    text = "no directory /var/lib/enroot/data on this node at all"
    line = missing("enroot directories", text, "ENROOT_DATA_PATH=/scratch", needed=True)
    for has_nodes in (False, True):
        doctor._print_table([replace(line, where=("login-node-01",))], has_nodes=has_nodes)
    assert terminal.getvalue().count("missing!") == 2


def test_mixed_lines_of_several_nodes_are_sorted_out() -> None:
    noise = random.Random(1)
    contents = [{"host": f"n{node}", "é": [noise.random() for _ in range(200)]} for node in (1, 2, 3)]
    lines = [line for content in contents for line in answer_lines(content)]
    assert max(map(len, lines)) < 300
    lines += [f"{MARK} n9 0 0 -", "srun: job 5 queued", f"{MARK} n8 0 two x", f"{MARK} n7 0 3 eJw"]
    random.Random(0).shuffle(lines)
    machines, without_python = read(lines)
    assert sorted(json.dumps(content) for content in machines) == sorted(map(json.dumps, contents))
    assert without_python == ["n9"]
    complete, _ = read([line for line in lines if not line.startswith(f"{MARK} n2 1 ")])
    assert sorted(content["host"] for content in complete) == ["n1", "n3"]


def test_answers_of_different_lengths_of_one_node_are_no_second_node() -> None:
    contents = [{"host": "n1", "text": text} for text in ("short", random.Random(2).randbytes(600).hex())]
    few, many = map(answer_lines, contents)
    assert len(few) != len(many)
    assert len(read([*few, *many])[0]) < 2


def surroundings_with(answers: Answers | None) -> Examination:
    return Examination(ON_PYXIS, slurm(), machine(host="login"), FILE, (), "3.11", {}, None, None, answers)


@pytest.mark.parametrize(
    ("job_python", "is_lacking", "words"),
    [
        (
            "3.6.8 /usr/libexec/platform-python",
            False,
            "3.6.8 (/usr/libexec/platform-python), which supervises jobs",
        ),
        ("3.5.2 /usr/bin/python3", True, "/usr/bin/python3 is 3.5.2: a job's supervisor needs 3.6.2"),
        ("0 /usr/bin/python3", True, "/usr/bin/python3 is 0: a job's supervisor needs 3.6.2"),
        (None, True, "no Python 3: the job supervisor cannot run on this node"),
    ],
)
def test_a_node_needs_a_python_that_keeps_jobs(job_python: str | None, is_lacking: bool, words: str) -> None:
    node = machine(files={"/images/nemo.sqsh": FILE.size}, job_python=job_python)
    rows = apply_rules(surroundings_with(Answers(1, (node,), (), None)))
    (row,) = (row for row in rows if row.id == "python" and row.where == (node.host,))
    assert (row.message, row in lacking(rows)) == (words, is_lacking)


def test_silent_nodes_do_not_count_as_healthy() -> None:
    good = machine(files={"/images/nemo.sqsh": FILE.size})
    rows = apply_rules(surroundings_with(Answers(3, (good,), ("n2",), "srun: killed")))
    (silent,) = lacking(rows, Severity.UNKNOWN)
    assert silent.message == "1 of 3 did not answer: srun: killed"
    assert [(row.where, row.id, row.message) for row in lacking(rows)] == [
        (("n2",), "python", "no Python 3: the job supervisor cannot run on this node")
    ]
    assert not lacking(apply_rules(surroundings_with(None)), Severity.UNKNOWN)
    assert "not examined" in [row.message for row in apply_rules(surroundings_with(None))]


_PYXIS_LOG = """\
slurmstepd-n2: error: pyxis: child 18246 failed with error code: 1
slurmstepd-n2: error: pyxis: failed to create container filesystem for image: /x.sqsh
slurmstepd-n1: error: pyxis: failed to create container filesystem for image: /x.sqsh
slurmstepd-n2: error: pyxis: printing enroot log file:
slurmstepd-n2: error: pyxis:     [ERROR] Invalid image format: /x.sqsh
srun: error: n2: task 1: Exited with exit code 1
"""


def test_image_that_starts_on_some_nodes_alone_is_missing() -> None:
    why = pyxis_words(_PYXIS_LOG)
    assert why == ("failed to create container filesystem for image: /x.sqsh; Invalid image format: /x.sqsh")
    assert pyxis_words("srun: error: Invalid partition\n") == "Invalid partition"
    good = machine(files={"/images/nemo.sqsh": FILE.size})
    machines = (good, machine(host="n2", files=good.files))
    rows = apply_rules(surroundings_with(Answers(2, machines, started=("n1",), why_not_started=why)))
    assert [(row.where, row.severity) for row in rows if row.id == "container"] == [
        (("n1",), Severity.OK),
        (("n2",), Severity.MISSING),
    ]
    (failure,) = lacking(rows)
    assert "starts on 1 of 2 nodes: failed to create" in failure.message
    assert not lacking(apply_rules(surroundings_with(Answers(2, machines, started=("n1", "n2")))))


def test_control_characters_of_an_image_do_not_reach_the_terminal() -> None:
    line = unknown("image", "CUDA \x1b]0;mine\x07", "as root:\nrm \x1b[2J")
    assert list(plain_lines([replace(line, where=("here",))], has_nodes=False)) == [
        "image  unknown  CUDA \\x1b]0;mine\\x07",
        "                -> as root:\nrm \\x1b[2J",
    ]


def test_more_patience_gives_an_image_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def refuse(command: list[str], **options: object) -> None:
        limits.extend(word for word in command if word.startswith("--time="))
        raise OSError(2, "no such file")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    plan = drafts(Request(overrides=["cluster=bcm"], command=["slipway"]))[0].plan
    for patience in (1.0, 3601.0):
        with pytest.raises(UserError):
            start(plan, "/x.sqsh", 1, {}, patience)
    assert limits == ["--time=5", "--time=61"]


def test_node_that_differs_has_a_row_of_its_own() -> None:
    good = machine(files={"/images/nemo.sqsh": FILE.size})
    bad = machine(host="n2", files={"/images/nemo.sqsh": None})
    rows = apply_rules(surroundings_with(Answers(2, (good, bad))))
    assert [(row.id, row.where) for row in lacking(rows)] == [("image", ("n2",))]
    assert [row.where for row in rows if row.id == "enroot.data"] == [("here", "n1", "n2")]


@pytest.mark.parametrize(
    ("overrides", "expected", "absent"),
    [
        (
            ["cluster=bcm", "cluster.partition=gpu", "cluster.account=me", "cluster.nodelist='n[3-4]'"],
            ["--partition=gpu", "--account=me", "--nodelist=n[3-4]", "--gres=gpu:1", "--nodes=2"],
            ["--overlap"],
        ),
        (["cluster=interactive"], ["--overlap", "--nodes=2"], ["--gres=gpu:1"]),
    ],
)
def test_examined_nodes_are_those_of_the_launch(
    overrides: list[str], expected: list[str], absent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # as inside salloc
    plan = drafts(Request(overrides=overrides, command=["slipway"]))[0].plan
    command_by_name = srun_command(plan, ["n1", "n2"], "me")
    assert {"--nodes=2", "--nodelist=n1,n2"} <= set(command_by_name), "what was looked at is started on"
    command = srun_command(plan, 2, "me")
    assert set(expected) <= set(command)
    assert not set(absent) & set(command)


def test_paths_of_enroot_in_a_job_are_ignored_as_by_pyxis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths of `env_vars` would be right, and Pyxis ignores them."""
    monkeypatch.setenv("ENROOT_RUNTIME_PATH", "/mine")
    variables = {"ENROOT_DATA_PATH": "/scratch", "ENROOT_RESTRICT_DEV": "y"}
    overrides = ["cluster=bcm", *(f"env_vars.{name}={value}" for name, value in variables.items())]
    plan = drafts(Request(overrides=overrides, command=["slipway"]))[0].plan
    job_environment = environment_of(plan)
    assert {name for name in job_environment if name.startswith("ENROOT_")} == {"ENROOT_RESTRICT_DEV"}
    # An import does not go through Pyxis, and is no job.
    environment = environment_here(plan)
    assert {name for name in environment if name.startswith("ENROOT_")} == {"ENROOT_RUNTIME_PATH"}


def test_report_of_the_probe_has_the_fields_of_the_facts() -> None:
    """The report is of this machine, and is read like a node's."""
    content = gather({"files": {"a": __file__, "b": "/nowhere/x"}}, {"PATH": "", "HOME": "/"})
    facts = machine_of(json.loads(json.dumps(content)))
    assert facts.files["/nowhere/x"] is None
    assert facts.files[__file__]
    assert facts.tools == {}
    assert read(answer_lines(content))[0] == [json.loads(json.dumps(content))]
