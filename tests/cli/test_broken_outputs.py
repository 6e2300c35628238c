"""Exit codes where a job was submitted and something failed: 2 means that nothing was launched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked_slipway import forked_command
from tests.launching.fake_slurm import FakeSlurm, install, overrides, stages

SUBMITTED = 4  # the one of a job under way, as in the table of docs/jobs.md

# What each way to lose an output is, in bash.
FULL, CLOSED, NO_READER = '"$@" >/dev/full', '"$@" >&-', '"$@" | true; exit ${PIPESTATUS[0]}'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    programs = tmp_path / "bin"
    slurm = install(tmp_path, monkeypatch)
    (programs / "scontrol").write_text("#!/bin/bash\necho 'MaxArraySize = 1001'\n")
    (programs / "scontrol").chmod(0o755)
    return slurm


def slipway(line: str, words: Sequence[str], cwd: Path) -> tuple[int, str]:
    """Run a line of bash with `slipway WORDS` as its arguments; return its exit code and its stderr."""
    # What is closed cannot be handed to a fork.
    command = [sys.executable, "-m", "launcher.cli.app"] if ">&-" in line else forked_command()
    done = subprocess.run(
        ["bash", "-c", line, "bash", *command, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


def launches(tmp_path: Path) -> dict[str, list[str]]:
    """The words of a launch of each kind."""
    return {
        "launch": ["launch", *overrides(tmp_path)],
        "json": ["launch", "--json", *overrides(tmp_path)],
        "stages": ["launch", *stages(tmp_path)],
        "chain": ["launch", *overrides(tmp_path, "resilience.links=3", "resilience.submit=launch")],
        "sweep": ["sweep", "--json", *overrides(tmp_path, "training.model.seed=1,2")],
        "preparation": ["launch", *stages(tmp_path, "stages=[data_preparation]")],
    }


KINDS = ["launch", "json", "stages", "chain", "sweep", "preparation"]


@pytest.mark.parametrize("line", [FULL, NO_READER], ids=["full", "no reader"])
@pytest.mark.parametrize("kind", KINDS)
def test_submitted_jobs_are_reported_if_the_output_is_lost(
    tmp_path: Path, slurm: FakeSlurm, kind: str, line: str
) -> None:
    code, told = slipway(line, launches(tmp_path)[kind], tmp_path)
    jobs = [str(101 + number) for number in range(len(slurm.submitted()))]
    assert jobs, told
    assert code == SUBMITTED, told
    assert "Traceback" not in told
    assert "submitted before the failure: job" in told
    assert set(jobs) <= set(re.findall(r"\b1\d\d\b", told)), told
    assert "slipway status 101" in told
    for line_of_record in re.findall(r"on record in (.+)", told):
        assert Path(line_of_record).is_dir()


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_output_is_no_failure(tmp_path: Path, slurm: FakeSlurm, kind: str) -> None:
    code, told = slipway(CLOSED, launches(tmp_path)[kind], tmp_path)
    assert (code, "Traceback" in told) == (0, False), told
    assert slurm.submitted()


@pytest.mark.parametrize(
    "line",
    [
        '"$@" >/dev/full 2>/dev/full',
        '"$@" >/dev/full 2>&-',
        '"$@" 2>&1 | true; exit ${PIPESTATUS[0]}',
    ],
)
def test_exit_code_tells_what_no_output_can(tmp_path: Path, slurm: FakeSlurm, line: str) -> None:
    assert slipway(line, launches(tmp_path)["launch"], tmp_path) == (SUBMITTED, "")
    assert len(slurm.submitted()) == 1


@pytest.mark.parametrize("line", ['"$@" 2>/dev/full', '"$@" 2>&-', '"$@" 2> >(true)'])
@pytest.mark.parametrize(("more", "code"), [((), 0), (("training.trainer.devices=x",), 2)])
def test_an_stderr_that_cannot_be_written_changes_no_exit_code(
    tmp_path: Path, slurm: FakeSlurm, line: str, more: tuple[str, ...], code: int
) -> None:
    (tmp_path / "bin" / "python").unlink()  # a warning, which is told before the submission
    words = [word for word in launches(tmp_path)["launch"] if not word.startswith("cluster.python")]
    told = slipway(line, [*words, "cluster.exclude=null", "cluster.python=null", *more], tmp_path)
    assert told[0] == code
    assert len(slurm.submitted()) == (code == 0)


def test_a_later_stage_that_is_refused_does_not_deny_the_first(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.refuse("gpt3_tiny")
    code, told = slipway('"$@"', launches(tmp_path)["stages"], tmp_path)
    assert code == SUBMITTED, told
    assert "Slurm refused the job: no gpt3_tiny" in told
    assert "submitted before the failure: job 101" in told


def test_a_later_array_that_is_refused_does_not_deny_the_first(tmp_path: Path, slurm: FakeSlurm) -> None:
    words = launches(tmp_path)["sweep"][:-1]
    # Each number of nodes is an array, and the second one's script is refused.
    slurm.refuse("arrays/2/")
    code, told = slipway('"$@"', [*words, "training.trainer.num_nodes=1,2"], tmp_path)
    assert code == SUBMITTED, told
    assert "submitted before the failure: job 101" in told


def test_exit_code_is_2_if_nothing_was_submitted(tmp_path: Path, slurm: FakeSlurm) -> None:
    for words in (launches(tmp_path)["launch"], launches(tmp_path)["stages"]):
        slurm.refuse("gpt3_tiny", "tokenize_text")
        code, told = slipway(FULL, words, tmp_path)
        assert (code, "submitted before the failure" in told) == (2, False), told


def test_a_job_of_this_machine_is_told_too(tmp_path: Path) -> None:
    words = ["launch", "training=gpt3/tiny", "cluster=local", "training.model.data.data_impl=mock"]
    code, told = slipway(FULL, [*words, "cluster.python=/bin/true"], tmp_path)
    assert code == SUBMITTED, told
    (job,) = re.findall(r"show the state: slipway status (\d+)", told)
    assert slipway('"$@"', ["status", job], tmp_path)[0] in (0, 3)


def test_a_reader_that_is_gone_is_no_failure_of_what_is_read(tmp_path: Path) -> None:
    words = ["launch", "training=gpt3/tiny", "cluster=local", "--dry-run"]
    assert slipway(NO_READER, words, tmp_path) == (141, "")
