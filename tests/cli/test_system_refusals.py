"""Refusals by the system, each one message without a traceback; and odd inputs that work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_slipway import forked_command, run_forked

MAIN = Path(__file__).resolve().parents[2] / "launcher" / "cli" / "app.py"
LOCAL = ["training=gpt3/tiny", "cluster=local", "--dry-run"]
MOCK = "training.model.data.data_impl=mock"
LONG = "x" * 300


def slipway(*arguments: str | bytes, cwd: Path, **streams: int) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": str(MAIN.parents[2])}
    done = subprocess.run(
        [*forked_command(), *arguments],
        cwd=cwd,
        env=env,
        stdout=streams.get("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
    )
    return done.returncode, done.stderr.decode(errors="surrogateescape")


@pytest.fixture
def stranger(tmp_path: Path, other_user: int) -> int:
    """Make `private`; return the id of a user who may not read it."""
    try:
        command = [sys.executable, "-m", "launcher.cli.app", "--version"]
        subprocess.run(command, cwd=MAIN.parents[2], user=other_user, capture_output=True, check=True)
    except (PermissionError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the checkout is not for everybody to read: {error}")
    (tmp_path / "private" / "there").mkdir(parents=True)
    (tmp_path / "private").chmod(0o700)
    # A directory that the user may write: otherwise that refusal came first.
    (tmp_path / "results").mkdir()
    (tmp_path / "results").chmod(0o777)
    return other_user


@pytest.mark.parametrize(
    "arguments",
    [
        ["launch", *LOCAL, "--config-dir", "private"],
        ["launch", *LOCAL, "--config-dir", "private/there"],
        ["launch", *LOCAL, "--template-dir", "private/there"],
        ["launch", "training=gpt3/126m", "cluster=bcm", "container={here}/private/there/x.sqsh"],
        ["launch", "training=gpt3/tiny", "cluster=local", MOCK, "cluster.python={here}/private/there/python"],
        ["launch", "training=gpt3/tiny", "cluster=local", MOCK, "base_results_dir={here}/private/there"],
        ["launch", "training=gpt3/tiny", "cluster=sandbox", "cluster.slurm_conf={here}/private/there/conf"],
        ["status", "private/there"],
        ["status", "--base-results-dir", "private/there"],
        ["data", "tokenize", "private/there"],
        ["init", "private/there"],
    ],
    ids=lambda words: " ".join(words)[-60:],
)
def test_unreadable_files_are_reported(tmp_path: Path, stranger: int, arguments: list[str]) -> None:
    command = [word.format(here=tmp_path) for word in arguments]
    env = {**os.environ, "PYTHONPATH": str(MAIN.parents[2])}
    done = run_forked(command, cwd=tmp_path, env=env, timeout=100, user=stranger)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2, done.stderr
    assert "permission denied" in done.stderr.lower()
    assert "private" in done.stderr


def test_characters_beyond_an_ascii_output_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "results" / "x" / "launches" / "1").mkdir(parents=True)
    command = [sys.executable, "-m", "launcher.cli.app", "status"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert r"NODES\xd7TASKS" in done.stdout, done.stderr


def test_an_unreadable_run_hides_no_other(tmp_path: Path, stranger: int) -> None:
    for run in ("theirs", "closed", "ours"):
        (tmp_path / "results" / run / "launches" / "1").mkdir(parents=True)
    (tmp_path / "results" / "theirs" / "launches").chmod(0o700)
    (tmp_path / "results" / "closed").chmod(0o700)
    command = [sys.executable, "-m", "launcher.cli.app", "status", "--json"]
    done = subprocess.run(command, cwd=tmp_path, user=stranger, capture_output=True, text=True)
    reasons = {item["run"]: item["reason"] for item in json.loads(done.stdout)}
    assert set(reasons) == {"theirs", "ours"}
    assert reasons["theirs"] == "its launches cannot be read: permission denied"


@pytest.mark.parametrize(
    "arguments",
    [
        ["launch", *LOCAL, "--config-dir", LONG],
        ["launch", *LOCAL, "--template-dir", LONG],
        ["status", LONG],
        ["data", "tokenize", LONG],
    ],
    ids=lambda words: " ".join(words)[:20],
)
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    code, message = slipway(*arguments, cwd=tmp_path)
    assert "Traceback" not in message
    assert code == 2, message
    assert "name too long" in message.lower()


@pytest.mark.parametrize("arguments", [["launch", *LOCAL], ["status", "--json"]])
def test_a_full_output_is_reported(tmp_path: Path, arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        code, message = slipway(*arguments, cwd=tmp_path, stdout=full.fileno())
    assert "Traceback" not in message
    assert "the output: no space left on device" in message
    assert code == 2


def test_a_closed_output_is_no_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" >&-', "bash", sys.executable, "-m", "launcher.cli.app", "launch", *LOCAL],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(MAIN.parents[2])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_templates_that_would_not_be_used_are_refused(tmp_path: Path) -> None:
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "sbatch.sh.j").touch()
    code, message = slipway("launch", *LOCAL, "--template-dir", "templates", cwd=tmp_path)
    assert code == 2
    assert "sbatch.sh.j" in message
    assert "sbatch.sh.j2" in message
    (templates / "local.sh.j2").symlink_to("local.sh.j2")
    code, message = slipway("launch", *LOCAL, "--template-dir", "templates", cwd=tmp_path)
    assert code == 2
    assert "not a file that can be read" in message


def test_a_launch_works_in_a_directory_whose_name_is_not_utf8(tmp_path: Path) -> None:
    cwd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    cwd.mkdir()
    code, message = slipway("launch", *LOCAL[:2], MOCK, "cluster.python=/bin/true", "--follow", cwd=cwd)
    assert "Traceback" not in message
    assert code == 0, message
    (script,) = cwd.glob("results/gpt3_tiny/*_submission.sh")
    assert b"/caf\xe9/results/gpt3_tiny/launches/1" in script.read_bytes()
