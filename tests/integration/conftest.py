"""A small real corpus, made by the product itself, and a way to run the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SLIPWAY = Path(sys.executable).with_name("slipway")

Run = Callable[..., subprocess.CompletedProcess[str]]


def run_command(
    *arguments: str | Path, cwd: Path, check: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user in `cwd` would; fail with its output unless it exits with `check`."""
    done = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=280,
    )
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
