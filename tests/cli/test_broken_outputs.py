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

SUBMITTED = 4  # the exit code of a job under way, as in the table of docs/jobs.md

# The ways to lose an output, in bash.
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
    # A closed stream cannot be handed to a fork.
    command = [sys.executable, "-m", "launcher.cli.app"] if ">&-" in line else forked_command()
    done = subprocess.run(
        ["bash", "-c", line, "bash", *command, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


def launch_words(tmp_path: Path) -> dict[str, list[str]]:
    """Return the words of a launch, by its kind."""
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
    code, message = slipway(line, launch_words(tmp_path)[kind], tmp_path)
    jobs = [str(101 + number) for number in range(len(slurm.submitted()))]
    assert jobs, message
    assert code == SUBMITTED, message
    assert "Traceback" not in message
    assert "submitted before the failure: job" in message
    assert set(jobs) <= set(re.findall(r"\b1\d\d\b", message)), message
    assert "slipway status 101" in message
    for directory in re.findall(r"on record in (.+)", message):
        assert Path(directory).is_dir()


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_output_is_no_failure(tmp_path: Path, slurm: FakeSlurm, kind: str) -> None:
    code, message = slipway(CLOSED, launch_words(tmp_path)[kind], tmp_path)
    assert (code, "Traceback" in message) == (0, False), message
    assert slurm.submitted()


@pytest.mark.parametrize(
    "line",
    [
        '"$@" >/dev/full 2>/dev/full',
        '"$@" >/dev/full 2>&-',
        '"$@" 2>&1 | true; exit ${PIPESTATUS[0]}',
    ],
)
def test_exit_code_reports_a_submission_if_no_output_can(tmp_path: Path, slurm: FakeSlurm, line: str) -> None:
    assert slipway(line, launch_words(tmp_path)["launch"], tmp_path) == (SUBMITTED, "")
    assert len(slurm.submitted()) == 1


@pytest.mark.parametrize("line", ['"$@" 2>/dev/full', '"$@" 2>&-', '"$@" 2> >(true)'])
@pytest.mark.parametrize(("more", "code"), [((), 0), (("training.trainer.devices=x",), 2)])
def test_an_stderr_that_cannot_be_written_changes_no_exit_code(
    tmp_path: Path, slurm: FakeSlurm, line: str, more: tuple[str, ...], code: int
) -> None:
    (tmp_path / "bin" / "python").unlink()  # causes a warning before the submission
    words = [word for word in launch_words(tmp_path)["launch"] if not word.startswith("cluster.python")]
    outcome = slipway(line, [*words, "cluster.exclude=null", "cluster.python=null", *more], tmp_path)
    assert outcome[0] == code
    assert len(slurm.submitted()) == (code == 0)


def test_refusal_of_a_later_stage_reports_the_job_of_the_first(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.refuse("gpt3_tiny")
    code, message = slipway('"$@"', launch_words(tmp_path)["stages"], tmp_path)
    assert code == SUBMITTED, message
    assert "Slurm refused the job: no gpt3_tiny" in message
    assert "submitted before the failure: job 101" in message


def test_refusal_of_a_later_array_reports_the_job_of_the_first(tmp_path: Path, slurm: FakeSlurm) -> None:
    words = launch_words(tmp_path)["sweep"][:-1]
    # Each number of nodes is an array, and the second one's script is refused.
    slurm.refuse("arrays/2/")
    code, message = slipway('"$@"', [*words, "training.trainer.num_nodes=1,2"], tmp_path)
    assert code == SUBMITTED, message
    assert "submitted before the failure: job 101" in message


def test_exit_code_is_2_if_nothing_was_submitted(tmp_path: Path, slurm: FakeSlurm) -> None:
    for words in (launch_words(tmp_path)["launch"], launch_words(tmp_path)["stages"]):
        slurm.refuse("gpt3_tiny", "tokenize_text")
        code, message = slipway(FULL, words, tmp_path)
        assert (code, "submitted before the failure" in message) == (2, False), message


def test_a_job_of_this_machine_is_reported_too(tmp_path: Path) -> None:
    words = ["launch", "training=gpt3/tiny", "cluster=local", "training.model.data.data_impl=mock"]
    code, message = slipway(FULL, [*words, "cluster.python=/bin/true"], tmp_path)
    assert code == SUBMITTED, message
    (job,) = re.findall(r"show the state: slipway status (\d+)", message)
    assert slipway('"$@"', ["status", job], tmp_path)[0] in (0, 3)


def test_a_dry_run_whose_reader_is_gone_ends_quietly(tmp_path: Path) -> None:
    words = ["launch", "training=gpt3/tiny", "cluster=local", "--dry-run"]
    assert slipway(NO_READER, words, tmp_path) == (141, "")
