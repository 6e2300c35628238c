"""The shipped supervisor, under every Python of this machine from 3.6 on."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.rendering.supervision import supervisor_archive
from tests.failures.failure_samples import SAMPLES

PROGRAMS = Path(__file__).parent / "programs"
# From the oldest that it runs with to the newest that Slipway itself claims.
MINORS = range(6, 15)


@functools.cache
def interpreters() -> dict[str, str]:
    """Return a Python of this machine for each minor version: pyenv's, or one of ``PATH``."""
    paths: dict[str, str] = {}
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for directory in sorted((root / "versions").glob("[23].*")):
        match = re.fullmatch(r"([23]\.\d+)\.\d+", directory.name)
        if match and os.access(directory / "bin" / "python", os.X_OK):
            paths[match[1]] = str(directory / "bin" / "python")
    for version in ("2.7", *(f"3.{minor}" for minor in MINORS)):
        path = shutil.which(f"python{version}")
        # One of pyenv's shims may be of no version that is there.
        if version not in paths and path and subprocess.run([path, "-c", ""], check=False).returncode == 0:
            paths[version] = path
    return paths


def interpreter(version: str) -> str:
    """Return the Python of a version; skip the test without one."""
    return interpreters().get(version) or pytest.skip(f"no Python {version} here")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the supervisor as it lies in a launch directory."""
    path = tmp_path_factory.mktemp("supervisor") / "supervisor.pyz"
    path.write_bytes(supervisor_archive())
    return path


@pytest.mark.parametrize("version", [f"3.{minor}" for minor in MINORS])
def test_supervisor_passes_its_checks(version: str, archive: Path, tmp_path: Path) -> None:
    """The checks use the standard library alone; a warning is an error."""
    samples = [
        (
            sample.name,
            [sample.rule, sample.verdict, sample.nodes],
            sample.facts,
            [sample.left, *sample.log.split("\n")],
            sample.hosts,
            sample.tasks_per_node,
            sample.down,
        )
        for sample in SAMPLES
    ]
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    command = [PROGRAMS / "run_checks.py", archive, tmp_path / "samples.json"]
    done = subprocess.run(
        [interpreter(version), "-IS", "-W", "error", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_two_builds_have_the_same_bytes(repository: Path, tmp_path: Path) -> None:
    """This holds for a copy with other times and permissions, and with bytecode beside the sources."""
    copy = tmp_path / "slipway" / "supervisor"
    shutil.copytree(repository / "slipway", copy.parent, copy_function=shutil.copyfile)
    (copy / "chain.py").chmod(0o600)
    (copy / "__pycache__").mkdir(exist_ok=True)
    source = repository / "slipway" / "supervisor"
    assert (copy / "chain.py").stat().st_mtime != (source / "chain.py").stat().st_mtime
    assert supervisor_archive(copy) == supervisor_archive()
    (copy / "chain.py").write_text("")
    supervisor_archive.cache_clear()
    assert supervisor_archive(copy) != supervisor_archive()


@pytest.mark.parametrize("version", ["2.7"])
def test_too_old_python_is_reported_in_one_line(version: str, archive: Path) -> None:
    command = [interpreter(version), archive, "0123abcd", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"[^\n]*Python 3\.6\.2 or newer[^\n]*\n", done.stderr)
