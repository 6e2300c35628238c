"""A selection of `make test-slurm` on Debian 13: Slurm 24.11 and Python 3.13."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sandbox.fixtures import skip_without_slurm

# Finding and reporting a launch; identity and lost answers, with accounting and without; chains and a
# requeue; verbs that act on jobs; a lost answer of sbatch. None of them needs torch.
SELECTED = [
    "tests/jobs/on_slurm/test_found_again_on_slurm.py",
    "tests/schedulers/test_identity_on_slurm.py",
    "tests/jobs/on_slurm/test_tracked_chains.py",
    "tests/schedulers/test_slurm_verbs.py",
    "tests/runs/test_killed_launchers.py::test_an_answer_that_is_lost_is_no_refusal",
]


@pytest.mark.slurm
@pytest.mark.timeout(1500)  # the first time a root file system is made
def test_selected_tests_pass_on_debian_13(repository: Path) -> None:
    if shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("debootstrap is not installed: `make test-slurm` installs it")
    skip_without_slurm()
    root = [sys.executable, repository / "scripts" / "debian_root.py", "trixie"]
    setup = ["sh", "-c", "[ -x .venv/bin/pytest ] || scripts/venv.sh python3 dev"]
    for command in ([*root, *setup], [*root, "--tree=shared", ".venv/bin/pytest", "-q", *SELECTED]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout
