"""Refusals of the system, each one message without a traceback; and odd things that work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_slipway import forked_command

MAIN = Path(__file__).resolve().parents[2] / "launcher" / "cli" / "app.py"
LOCAL = ["training=gpt3/tiny", "cluster=local", "--dry-run"]
MOCK = "training.model.data.data_impl=mock"
LONG = "x" * 300


def slipway(*arguments: str | bytes, cwd: Path, user: int | None = None, **streams: int) -> tuple[int, str]:
    # A fork is its parent's user.
    program = forked_command() if user is None else [sys.executable, "-m", "launcher.cli.app"]
    env = {**os.environ, "PYTHONPATH": str(MAIN.parents[2])}
    done = subprocess.run(
        [*program, *arguments],
        cwd=cwd,
        env=env,
        user=user,
        stdout=streams.get("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
    )
    return done.returncode, done.stderr.decode(errors="surrogateescape")


@pytest.fixture
def stranger(tmp_path: Path) -> int:
    """The user id of somebody who may not look into `private`."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    nobody = 65534
    for path in (tmp_path, *tmp_path.parents):
        if path == Path("/tmp"):
            break
        path.chmod(0o755)
    try:
        code, told = slipway("--version", cwd=tmp_path, user=nobody)
    except PermissionError as error:
        code, told = 1, str(error)
    if code != 0:
        pytest.skip(f"the checkout is not for everybody to read: {told.splitlines()[-1]}")
    (tmp_path / "private" / "there").mkdir(parents=True)
    (tmp_path / "private").chmod(0o700)
    # Where they may write: that they may not is told first.
    (tmp_path / "results").mkdir()
    (tmp_path / "results").chmod(0o777)
    return nobody


@pytest.mark.parametrize(
    "arguments",
    [
        ["launch", *LOCAL, "--config-dir", "private"],
        ["launch", *LOCAL, "--config-dir", "private/there"],
        ["launch", *LOCAL, "--template-dir", "private/there"],
        ["launch", "cluster=bcm", "container={here}/private/there/x.sqsh"],
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
    given = [word.format(here=tmp_path) for word in arguments]
    code, told = slipway(*given, cwd=tmp_path, user=stranger)
    assert "Traceback" not in told
    assert code == 2, told
    assert "permission denied" in told.lower()
    assert "private" in told


def test_characters_beyond_an_ascii_output_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "results" / "x" / "launches" / "1").mkdir(parents=True)
    command = [sys.executable, "-m", "launcher.cli.app", "status"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert r"NODES\xd7TASKS" in done.stdout, done.stderr


def test_a_run_that_one_may_not_read_hides_no_other(tmp_path: Path, stranger: int) -> None:
    for run in ("theirs", "closed", "ours"):
        (tmp_path / "results" / run / "launches" / "1").mkdir(parents=True)
    (tmp_path / "results" / "theirs" / "launches").chmod(0o700)
    (tmp_path / "results" / "closed").chmod(0o700)
    command = [sys.executable, "-m", "launcher.cli.app", "status", "--json"]
    done = subprocess.run(command, cwd=tmp_path, user=stranger, capture_output=True, text=True)
    told = {item["run"]: item["reason"] for item in json.loads(done.stdout)}
    assert set(told) == {"theirs", "ours"}
    assert told["theirs"] == "its launches cannot be read: permission denied"


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
def test_names_that_no_file_can_have(tmp_path: Path, arguments: list[str]) -> None:
    code, told = slipway(*arguments, cwd=tmp_path)
    assert "Traceback" not in told
    assert code == 2, told
    assert "name too long" in told.lower()


@pytest.mark.parametrize("arguments", [["launch", *LOCAL], ["status", "--json"]])
def test_an_output_that_is_full(tmp_path: Path, arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        code, told = slipway(*arguments, cwd=tmp_path, stdout=full.fileno())
    assert "Traceback" not in told
    assert "the output: no space left on device" in told
    assert code == 2


def test_an_output_that_is_closed(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" >&-', "bash", sys.executable, "-m", "launcher.cli.app", "launch", *LOCAL],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(MAIN.parents[2])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_templates_that_would_not_be_used(tmp_path: Path) -> None:
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "sbatch.sh.j").touch()
    code, told = slipway("launch", *LOCAL, "--template-dir", "templates", cwd=tmp_path)
    assert code == 2
    assert "sbatch.sh.j" in told
    assert "sbatch.sh.j2" in told
    (templates / "local.sh.j2").symlink_to("local.sh.j2")
    code, told = slipway("launch", *LOCAL, "--template-dir", "templates", cwd=tmp_path)
    assert code == 2
    assert "not a file that can be read" in told


def test_a_directory_whose_name_is_not_utf8(tmp_path: Path) -> None:
    here = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    here.mkdir()
    code, told = slipway("launch", *LOCAL[:2], MOCK, "cluster.python=/bin/true", "--follow", cwd=here)
    assert "Traceback" not in told
    assert code == 0, told
    (script,) = here.glob("results/gpt3_tiny/*_submission.sh")
    assert b"/caf\xe9/results/gpt3_tiny/launches/1" in script.read_bytes()
