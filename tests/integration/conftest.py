"""A small real corpus, made by the product itself, and a way to run the command line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked_slipway import SLIPWAY, run_forked

Run = Callable[..., subprocess.CompletedProcess[str]]


def run_command(
    *arguments: str | Path, cwd: Path, check: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user in `cwd` would; fail with its output unless it exits with `check`.

    `slipway` is forked from a process that has imported it, ``launcher/main.py`` is not.
    """
    command, environment = [str(argument) for argument in arguments], {**os.environ, **env}
    if command[0] == str(SLIPWAY):
        done = run_forked(command[1:], cwd=cwd, env=environment, timeout=280)
    else:
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    if check is not None:
        assert done.returncode == check, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tokenized text in data/, as `slipway data tokenize` leaves it."""
    directory = tmp_path_factory.mktemp("workplace")
    source = Path(os.__file__).parent
    options = ["--pattern", "*.py", "--max-files", "60", "--vocab-size", "512"]
    run_command(SLIPWAY, "data", "tokenize", source, *options, cwd=directory)
    return directory
