"""Sandboxes that tests boot are gone after them, however they end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sandbox.fixtures import skip_without_slurm

SESSION = """
import time
from tests.sandbox.fixtures import booted
with booted(nodes=1) as one:
    print(one.directory, flush=True)
    time.sleep(600)
"""


@pytest.mark.slurm
def test_a_sandbox_does_not_outlive_the_tests_that_are_killed(repository: Path) -> None:
    skip_without_slurm()
    command = [sys.executable, "-c", SESSION]
    with subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout
        directory = Path(session.stdout.readline().strip())
        assert (directory / "etc" / "slurm.conf").exists()
        session.kill()
    deadline = time.monotonic() + 120
    while directory.parent.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
