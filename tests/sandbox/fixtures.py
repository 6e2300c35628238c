"""Sandboxes for the tests of every folder: booted when first asked for, once a session, always torn down."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UserError
from launcher.sandbox import Options, Sandbox, down, up
from launcher.sandbox.prerequisites import check


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """Four nodes with eight fake GPUs each and accounting; `environment()` is for subprocesses."""
    with booted(accounting=True) as one:
        yield one


@pytest.fixture(scope="session")
def plain_sandbox() -> Iterator[Sandbox]:
    """Four nodes with eight fake GPUs each; `sacct` does not answer."""
    with booted() as one:
        yield one


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for the names of sockets, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="slipway-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# Ends with the tests, however they do: a worker of pytest-xdist is killed when its session is interrupted.
_GUARD = """
import shutil, sys
from pathlib import Path
from launcher.sandbox import down
sys.stdin.read()
parent = Path(sys.argv[1])
if (parent / "sandbox").exists():
    down(parent / "sandbox")
shutil.rmtree(parent)
"""


@contextmanager
def booted(nodes: int = 4, accounting: bool = False, **choices: Any) -> Iterator[Sandbox]:
    """Boot a sandbox of its own, with further options; skip the test where that is not possible."""
    skip_without_slurm(accounting)
    parent = Path(tempfile.mkdtemp(prefix="slipway-", dir="/tmp"))
    with subprocess.Popen(
        [sys.executable, "-c", _GUARD, parent], stdin=subprocess.PIPE, start_new_session=True
    ) as guard:
        try:
            options = Options(directory=parent / "sandbox", nodes=nodes, accounting=accounting, **choices)
            yield up(options)
        finally:
            down(parent / "sandbox")
            assert guard.stdin
            guard.stdin.close()
    assert not parent.exists()


def skip_without_slurm(accounting: bool = False) -> None:
    """Skip the test, and say why, where a sandbox cannot be booted."""
    try:
        check(accounting)
    except UserError as error:
        pytest.skip(f"needs a real Slurm: {error.message}")
