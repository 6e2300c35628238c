"""The wheel, built once a session, and a virtual environment that has it and nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.checkout import copy

# Imported as the environment starts: writes down each file of the checkout that a process opens.
WATCH = """
import os, sys

def watch(event, arguments, checkout={checkout!r}, log={log!r}):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(checkout):
        if not arguments[0].startswith({allowed!r}):
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, os.fsencode(arguments[0]) + b"\\n")
            os.close(descriptor)

sys.addaudithook(watch)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command to its end; fail with its output unless it exits with 0."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment or None,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel; `opened` lists the checkout's files that it has opened."""

    directory: Path
    environment: dict[str, str]
    opened: Path

    def run(self, *command: str | Path, cwd: Path, **environment: str) -> str:
        return run(*command, cwd=cwd, **self.environment, **environment)

    def files_of_the_checkout(self) -> list[str]:
        return self.opened.read_text().splitlines() if self.opened.exists() else []


@pytest.fixture(scope="session")
def source(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in: what an earlier build left in the checkout would get into the wheel."""
    return copy(repository, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def dist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python -m build`, offline: a source distribution, and the wheel that is built from that."""
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, cwd=source)
    return directory


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("slipway-*.whl")
    return path


@pytest.fixture(scope="session")
def installed(repository: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("installed")
    venv, opened = base / "venv", base / "opened"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=base)
    (site,) = venv.glob("lib/python*/site-packages")
    # The dependencies, as plain directories: a .pth in them, such as an editable Slipway's, is not read.
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    watch = WATCH.format(checkout=f"{repository}/", allowed=f"{sys.prefix}/", log=str(opened))
    (site / "checkout_watch.py").write_text(watch)
    (site / "others.pth").write_text("\n".join([*dependencies, "import checkout_watch"]) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--quiet"]
    # Python compiles each module when it is first imported.
    run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", "--no-compile", wheel, cwd=base)
    (base / "home").mkdir()
    path = [part for part in os.environ["PATH"].split(":") if not part.startswith(str(repository))]
    environment = {"HOME": str(base / "home"), "PATH": ":".join([str(venv / "bin"), *path])}
    return Installed(venv, environment, opened)
