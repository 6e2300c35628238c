"""Ctrl-C while modules are imported: exit code 130, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# The script that pip writes for a command, and the NeMo launcher's way to start.
SCRIPT = "import re\nimport sys\nfrom launcher.main import main\nsys.exit(main())\n"
MAIN = f"import runpy\nrunpy.run_path({str(REPOSITORY / 'launcher' / 'main.py')!r}, run_name='__main__')\n"
# Ctrl-C comes when a module is looked for.
INTERRUPT = """
import importlib.abc, os, signal, sys, time

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"]:
            os.environ["AT"] = ""
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("program", [SCRIPT, MAIN], ids=["slipway", "main.py"])
@pytest.mark.parametrize(
    "module",
    [
        "launcher.cli.app",
        "argparse",
        "launcher.errors",
        "launcher.cli.launch",
        "hydra",
        "omegaconf",
        "pydantic",
        "jinja2",
        "launcher.ui.tables",
    ],
)
def test_an_interrupted_import_is_no_traceback(tmp_path: Path, program: str, module: str) -> None:
    verb = ["launch"] if program == SCRIPT else []
    words = [*verb, "training=gpt3/126m", "cluster=bcm", "--dry-run"]
    done = subprocess.run(
        # A process that a script starts in the background ignores Ctrl-C.
        ["env", "--default-signal=INT", sys.executable, "-c", INTERRUPT + program, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "AT": module},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_command_starts_the_tested_module() -> None:
    assert "slipway = launcher.main:main" in (REPOSITORY / "setup.cfg").read_text()


def test_process_that_ignores_interrupts_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        ["env", "--ignore-signal=INT", sys.executable, "-c", INTERRUPT + SCRIPT, "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "AT": "argparse"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("slipway ")
