"""Sandboxes for the tests of every folder: booted at the first request, once a session, always torn down."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.boot import short_parent
from launcher.errors import UserError
from launcher.sandbox.lifecycle import Sandbox, down, up
from launcher.sandbox.options import Ports, SandboxOptions
from launcher.sandbox.prerequisites import check, find_program, slurm_version
from launcher.sandbox.state import SandboxRecord, load

# The value of --accounting; None: each test chooses.
_requested_accounting: bool | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _requested_accounting
    _requested_accounting = {"on": True, "off": False}.get(config.getoption("--accounting"))


def _accounting(default: bool) -> bool:
    return default if _requested_accounting is None else _requested_accounting


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """Four nodes with eight fake GPUs each; with accounting, unless --accounting=off.

    `environment()` is for subprocesses.
    """
    with booted(accounting=_accounting(default=True)) as booted_sandbox:
        yield booted_sandbox


@pytest.fixture(scope="session")
def plain_sandbox() -> Iterator[Sandbox]:
    """Four nodes with eight fake GPUs each; without accounting, unless --accounting=on."""
    with booted(accounting=_accounting(default=False)) as booted_sandbox:
        yield booted_sandbox


@pytest.fixture(scope="session")
def accounting_sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox with accounting: `sandbox`, or another one if that has none."""
    if _requested_accounting is not False:
        yield request.getfixturevalue("sandbox")
        return
    with booted(accounting=True) as booted_sandbox:
        yield booted_sandbox


@pytest.fixture(scope="session")
def no_accounting_sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox without accounting: `plain_sandbox`, or another one if that has accounting."""
    if _requested_accounting is not True:
        yield request.getfixturevalue("plain_sandbox")
        return
    with booted(accounting=False) as booted_sandbox:
        yield booted_sandbox


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for the names of sockets, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="slipway-", dir=short_parent()))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# Tears down when the tests end, however: a worker of pytest-xdist is killed when its session is interrupted.
_GUARD = """
import shutil, sys
from pathlib import Path
from launcher.sandbox.lifecycle import down
sys.stdin.read()
parent = Path(sys.argv[1])
if (parent / "sandbox").exists():
    down(parent / "sandbox")
shutil.rmtree(parent)
"""


@contextmanager
def booted(nodes: int = 4, accounting: bool | None = None, **choices: Any) -> Iterator[Sandbox]:
    """Boot another sandbox, with further options; skip the test where that is not possible.

    Tests about accounting pass `accounting`; None means the choice of --accounting, else no accounting.
    """
    accounting = _accounting(default=False) if accounting is None else accounting
    skip_without_slurm(accounting)
    parent = Path(tempfile.mkdtemp(prefix="slipway-", dir=short_parent()))
    with subprocess.Popen(
        [sys.executable, "-c", _GUARD, parent], stdin=subprocess.PIPE, start_new_session=True
    ) as guard:
        try:
            options = SandboxOptions(
                directory=parent / "sandbox", nodes=nodes, accounting=accounting, **choices
            )
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


def slurm_is_at_least(year: int, month: int) -> bool:
    """Return whether the installed Slurm, if there is one, is of that version or later."""
    return find_program("slurmctld") is not None and slurm_version() >= (year, month)


def write_and_read(options: SandboxOptions, lacking: str | None = None) -> SandboxOptions:
    """Write options and return them as read again; an older version wrote no option `lacking`."""
    SandboxRecord(options, Ports(17000, options.nodes)).save()
    file = options.directory / "sandbox.json"
    record = json.loads(file.read_text())
    record["options"].pop(lacking, None)
    file.write_text(json.dumps(record))
    loaded = load(options.directory)
    assert loaded is not None
    return loaded.options
