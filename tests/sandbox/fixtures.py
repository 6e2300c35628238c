"""Sandboxes for the tests of every folder: booted when first asked for, once a session, always torn down."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def booted(nodes: int = 4, accounting: bool = False) -> Iterator[Sandbox]:
    """Boot a sandbox of its own; skip the test where that is not possible."""
    skip_without_slurm(accounting)
    parent = Path(tempfile.mkdtemp(prefix="slipway-", dir="/tmp"))
    try:
        yield up(Options(directory=parent / "sandbox", nodes=nodes, accounting=accounting))
    finally:
        down(parent / "sandbox")
        shutil.rmtree(parent)


def skip_without_slurm(accounting: bool = False) -> None:
    """Skip the test, and say why, where a sandbox cannot be booted."""
    try:
        check(accounting)
    except UserError as error:
        pytest.skip(f"needs a real Slurm: {error.message}")
